"""COMPLETE with child jobs: what a run has enqueued is inserted in the transaction that completes its job, or never."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import TextClause

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
    too_fast,
)
from jsworker.ownership.transitions.enqueue_terms import (
    ENQUEUE_MANY_TERMS,
    unbound_statement_for,
    values_of_terms,
)
from jsworker.ownership.transitions.expire import EXPIRE_HOLDERS
from jsworker.ownership.transitions.settle import Completion, Refusals, Settled, complete

_ROW_BYTES = 200  # what a row takes beside its payload


class Insertion:
    """Statements that insert child jobs: executed while one ``is_due``, and given the first row that came.

    One for a key with terms of its own gives a row; if not, a twin was being committed, or an expired job holds
    the key. Then that is cancelled, and the statement executed again.
    """

    def __init__(
        self, statement: TextClause, values: Mapping[str, Any], alone: ChildJob | None = None
    ) -> None:
        self.statement = statement
        self.values = values
        self.is_due = True
        self._alone = alone
        self._insert = statement, values
        self._tries = 0

    def note(self, row: object | None) -> None:
        """Take what came; TransitionRefused: there was no row again and again."""
        if self.statement is EXPIRE_HOLDERS:
            self.statement, self.values = self._insert
            return
        self.is_due = self._alone is not None and row is None
        if self._alone is not None and self.is_due:
            self._tries += 1
            if self._tries == TRIES:
                raise too_fast(*self._alone)
            kind, job = self._alone
            self.statement, self.values = EXPIRE_HOLDERS, {"kind": kind, "unique_keys": [job.unique_key]}


def insertions(child_jobs: Sequence[ChildJob]) -> Iterator[Insertion]:
    """Return the statements that insert child jobs, in one order by kind and key: others wait for the same keys."""
    many: dict[str, dict[JobTerms | None, list[NewJob]]] = defaultdict(lambda: defaultdict(list))
    alone: list[ChildJob] = []
    for child in child_jobs:
        if child.job.terms is None or child.job.unique_key is None:
            many[child.kind][child.job.terms].append(child.job)
        else:
            alone.append(child)
    for kind in sorted(many):
        for terms, jobs in many[kind].items():
            values = {"kind": kind, "publish_after": 0.0, **arrays_of(jobs)}
            if terms is None:
                yield Insertion(ENQUEUE_MANY, values)
            else:
                yield Insertion(ENQUEUE_MANY_TERMS, values | values_of_terms(terms))
    for child in sorted(alone, key=lambda each: (each.kind, each.job.unique_key)):
        statement, values = unbound_statement_for(*child, publish_after=0.0)
        yield Insertion(statement, values, child)


async def complete_with_child_jobs(
    database: Database,
    *,
    worker_id: str,
    runs: Sequence[Completion],
    refusals: Refusals | None = None,
    tries: int = 0,
    wait: bool = True,
) -> list[Settled]:
    """Complete a job and insert its child jobs; called as ``settle.complete``, with one run.

    COMPLETE comes first: it frees the job's unique key for a child of the same key, and where it takes no effect
    nothing is inserted.
    """
    [run] = runs
    size = len(run.result or "") + sum(len(child.job.payload) + _ROW_BYTES for child in run.child_jobs)
    statement = complete.alone if wait else complete.batch

    async def write(transaction: Transaction) -> Sequence[Row]:
        rows = await transaction.run(statement, complete.values(worker_id, runs))
        for insertion in insertions(run.child_jobs) if rows else ():
            while insertion.is_due:
                found = await transaction.run(insertion.statement, insertion.values)
                insertion.note(found[0] if found else None)
        return rows

    try:
        return await complete.written(
            lambda _: database.in_transaction(write, seconds=database.seconds_for(size, tries=tries)),
            database,
            worker_id=worker_id,
            runs=runs,
            refusals=refusals,
            wait=wait,
        )
    except TransitionRefused as error:
        raise DatabaseUnavailable(str(error)) from None  # so that it is tried again
