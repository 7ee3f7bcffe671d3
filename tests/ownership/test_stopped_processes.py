"""A process is stopped within a transaction: PostgreSQL ends that, and others go on."""

import asyncio
import sys

from sqlalchemy import text

from jsworker.ownership.database import Database

from .polling import eventually
from .rows import KIND, Sql, insert_job, read_value

FREE = (
    "SELECT count(*) FROM (SELECT FROM jsworker.limits WHERE key = 'stopped' FOR UPDATE SKIP LOCKED) AS free"
)


async def test_a_process_that_is_stopped_within_an_admission_keeps_no_key_locked(
    database_url: str, sql: Sql
) -> None:
    job_id = insert_job(sql, limit_key="stopped")
    sql.execute("INSERT INTO jsworker.limits (kind, key) VALUES (%s, 'stopped')", (KIND,))
    command = [sys.executable, "-m", "tests.ownership.stops_between", database_url, str(job_id)]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await eventually(lambda: read_value(sql, FREE) == 0, "it has locked the key")
        await eventually(lambda: read_value(sql, FREE) == 1, "PostgreSQL has ended its transaction")
    finally:
        process.kill()
        await process.wait()


async def test_a_transaction_of_several_statements_ends_after_twice_its_deadline(database: Database) -> None:
    show = text("SHOW transaction_timeout")
    [row] = await database.in_transaction(lambda opened: opened.run(show), seconds=4.0)
    assert row.transaction_timeout == "8s"
    [row] = await database.run(show)
    assert row.transaction_timeout == "0"
