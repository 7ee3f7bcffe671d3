"""Workflows in the table, and their members brought to an end without a worker."""

from collections.abc import Sequence
from typing import Any, LiteralString
from uuid import UUID

from psycopg.sql import SQL, Identifier

from jsworker.ownership.database import Database
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.ownership.transitions.workflow_enqueue import NewBatch, enqueue_workflow
from jsworker.ownership.transitions.workflows import Advanced, advance, left_undone

from .calls import claimed, complete, fail
from .rows import KIND, Sql, read_value


class Stored:
    """A workflow that was enqueued: its batches and their members by the names of the nodes."""

    def __init__(self, database: Database, sql: Sql, workflow: UUID, batches: dict[str, NewBatch]) -> None:
        self._database = database
        self._sql = sql
        self.id = workflow
        self._batches = batches

    def batch(self, name: str) -> UUID:
        return self._batches[name].id

    def members(self, name: str) -> list[UUID]:
        return [job.id for job in self._batches[name].jobs]

    def member(self, name: str) -> UUID:
        return self.members(name)[0]

    def row(self, name: str) -> dict[str, Any]:
        found = self._sql.execute(
            "SELECT * FROM jsworker.batches WHERE id = %s", [self.batch(name)]
        ).fetchone()
        assert found is not None
        return found

    def outcome(self, name: str) -> str | None:
        found: str | None = self.row(name)["outcome"]
        return found

    def workflow_row(self) -> dict[str, Any]:
        found = self._sql.execute("SELECT * FROM jsworker.workflows WHERE id = %s", [self.id]).fetchone()
        assert found is not None
        return found

    def statuses(self, name: str) -> list[str]:
        found = self._sql.execute(
            "SELECT status FROM jsworker.jobs WHERE batch_id = %s ORDER BY id", [self.batch(name)]
        )
        return [row["status"] for row in found]

    def status(self, name: str) -> str:
        [only] = self.statuses(name)
        return only

    async def complete(self, *ids: UUID) -> None:
        for job_id in ids:
            await claimed(self._database, job_id)
            token = read_value(self._sql, "SELECT fencing_token FROM jsworker.jobs WHERE id = %s", job_id)
            await complete(self._database, job_id, token)

    async def fail(self, *ids: UUID) -> None:
        for job_id in ids:
            await claimed(self._database, job_id)
            token = read_value(self._sql, "SELECT fencing_token FROM jsworker.jobs WHERE id = %s", job_id)
            await fail(self._database, job_id, token, permanent="permanent")


async def stored(
    database: Database,
    sql: Sql,
    *nodes: tuple[str, int, Sequence[str]],
    on_failure: dict[str, str] | None = None,
) -> Stored:
    """Enqueue a workflow of nodes, each with its name, how many members it has, and what it needs."""
    batches: dict[str, NewBatch] = {}
    for name, members, needs in nodes:
        jobs = [NewJob(new_job_id(), f'{{"n": {number}}}') for number in range(members)]
        how = (on_failure or {}).get(name, "cancel")
        batches[name] = NewBatch(new_job_id(), name, KIND, how, [batches[need].id for need in needs], jobs)
    workflow = new_job_id()
    await enqueue_workflow(database, workflow=workflow, name="nightly", batches=list(batches.values()))
    return Stored(database, sql, workflow, batches)


async def sweep(database: Database) -> Advanced:
    """Do what any worker's scan does."""
    left = await left_undone(database)
    return await advance(database, left.batches, needs=left.needs, workflows=left.workflows)


def change(sql: Sql, table: LiteralString, what: LiteralString, row: UUID) -> None:
    """Set columns of a batch or a workflow, whatever the protocol says."""
    statement = SQL("UPDATE jsworker.{} SET {} WHERE id = %s").format(Identifier(table), SQL(what))
    sql.execute(statement, [row])
