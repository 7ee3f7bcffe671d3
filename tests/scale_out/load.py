"""Jobs that are enqueued while servers come and go, and what became of them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from jsworker import JobClient
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from tests.support.polling import eventually

JOB_SECONDS = 0.02
_KINDS = ("brief", "booked")

Query = Callable[[str, Sequence[str]], Awaitable[list[tuple[Any, ...]]]]
"""Asks the database that has survived; ``%s`` in the statement is the ids."""

_LIVE = """
SELECT count(*) FROM jsworker.jobs
WHERE id = ANY(%s::uuid[]) AND status IN ('scheduled', 'queued', 'processing')
"""
_COMPLETED = """
SELECT extract(epoch FROM created_at)::float, extract(epoch FROM finished_at)::float FROM jsworker.jobs
WHERE id = ANY(%s::uuid[]) AND status = 'completed' ORDER BY finished_at
"""
_TWICE = """
SELECT job_id::text FROM faults.moves WHERE now = 'completed' AND job_id = ANY(%s::uuid[])
GROUP BY job_id HAVING count(*) > 1
"""
_BOOKED_WRONGLY = """
SELECT j.id::text FROM jsworker.jobs AS j
WHERE j.kind = 'booked' AND j.id = ANY(%s::uuid[])
  AND (SELECT count(*) FROM faults.effects AS e WHERE e.job_id = j.id) <> (j.status = 'completed')::int
"""


class Load:
    """A producer at a steady rate; ``async with`` begins and ends it.

    Attributes:
        returned: ids of the jobs whose ``enqueue`` has returned.
        unclear: how many calls ended in an error: their jobs may exist.
    """

    def __init__(self, settings: Settings, *, rate: float) -> None:
        """Connect nothing yet; ``rate`` is in jobs a second."""
        self._client = JobClient(settings)
        self._pause = 1 / rate
        self._calls: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self.returned: list[str] = []
        self.unclear = 0

    async def __aenter__(self) -> Self:
        await self._client.open()
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticking
        await asyncio.gather(*self._calls)
        await self._client.close()

    async def enqueued(self, further: int, seconds: float = 30.0) -> None:
        """Wait until so many more calls have returned."""
        wanted = len(self.returned) + further

        async def check() -> None:
            assert len(self.returned) >= wanted, f"{len(self.returned)} of {wanted} enqueued"

        await eventually(check, seconds=seconds)

    async def _tick(self) -> None:
        number = 0
        while True:
            call = asyncio.create_task(self._enqueue(_KINDS[number % len(_KINDS)]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            number += 1
            await asyncio.sleep(self._pause)

    async def _enqueue(self, kind: str) -> None:
        try:
            enqueued = await self._client.enqueue(kind, {"seconds": JOB_SECONDS})
        except DatabaseUnavailable:
            self.unclear += 1
        else:
            self.returned.append(str(enqueued.id))


@dataclass(frozen=True)
class Outcome:
    """What became of the jobs whose ``enqueue`` returned.

    Attributes:
        lost: of them, how many are not completed.
        twice: how many were completed, or have had their effect, more often than once.
        spans: of each completed job when it was enqueued and completed, in seconds since 1970, by their ends.
    """

    enqueued: int
    unclear: int
    lost: int
    twice: int
    spans: list[tuple[float, float]] = field(repr=False)

    def longest_gap(self) -> float:
        """Return the longest time, in seconds, in which nothing was completed."""
        ends = [end for _, end in self.spans]
        return max(later - earlier for earlier, later in pairwise(ends))

    def longest_wait(self) -> float:
        """Return the longest time, in seconds, from a job's entry to its completion."""
        return max(end - begin for begin, end in self.spans)

    def first_new_after(self, moment: float) -> float:
        """Return seconds from a moment to the first completion of a job that was enqueued after it."""
        return min(end for begin, end in self.spans if begin > moment) - moment


async def outcome_of(load: Load, query: Query, *, seconds: float) -> Outcome:
    """Wait until everything that was enqueued has ended and count."""

    async def ended() -> None:
        [[live]] = await query(_LIVE, load.returned)
        assert live == 0, f"{live} jobs have not ended"

    with suppress(AssertionError):  # counted as lost
        await eventually(ended, seconds=seconds)
    spans = await query(_COMPLETED, load.returned)
    wrong = await query(_TWICE, load.returned) + await query(_BOOKED_WRONGLY, load.returned)
    return Outcome(
        enqueued=len(load.returned),
        unclear=load.unclear,
        lost=len(load.returned) - len(spans),
        twice=len({job for (job,) in wrong}),
        spans=[(begin, end) for begin, end in spans],
    )
