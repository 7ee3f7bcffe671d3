"""The lifecycle of all loops: start, wake, stop. Loops sleep only here."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress


class Loop:
    """Calls a step again and again: after its interval, or at once when woken.

    ``start`` and ``stop`` may be called repeatedly, and ``stop`` before ``start``. If a step raises, the
    loop ends and ``died`` is called with the name and the error: a worker that goes on without the loop
    would look alive and lose jobs. ``interval`` is from the start of one round to the start of the next; it
    is lengthened by a random share of at most ``jitter``. ``at_once``: begin with a round instead of
    waiting for the first.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[object]],
        *,
        interval: float,
        died: Callable[[str, BaseException], None],
        jitter: float = 0.0,
        at_once: bool = True,
    ) -> None:
        self._name = name
        self._step = step
        self._interval = interval
        self._jitter = jitter
        self._at_once = at_once
        self._died = died
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ending = False

    @property
    def is_cancelled(self) -> bool:
        """Whether its task was cancelled, by ``stop`` or because the event loop ends.

        A time-out within the step, or of the wait between two rounds, cancels the task for a moment, too.
        """
        return self._task is not None and (self._task.cancelling() > 0 or self._task.cancelled())

    def start(self) -> None:
        """Start the loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"jsworker {self._name}")

    def wake(self) -> None:
        """Begin the next round now, or right after the present one."""
        self._woken.set()

    def end(self) -> None:
        """Begin no round after the present one; the step itself may call this."""
        self._ending = True
        self._woken.set()

    async def stop(self, *, within: float = 0.0) -> None:
        """Let the present round end for ``within`` seconds, then cancel it; begin no other."""
        self.end()  # even if the round swallows the cancellation, it is the last one
        if self._task is None:
            return
        if within > 0:
            await asyncio.wait({self._task}, timeout=within)
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        if not self._at_once:
            await self._wait(self._interval)
        while not self._ending:
            started = clock()
            self._woken.clear()
            try:
                await self._step()
            except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
                self._died(self._name, error)
                return
            spread = 1 + random.uniform(0, self._jitter)  # noqa: S311 -- spreads load, hides nothing
            await self._wait(started + self._interval * spread - clock())

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()
