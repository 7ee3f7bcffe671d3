"""COMPLETE with child jobs: they are inserted in the transaction that completes the run's job, or never."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import DatabaseUnavailable, TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, Transaction
from jsworker.ownership.transitions.enqueue import (
    ENQUEUE_MANY,
    TRIES,
    ChildJob,
    JobTerms,
    NewJob,
    arrays_of,
    size_of,
    too_fast,
)
from jsworker.ownership.transitions.enqueue_terms import (
    ENQUEUE_MANY_TERMS,
    unbound_statement_for,
    values_of_terms,
)
from jsworker.ownership.transitions.expire import EXPIRE_HOLDERS
from jsworker.ownership.transitions.settle import Completion, Refusals, Settled, complete

# In the timeline of the parent. A child's row does not name its parent: all its versions would be indexed.
NOTE_CHILD_JOBS = text("""
INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
VALUES (:id, 'child_jobs', :worker_id, :token, CAST(:detail AS jsonb)) RETURNING id
""")

_NO_TERMS = JobTerms()
"""Those of a job with a unique key and a delay."""
_STATEMENT_BYTES = 20_000
"""What a statement for one child job adds to the size that is sent: 20 ms of time, as for a round trip."""
_MOST_NAMED = 100
_MOST_KINDS_NAMED = 5


class Insertion:
    """A statement that inserts child jobs: executed while ``is_due``, with its rows given to ``note``.

    Expired jobs may hold the keys of jobs that are ``keyed``: if one of these was not inserted, such jobs are
    cancelled, and the statement is executed again. The statement for one job ``alone`` returns a row. If it
    returns none, another job of the key may just as well be being committed: it is executed again, too.

    Attributes:
        made: ids of the jobs that were inserted; the keys of the others were taken.
    """

    def __init__(
        self,
        statement: TextClause,
        values: Mapping[str, Any],
        keyed: Sequence[ChildJob] = (),
        *,
        alone: bool = False,
    ) -> None:
        self.statement = statement
        self.values = values
        self.is_due = True
        self.made: set[UUID] = set()
        self._left = keyed
        self._alone = alone
        self._insert = statement, values
        self._tries = 0

    def note(self, rows: Sequence[Any]) -> None:
        """Take the rows of the execution; raise TransitionRefused if ``TRIES`` executions were not enough."""
        if self.statement is EXPIRE_HOLDERS:
            self.statement, self.values = self._insert
            self.is_due = self._alone or bool(rows)
            if self.is_due and self._tries == TRIES:
                raise too_fast(*self._left[0])
            return
        self._tries += 1
        self.made.update(row[0] for row in rows if not self._alone or row[1])
        if self._alone and rows:
            self._left = ()
        self._left = [child for child in self._left if child.job.id not in self.made]
        self.is_due = bool(self._left)
        if self._left:
            keys = [child.job.unique_key for child in self._left]
            self.statement, self.values = EXPIRE_HOLDERS, {"kind": self._left[0].kind, "unique_keys": keys}


def insertions(worker_id: str, run: Completion) -> Iterator[Insertion]:
    """Yield the statements that insert a run's child jobs, and one that notes these in its job's timeline.

    Statements for many jobs come first, by kind, then those for one job, by kind and key: in a fixed order,
    because others wait for the same keys.
    """
    many: dict[str, dict[JobTerms, list[NewJob]]] = defaultdict(lambda: defaultdict(list))
    alone: list[ChildJob] = []
    for child in run.child_jobs:
        if _is_alone(child):
            alone.append(child)
        else:
            many[child.kind][child.job.terms or _NO_TERMS].append(child.job)
    made: set[UUID] = set()
    for insertion in _inserting(many, alone):
        yield insertion
        made.update(insertion.made)
    children = [child for child in run.child_jobs if child.job.id in made]
    if not children:
        return
    kinds = sorted({child.kind for child in children})
    detail = {
        "jobs": len(children),
        "kinds": ", ".join([*kinds[:_MOST_KINDS_NAMED], *["…"][: len(kinds) > _MOST_KINDS_NAMED]]),
        "ids": [str(child.job.id) for child in children[:_MOST_NAMED]],
    }
    of_run = {"id": run.id, "token": run.token, "worker_id": worker_id}
    yield Insertion(NOTE_CHILD_JOBS, of_run | {"detail": json.dumps(detail)})


def _is_alone(child: ChildJob) -> bool:
    """Return whether a child job needs a statement of its own."""
    return child.job.unique_key is not None and child.job.terms not in (None, _NO_TERMS)


def _inserting(
    many: Mapping[str, Mapping[JobTerms, list[NewJob]]], alone: Sequence[ChildJob]
) -> Iterator[Insertion]:
    for kind in sorted(many):
        for terms, jobs in many[kind].items():
            values = {"kind": kind, "publish_after": 0.0, **arrays_of(jobs)}
            if all(job.terms is None for job in jobs):
                yield Insertion(ENQUEUE_MANY, values)
            else:
                # Those without terms are among them: two statements would take keys in an order of their own.
                keyed = [ChildJob(kind, job) for job in jobs if job.terms and job.unique_key is not None]
                yield Insertion(ENQUEUE_MANY_TERMS, values | values_of_terms(terms), keyed)
    for child in sorted(alone, key=lambda each: (each.kind, each.job.unique_key)):
        statement, values = unbound_statement_for(*child)
        yield Insertion(statement, values, [child], alone=True)


def noted_child_jobs(detail: Any) -> list[UUID]:
    """Return the ids in the detail of a NOTE_CHILD_JOBS entry; other JSON that it may hold is ignored."""
    ids: list[UUID] = []
    given = detail.get("ids") if isinstance(detail, Mapping) else None
    for each in given[:_MOST_NAMED] if isinstance(given, list) else ():
        with suppress(ValueError):
            if isinstance(each, str):
                ids.append(UUID(each))
    return ids


async def complete_with_child_jobs(
    database: Database,
    *,
    worker_id: str,
    runs: Sequence[Completion],
    refusals: Refusals | None = None,
    tries: int = 0,
    wait: bool = True,
) -> list[Settled]:
    """Complete a job and insert its child jobs; called like ``settle.complete``, but with one run.

    COMPLETE comes first: it frees the job's unique key for a child of the same key, and if it takes no
    effect, nothing is inserted.
    """
    [run] = runs
    size = len(run.result or "") + size_of(child.job for child in run.child_jobs)
    size += _STATEMENT_BYTES * sum(map(_is_alone, run.child_jobs))
    statement = complete.alone if wait else complete.batch
    seconds = database.seconds_for(size, tries=tries)

    async def write(transaction: Transaction) -> Sequence[Row]:
        rows = await transaction.run(statement, complete.values(worker_id, runs))
        for insertion in insertions(worker_id, run) if rows else ():
            while insertion.is_due:
                found = await transaction.run(insertion.statement, insertion.values)
                insertion.note(found)
        return rows

    try:
        return await complete.written(
            lambda _: database.in_transaction(write, seconds=seconds, size=size),
            database,
            worker_id=worker_id,
            runs=runs,
            refusals=refusals,
            wait=wait,
        )
    except TransitionRefused as error:
        raise DatabaseUnavailable(str(error)) from None  # so that it is tried again
