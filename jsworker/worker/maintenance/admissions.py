"""Limits in a worker: writes those of its classes, reads those of the table, wakes held jobs.

The worker that ends a run claims a held job of the same key at once. This finds the other held jobs that may
begin: after the death of an owner, a new token of a rate, the end of a pause, or a higher limit.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused
from jsworker.ownership.transitions import admission, limits
from jsworker.ownership.transitions.admission import WaitingKey
from jsworker.ownership.transitions.limits import Numbers
from jsworker.ownership.transitions.looks import KindLimits
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.intake import Consumer, wake_held
from jsworker.worker.pipeline.kinds import AdmissionState, numbers_of

_SHORTEST_WAIT_SECONDS: Final = 0.01
_SOON_SECONDS: Final = 0.02
"""Delay of a look that is not made for one particular token."""
_EARLY_SECONDS: Final = 0.002
"""A timer may fire so much too early."""
_OTHERS_SECONDS: Final = 0.05
"""A token is left for so long to the worker that took the previous one."""
_REST: Final = 4.0
"""A look is followed by a rest of so many times its length, so tokens of very many keys come later. The
shorter of the last two looks counts, because the first look of all is slow."""
_MOST_PAGES: Final = 10
"""The most pages of keys in one look; the next look continues behind them."""
_BEGINNING: Final = ("", "")
TIDY_SECONDS: Final = 600.0
"""The longest time between two steps: no event announces rows to tidy away."""
_TIDY_MORE_SECONDS: Final = 0.5
"""The time until more rows are tidied away, where there were more than one statement takes."""


async def write_limits(context: WorkerContext) -> None:
    """Write the limits and rates of this worker's classes into the table, at its start.

    Raises:
        DatabaseUnavailable, DatabaseRefused: not all of them were written.
    """
    new = {name: numbers_of(kind) for name, kind in context.kinds.items()}
    try:
        changed = await limits.write_code(context.database, new)
    except DatabaseRefused as error:  # the installation is older and has not granted the rights yet
        if any(new.values()):
            raise
        context.complaints.report("limits", str(error))
        return
    for kind in changed:
        numbers = new[kind] or Numbers(None)
        context.events.emit("limit.changed", kind=kind, **numbers._asdict())


class Admissions:
    """Keeps limits and pauses up to date, and finds held jobs that may begin; ``wake`` begins a step."""

    def __init__(
        self, context: WorkerContext, consumers: Mapping[str, Consumer], *, wake: Callable[[], None]
    ) -> None:
        self._context = context
        self._consumers = consumers
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._took = 0.0  # seconds of the last look
        self._rest = 0.0
        self._place = _BEGINNING
        self._tidy_at = boottime() + TIDY_SECONDS
        self._more_to_tidy = False

    async def learn(self, found: Mapping[str, KindLimits]) -> None:
        """Take note of which kinds are limited or paused; a kind that is not in ``found`` is neither."""
        for name, consumer in self._consumers.items():
            known, state = found.get(name), consumer.state
            if known is not None and known.is_limited and not state.is_counted:
                await self._count(state, name)
            is_paused = known is not None and known.is_paused
            if is_paused is not state.is_paused:
                state.is_paused = is_paused
                self._context.events.emit("limit.paused" if is_paused else "limit.resumed", kind=name, key="")
                self._context.room.notify()  # a paused kind leaves its slots to others
                if not is_paused:
                    self._wake()

    async def _count(self, state: AdmissionState, kind: str) -> None:
        """Count runs that were claimed without admission, and repeat it until no such claim can follow."""
        state.is_limited = True
        is_last = not state.plain_claims
        with self._context.noting("limits"):
            counts_all = await limits.count_running(self._context.database, kind)
            state.is_counted = is_last and counts_all

    async def step(self) -> None:
        """Claim or wake held jobs that may begin, and begin the next step when another one may."""
        self.close()
        if not self._context.health.up:
            return
        with self._context.noting("held jobs"):
            waits: list[float] = []
            began = boottime()
            free: list[tuple[str, str]] = []
            for _ in range(_MOST_PAGES):
                keys = await admission.waiting_keys(self._context.database, after=self._place)
                is_last = len(keys) < admission.MOST_KEYS
                self._place = _BEGINNING if is_last else (keys[-1].kind, keys[-1].key)
                waits += [wait for key in keys if (wait := self._wait_for(key)) is not None]
                free = [(key.kind, key.key) for key in keys if key.jobs > 0]
                await self._free(free)
                if is_last:
                    break
            else:
                if free:  # for example after a pause: further keys may be free, too
                    waits.append(0.0)
            took, before = boottime() - began, self._took
            self._took, self._rest = took, _REST * min(took, before)
            if waits:
                self._wake_in(min(waits))
            await self._tidy()

    async def _tidy(self) -> None:
        """Tidy rows away if it is time, and begin another step for those that are left."""
        if boottime() >= self._tidy_at:
            self._tidy_at, self._more_to_tidy = boottime() + TIDY_SECONDS, False
            if await limits.tidy(self._context.database):
                self._tidy_at, self._more_to_tidy = boottime() + _TIDY_MORE_SECONDS, True
        if self._more_to_tidy:
            self._wake_in(self._tidy_at - boottime())

    def look_soon(self) -> None:
        """Begin a step within a moment: a job waits for an instant that the last step did not know of."""
        self._wake_in(_spread(_SOON_SECONDS))

    def close(self) -> None:
        """Cancel the timer of the next step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for(self, key: WaitingKey) -> float | None:
        """Return in how many seconds another job of a key may begin; None if that needs no timer here."""
        consumer = self._consumers.get(key.kind)
        if consumer is not None and key.step is not None:
            consumer.state.is_rated = True
        if key.seconds is None or (consumer is None and key.jobs > 0):
            return None  # jobs of other kinds are woken now; workers that claim them set their own timers
        if key.step is not None and key.step < _SHORTEST_WAIT_SECONDS:
            return max(key.seconds, _spread(_SOON_SECONDS))
        # The worker that takes a token looks for the next one exactly in time, the others a little later: or
        # each token would cost a look of every worker.
        return key.seconds if key.jobs > 0 else key.seconds + _spread(_OTHERS_SECONDS)

    async def _free(self, ready: Sequence[tuple[str, str]]) -> None:
        of_others: defaultdict[str, list[str]] = defaultdict(list)
        for kind, key in ready:
            if (consumer := self._consumers.get(kind)) is not None:
                consumer.free(key)
            else:
                of_others[kind].append(key)
        for kind, names in of_others.items():
            await wake_held(self._context, kind, names)

    def _wake_in(self, seconds: float) -> None:
        """Begin a step in ``seconds``, unless one begins sooner."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(seconds + _EARLY_SECONDS, _SHORTEST_WAIT_SECONDS, self._rest)
        if self._timer is None or at < self._timer.when():
            self.close()
            self._timer = loop.call_at(at, self._wake)


def _spread(seconds: float) -> float:
    return seconds * random.uniform(1, 2)  # noqa: S311 -- spreads load, hides nothing
