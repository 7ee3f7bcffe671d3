"""All jobs that match conditions: counted, or changed batch by batch, with an entry in the audit log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple, TypedDict
from uuid import UUID

from jsworker.client.client_publisher import ClientPublisher
from jsworker.client.terms import instant_of
from jsworker.core.names import printable, shown
from jsworker.core.priorities import Priority, priority_number
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import Selection
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions import control, reset
from jsworker.ownership.transitions.audit import AuditEntry
from jsworker.ownership.transitions.control import LIVE
from jsworker.ownership.transitions.priorities import Changed, set_priorities
from jsworker.ownership.transitions.reschedule import reschedule_all

REASON_CHARACTERS: Final = 1000
MOST_COUNTED: Final = 10_000
COUNT_SECONDS: Final = 2.0
_MOST_NAMED: Final = 100

Found = Sequence[tuple[UUID, int]]
"""Jobs, with the fencing token at which they were found."""


class JobConditions(TypedDict, total=False):
    """Conditions of jobs; all that are given and not None must hold.

    error: a text that their last error holds, in capitals or not.
    key: their limit key.
    worker: the id of the worker that runs them, or has completed them.
    unique_key: their unique key, whether they are live or not.
    since, until: they were enqueued at this time or later, and before that one; with time zones.
    failure: the group of failures, as ``failures`` of the dashboard names it; goes with a kind.
    """

    error: str | None
    key: str | None
    worker: str | None
    unique_key: str | None
    since: datetime | None
    until: datetime | None
    failure: UUID | None


class JobCount(NamedTuple):
    """The number of matching jobs; ``is_all`` False: there may be more, because counting was ended."""

    jobs: int
    is_all: bool


@dataclass(slots=True)
class BulkOutcome:
    """The result of an action on all jobs that match.

    Attributes:
        action_id: the id of its entry in the audit log.
        matched: the number of jobs that matched.
        changed: the number of jobs that were changed.
        requested: how many of these still run, because ``cancel`` only asks running jobs to stop.
        refused: the reasons why jobs were not changed, by job id, for the first hundred.
    """

    action_id: UUID
    matched: int = 0
    changed: int = 0
    requested: int = 0
    refused: dict[UUID, str] = field(default_factory=dict)

    def add(self, done: Changed) -> None:
        """Add the results of a batch."""
        self.changed += len(done.changed)
        self.requested += done.requested
        for job_id, why in done.refused.items():
            if len(self.refused) < _MOST_NAMED:
                self.refused[job_id] = why


class SelectedJobs:
    """The jobs that match the conditions of ``JobClient.select`` at the moment of each call.

    An action skips jobs that by then have another status, or are running but no longer meet the ages given
    to ``select``; ``clear`` also skips jobs that are in another run. It works in batches,
    each of which is a transaction that also updates the entry in ``JobClient.audit``; if it is interrupted,
    the remaining jobs stay unchanged. ``actor`` is who does it, for the audit log; left out: the database's
    login.
    """

    def __init__(self, database: Database, publisher: ClientPublisher, selection: Selection) -> None:
        self.selection = selection
        self._database = database
        self._publisher = publisher

    async def count(self, *, most: int = MOST_COUNTED, seconds: float = COUNT_SECONDS) -> JobCount:
        """Return the number of matching jobs; counting ends at ``most`` or after ``seconds``."""
        return await count_jobs(self._database, self.selection, most=most, seconds=seconds)

    async def retry(self, *, actor: str | None = None) -> BulkOutcome:
        """Put failed and cancelled jobs back into the queue; see ``JobClient.retry``."""

        async def act(found: Found, entry: AuditEntry) -> Changed:
            return await control.retry_all(self._database, _ids(found), entry=entry)

        return await self._act("retry", {"failed", "cancelled"}, act, actor)

    async def cancel(self, *, actor: str | None = None) -> BulkOutcome:
        """Cancel waiting jobs, and ask running ones to stop; see ``JobClient.cancel``."""
        chosen = self.selection

        async def act(found: Found, entry: AuditEntry) -> Changed:
            done = await control.cancel(
                self._database, _ids(found), statuses=chosen.statuses, age=chosen.age, entry=entry
            )
            return Changed(done.cancelled + done.requested, done.refused, len(done.requested))

        return await self._act("cancel", LIVE, act, actor)

    async def clear(self, reason: str, *, actor: str | None = None) -> BulkOutcome:
        """Take running jobs from their workers and put them back; see ``JobClient.clear_and_reenqueue``."""
        if not isinstance(reason, str):
            raise TypeError(f"reason={shown(reason)} must be text, not {type(reason).__name__}")
        line = printable(reason, REASON_CHARACTERS)

        async def act(found: Found, entry: AuditEntry) -> Changed:
            taken = await reset.reset_by_operator(
                self._database, seen=found, reason=line, age=self.selection.age, entry=entry
            )
            refused = {each: f"job {each} cannot be cleared: {why}" for each, why in taken.refused.items()}
            return Changed([each.id for each in taken.resets], refused)

        return await self._act("clear", {"processing"}, act, actor, reason=line)

    async def set_priority(self, priority: Priority, *, actor: str | None = None) -> BulkOutcome:
        """Give waiting jobs another priority; see ``JobClient.set_priority``."""
        number = priority_number(priority)

        async def act(found: Found, entry: AuditEntry) -> Changed:
            return await set_priorities(self._database, _ids(found), number, entry=entry)

        return await self._act("set_priority", {"queued", "scheduled"}, act, actor, to=priority)

    async def reschedule(self, run_at: datetime, *, actor: str | None = None) -> BulkOutcome:
        """Change the due time of jobs that wait for a time; see ``JobClient.reschedule``."""
        when = instant_of("run_at", run_at)

        async def act(found: Found, entry: AuditEntry) -> Changed:
            return await reschedule_all(self._database, _ids(found), when, entry=entry)

        return await self._act("reschedule", {"scheduled"}, act, actor, to=when.isoformat())

    async def _act(
        self,
        action: str,
        possible: set[str] | frozenset[str],
        act: Callable[[Found, AuditEntry], Awaitable[Changed]],
        actor: str | None,
        **how: str,
    ) -> BulkOutcome:
        if not possible.issuperset(self.selection.statuses):
            asked, rule = " or ".join(self.selection.statuses), " or ".join(sorted(possible))
            raise ValueError(f"{action} of jobs that are {asked}: it acts only on jobs that are {rule}")
        entry = AuditEntry(action, {"jobs": self.selection.for_audit(), **how}, actor=actor)
        outcome = BulkOutcome(entry.action_id)
        with operators_rights(action):
            try:
                async with aclosing(listing.matching(self._database, self.selection, acting=True)) as pages:
                    async for found in pages:
                        outcome.matched += len(found)
                        for start in range(0, len(found), listing.PAGE):
                            done = await act(found[start : start + listing.PAGE], entry)
                            outcome.add(done)
            except asyncio.CancelledError:
                await entry.interrupt(self._database, matched=outcome.matched)
                raise
            await entry.end(self._database, matched=outcome.matched)
        self._publisher.publish_in_background()
        return outcome


async def count_jobs(
    database: Database, selection: Selection, *, most: int = MOST_COUNTED, seconds: float = COUNT_SECONDS
) -> JobCount:
    """Return how many jobs match; see ``SelectedJobs.count``."""
    clock = asyncio.get_running_loop().time
    ends_at, jobs = clock() + seconds, 0
    async with aclosing(listing.matching(database, selection)) as pages:
        async for page in pages:
            jobs += len(page)
            if jobs >= most or clock() >= ends_at:
                return JobCount(min(jobs, most), is_all=False)
    return JobCount(jobs, is_all=True)


def _ids(found: Found) -> list[UUID]:
    return [job_id for job_id, _ in found]
