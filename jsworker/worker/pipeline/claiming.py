"""Taking jobs: CLAIM, its read-back, its stale-owner arm, what was refused, content that comes later."""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, OwnershipLost, may_answer_later
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.claim import ClaimedJob, RefusedJob
from jsworker.ownership.transitions.reset import Suspect
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.recovery.late_rows import LateRows

_MOST_AT_ONCE: Final = 500
_FETCHED_AT_ONCE: Final = 3
"""Each takes its part of the line, and a connection that other statements need too."""
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Take:
    """The answer to a batch of claims; an id in neither list was refused, or its row is locked.

    Attributes:
        claimed: what this worker owns now.
        unclear: what could not be decided; to be put off.
        set_aside: jobs whose row PostgreSQL refuses; to be put off for longer.
        quiet_seconds: what their rows have been given beyond their limits of silence, for a quiet phase.
    """

    claimed: Sequence[ClaimedJob]
    unclear: frozenset[UUID]
    set_aside: frozenset[UUID] = frozenset()
    quiet_seconds: float = 0.0


class Claimer:
    """Asks the database for jobs of one kind.

    Attributes:
        at_once: how many jobs to ask for at once: half as many after each unclear answer, so that in the end
            a single one gets through, and twice as many after each clear one.
    """

    def __init__(self, context: WorkerContext, kind: Kind, *, late: LateRows, quiet: QuietPhases) -> None:
        self._context = context
        self._kind = kind
        self._late = late
        self._quiet = quiet
        self.at_once = _MOST_AT_ONCE

    async def take(self, ids: Sequence[UUID]) -> Take:
        """Claim what may be claimed; after a lost answer, find out what was."""
        aside: set[UUID] = set()
        quiet = self._quiet.seconds_left
        try:
            aside = await self._context.refused_rows.among("claim", ids)
            taken = await claims.claim(
                self._context.database,
                worker_id=self._context.worker_id,
                kind=self._kind.name,
                ids=[job_id for job_id in ids if job_id not in aside] if aside else ids,
                limits=self._kind.limits_when_quiet(quiet),
            )
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            self.at_once = max(1, min(self.at_once, len(ids)) // 2)
            return await self._read_back(ids, quiet)
        self._context.health.answered()
        self.at_once = min(_MOST_AT_ONCE, 2 * self.at_once)
        await self._set_aside(taken.refused_rows)
        return Take(taken.claimed, frozenset(), frozenset(aside | taken.refused_rows.keys()), quiet)

    async def take_from_stale_owners(self, ids: Iterable[UUID]) -> Take:
        """Claim jobs straight from owners that this worker has proven stale; asks only if there are any."""
        seen = [self._late.proven[job_id] for job_id in ids if job_id in self._late.proven]
        if not seen:
            return Take((), frozenset())
        quiet = self._quiet.seconds_left
        try:
            taken = await claims.claim_stale(
                self._context.database,
                worker_id=self._context.worker_id,
                kind=self._kind.name,
                seen=seen,
                limits=self._kind.limits_when_quiet(quiet),
            )
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            take = await self._read_back([row.id for row in seen], quiet)
            self._report_stalled(take.claimed, seen)
            return take
        self._report_stalled(taken.claimed, seen)
        await self._set_aside(taken.refused_rows)
        return Take(taken.claimed, frozenset(), frozenset(taken.refused_rows), quiet)

    async def _set_aside(self, refused: Mapping[UUID, RowRefused]) -> None:
        with self._context.health.noting():  # else refused and noted the next time
            await self._context.refused_rows.note("claim", refused.items())

    def _report_stalled(self, claimed: Collection[ClaimedJob], seen: Iterable[Suspect]) -> None:
        owners = {row.id: row.worker_id for row in seen}
        for job in claimed:
            self._context.events.emit(
                "job.stalled",
                job_id=str(job.id),
                kind=job.kind,
                fencing_token=job.fencing_token - 1,
                owner=owners[job.id],
                cause="stale",
                counted=True,
                stalls=job.stalls,
                together=len(claimed),
            )
        if claimed:
            self._context.events.emit(
                "stale.recovered",
                jobs=len(claimed),
                owners=sorted({owners[job.id] for job in claimed}),
                cause="stale",
                counted=len(claimed),
                to={"processing": len(claimed)},
            )
        self._late.taken_back(job.id for job in claimed)

    async def look_at_refused(
        self, ids: Sequence[UUID], delivered: Sequence[UUID]
    ) -> dict[UUID, RefusedJob] | None:
        """Return why jobs were not claimed, without those that have no row; None: no answer.

        Only the timelines of those that a message ``delivered`` note the skip.
        """
        found = set(ids).difference(delivered)
        look = partial(claims.look_at_refused, self._context.database, kind=self._kind.name)
        rows: dict[UUID, RefusedJob] = {}
        try:
            if delivered:
                rows |= await look(ids=delivered, worker_id=self._context.worker_id)
            if found:
                rows |= await look(ids=found)
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._context.health.failed(error)
            return None
        return rows

    async def _read_back(self, ids: Sequence[UUID], quiet_seconds: float) -> Take:
        """Find out what an unclear claim has claimed; all stays unclear if the database is silent for long.

        Until then the ids stay in flight, so that no other message starts a second claim of them. Given up,
        a claim that did commit is an orphaned claim, which the heartbeat finds and releases.
        """
        context = self._context
        give_up_at = boottime() + 2 * context.settings.statement_timeout
        while (left := give_up_at - boottime()) > 0:
            try:
                async with asyncio.timeout(left):
                    await context.health.wait_until_up()
                found = await claims.read_back(context.database, worker_id=context.worker_id, ids=ids)
            except TimeoutError:
                break
            except (DatabaseUnavailable, DatabaseRefused) as error:
                context.health.failed(error)
            else:
                return Take(found, frozenset(ids) - {row.id for row in found}, quiet_seconds=quiet_seconds)
        return Take((), frozenset(ids), quiet_seconds=quiet_seconds)


class LargeValues:
    """Fetches payloads and checkpoints too large to come with the claim, while heartbeats keep the jobs."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._turns = asyncio.Semaphore(_FETCHED_AT_ONCE)

    async def fetch(self, run: Run) -> bool:
        """Complete what was claimed and return whether the job is still owned; a lost run is stopped.

        A run that is stopped meanwhile is cancelled in here. A value that does not come in time is asked for
        again, each time with more time: handed back, the job would go from worker to worker for ever.

        Raises:
            DatabaseRefused: PostgreSQL cannot give it; not for a login that it refuses, perhaps for a moment.
        """
        for tries in count():
            try:
                async with self._turns:
                    run.claimed = await claims.fetch_content(
                        self._context.database,
                        worker_id=self._context.worker_id,
                        claimed=run.claimed,
                        tries=tries,
                    )
            except OwnershipLost:
                run.lose()
                return False
            except (DatabaseUnavailable, DatabaseRefused) as error:
                if not may_answer_later(error):
                    raise
                await asyncio.sleep(min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(tries, 5)))
            else:
                return True
        raise AssertionError
