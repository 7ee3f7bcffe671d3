"""Rows as they are in the tables, read and changed without the code under test."""

from typing import Any, LiteralString
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row

from jsworker.core.settings import Settings
from tests.support.polling import eventually


class Rows:
    """The tables of one test, over a connection of the test's own (autocommit)."""

    def __init__(self, connection: AsyncConnection[DictRow]) -> None:
        self.connection = connection

    async def query(self, statement: LiteralString, *parameters: Any) -> list[dict[str, Any]]:
        """Run a statement and return its rows."""
        cursor = await self.connection.execute(statement, parameters)
        return await cursor.fetchall() if cursor.description else []

    async def value(self, statement: LiteralString, *parameters: Any) -> Any:
        """Return the only value of a query."""
        [row] = await self.query(statement, *parameters)
        return next(iter(row.values()))

    async def job(self, job_id: UUID) -> dict[str, Any]:
        """Return a job's row by column name."""
        [row] = await self.query("SELECT * FROM jsworker.jobs WHERE id = %s", job_id)
        return row

    async def timeline(self, job_id: UUID) -> list[dict[str, Any]]:
        """Return a job's timeline, oldest first."""
        return await self.query(
            "SELECT event, worker_id, fencing_token, error, detail FROM jsworker.job_events "
            "WHERE job_id = %s ORDER BY id",
            job_id,
        )

    async def told(self, job_id: UUID) -> list[str]:
        """Return the names of a job's timeline, oldest first."""
        return [row["event"] for row in await self.timeline(job_id)]

    async def becomes(self, job_id: UUID, status: str, *, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until a job has a status and return its row."""

        async def is_there() -> dict[str, Any]:
            row = await self.job(job_id)
            assert row["status"] == status, (row["status"], row["last_error"])
            return row

        return await eventually(is_there, seconds=seconds)

    async def take_back(self, job_id: UUID) -> None:
        """Take a running job from its owner, as a reset does, and keep it from being run again soon."""
        [row] = await self.query(
            "UPDATE jsworker.jobs SET status = 'scheduled', run_at = clock_timestamp() + interval '1 hour', "
            "attempts = attempts - 1, cleared = true, worker_id = NULL, last_activity_at = NULL "
            "WHERE id = %s AND status = 'processing' RETURNING id",
            job_id,
        )
        assert row["id"] == job_id

    async def silence(self, job_id: UUID) -> float:
        """Return for how many seconds a running job has given no sign of life."""
        seconds = await self.value(
            "SELECT extract(epoch FROM clock_timestamp() - last_activity_at)::float8 "
            "FROM jsworker.jobs WHERE id = %s",
            job_id,
        )
        return float(seconds or 0.0)  # NULL: it has just ended

    async def is_renewed(self, *job_ids: UUID, threshold: float, times: int = 3) -> None:
        """Make running jobs look as if they had been silent for too long, and wait for their heartbeats."""
        for _ in range(times):
            await self.query(
                "UPDATE jsworker.jobs SET last_activity_at = clock_timestamp() - make_interval(secs => %s) "
                "WHERE id = ANY(%s)",
                2 * threshold,
                list(job_ids),
            )

            async def all_are_renewed() -> None:
                for job_id in job_ids:
                    assert await self.silence(job_id) < threshold

            await eventually(all_are_renewed)


async def open_rows(settings: Settings) -> Rows:
    """Connect to the database of ``settings``."""
    connection = await AsyncConnection.connect(settings.database_dsn(), autocommit=True, row_factory=dict_row)
    return Rows(connection)
