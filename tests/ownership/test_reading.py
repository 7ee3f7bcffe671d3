"""Rows are read whatever they hold: infinite times, years that Python does not know, numbers without end."""

import copy
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import text

from jsworker.cli.jobs import _row
from jsworker.cli.output import print_json, since, until
from jsworker.core.strict_json import plain
from jsworker.ownership.database import Database
from jsworker.ownership.pool import FarTime, read_json
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_report import backlog

from .conftest import TestDatabases
from .rows import KIND, Sql, insert_job

TIMES = ["infinity", "-infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"]
LOOSEN = """
SELECT format('ALTER TABLE jsworker.jobs DROP CONSTRAINT %I', conname) AS statement FROM pg_constraint
WHERE conrelid = 'jsworker.jobs'::regclass AND contype = 'c'
"""


@pytest.fixture
def loose_url(databases: TestDatabases, migrated: str) -> str:
    """A database with rows as they may be from before there were rules about them."""
    url = databases.create(migrated)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        for row in connection.execute(LOOSEN).fetchall():
            connection.execute(row["statement"])
    return url


@pytest.fixture
def sql(loose_url: str) -> Any:
    with psycopg.connect(loose_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
async def database(loose_url: str) -> AsyncIterator[Database]:
    opened = Database(loose_url, statement_timeout=10.0)
    yield opened
    await opened.close()


async def test_jobs_are_listed_and_shown_with_any_times(
    database: Database, sql: Sql, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = {
        time: insert_job(
            sql, "scheduled", run_at=time, queued_at=time, created_at=time, stale_after="infinity"
        )
        for time in TIMES
    }
    found = {job["id"]: job for job in (await listing.list_jobs(database)).jobs}
    assert {time: str(found[job_id]["run_at"]) for time, job_id in ids.items()} == {
        time: time for time in TIMES
    }
    print_json(list(found.values()))
    assert {job["run_at"] for job in json.loads(capsys.readouterr().out)} == set(TIMES)
    for job in found.values():
        assert f"due in {job['run_at']}" in str(_row(job | {"refused": []}, {})[-1])
    whole = await listing.get_job(database, ids["infinity"])
    print_json(whole)
    assert json.loads(capsys.readouterr().out)["stale_after"] == "infinity"


async def test_the_backlog_tells_a_finite_age(database: Database, sql: Sql) -> None:
    for time in TIMES:
        insert_job(sql, queued_at=time)
    found = await backlog(database, [KIND], most=1)
    assert 1e9 < found.kinds[KIND].oldest_seconds < 1e11
    assert found.kinds[KIND].jobs["queued"] == len(TIMES)


@pytest.mark.parametrize("written", TIMES)
async def test_a_far_time_compares_and_comes_back_as_it_was(database: Database, written: str) -> None:
    [row] = await database.run(text("SELECT CAST(:written AS timestamptz) AS at"), {"written": written})
    now = datetime.now(UTC)
    assert isinstance(row.at, FarTime)
    assert (row.at > now) == (written in {"infinity", "10000-01-01 00:00:00+00"})
    assert (plain(row.at), since(row.at), until(row.at)) == (written,) * 3
    assert copy.deepcopy(row.at).text == written
    same = text("SELECT CAST(:at AS timestamptz) = CAST(:written AS timestamptz) AS same")
    assert (await database.run(same, {"at": row.at, "written": written}))[0].same
    among = text("SELECT CAST(:written AS timestamptz) = ANY(CAST(:times AS timestamptz[])) AS same")
    for times in ([row.at, now, None], [now, row.at]):
        assert (await database.run(among, {"written": written, "times": times}))[0].same
    by_key = await database.run_by_key(text("SELECT CAST(:written AS timestamptz)"), {"written": written})
    assert str(by_key[0][0]) == written


async def test_json_is_read_whatever_it_holds(database: Database, sql: Sql) -> None:
    digits = "9" * 5000
    payload = f'{{"long": {digits}, "large": 1e400, "small": 7, "half": 0.5}}'
    job_id = insert_job(sql, payload=payload)
    job = await listing.get_job(database, job_id)
    assert (job["payload"]["long"], job["payload"]["small"], job["payload"]["half"]) == (digits, 7, 0.5)
    deep = insert_job(sql, payload="[" * 3000 + "]" * 3000)
    shown = await listing.get_job(database, deep)
    json.dumps(shown["payload"])


def test_json_without_end_stays_json() -> None:
    assert read_json('{"a": 1.5e999, "b": -1e999}') == {"a": "1.5e999", "b": "-1e999"}
