"""The one lifecycle of every loop: start, wake, stop. The only place that sleeps."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress


class Loop:
    """Calls a step again and again: after its interval, or at once when woken.

    Start is idempotent, stop too and allowed before start. ``died`` is called with the name and the error of
    a step that raises, which ends the loop: a worker that goes on without it would look alive and lose jobs.
    ``interval`` counts from the start of one round to the start of the next; ``jitter`` is the share of it
    by which it is lengthened at most. ``at_once``: begin with a round, and not with waiting for one.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
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
        """Whether its task was cancelled, by ``stop`` or because the event loop ends."""
        return self._task is not None and (self._task.cancelling() > 0 or self._task.cancelled())

    def start(self) -> None:
        """Begin with the first round, or with waiting for it."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"jsworker {self._name}")

    def wake(self) -> None:
        """Begin the next round now, or right after the present one."""
        self._woken.set()

    def end(self) -> None:
        """Begin no other round after the present one; may be called by the step itself."""
        self._ending = True
        self._woken.set()

    async def stop(self, *, within: float = 0.0) -> None:
        """Let the present round end within so many seconds, then cancel it; begin no other."""
        self.end()  # should the round lose the cancellation, it is the last one all the same
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
