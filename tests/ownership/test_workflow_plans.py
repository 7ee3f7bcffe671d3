"""However large a batch, and however many there are, each statement reads what it writes."""

from collections.abc import Iterator
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Connection, text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.queries.job_report import LEFT_BATCHES
from jsworker.ownership.transitions import workflow_control, workflows

from .conftest import TestDatabases
from .polling import eventually
from .rows import KIND
from .test_plans import access_paths, connected, rows_read

MEMBERS = 20_000
BATCH, NEEDS, WORKFLOW = UUID(int=1), UUID(int=2), UUID(int=3)
ROWS = """
INSERT INTO jsworker.workflows (id, name) VALUES (%(workflow)s, 'w');
INSERT INTO jsworker.batches (id, workflow, name, kind, place)
SELECT id, %(workflow)s, 'b', 'k', 0 FROM (VALUES (%(batch)s::uuid), (%(needs)s::uuid)) AS b(id);
INSERT INTO jsworker.batches (id, workflow, name, kind, place)
SELECT uuidv7(), %(workflow)s, 'b', 'k', 0 FROM generate_series(1, 2000);
INSERT INTO jsworker.batch_needs VALUES (%(needs)s, %(batch)s);
INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, batch_id)
SELECT uuidv7(), %(kind)s, '{}', 'completed', 1, 1, now(), %(batch)s FROM generate_series(1, %(members)s);
INSERT INTO jsworker.jobs (id, kind, payload, status, held_by, held_at, batch_id)
SELECT uuidv7(), %(kind)s, '{}', 'scheduled', 'needs', now(), %(needs)s FROM generate_series(1, %(members)s);
INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), %(kind)s, '{}', 'completed', 1, 1, now(), 1 FROM generate_series(1, %(members)s)
"""

# Each of ``dependants`` needs all of ``needs``, which have finished, and one batch more, which has not.
DENSE = (
    """
INSERT INTO jsworker.batches (id, workflow, name, kind, place, finished_at, outcome)
SELECT need, :workflow, 'n', 'k', 0, now(), 'completed' FROM unnest(CAST(:needs AS uuid[])) AS need""",
    """
INSERT INTO jsworker.batches (id, workflow, name, kind, place)
SELECT each, :workflow, 'd', 'k', 0 FROM unnest(CAST(:dependants AS uuid[])) AS each""",
    """
INSERT INTO jsworker.batch_needs (batch, needs)
SELECT each, need FROM unnest(CAST(:dependants AS uuid[])) AS each,
  unnest(:needs || (SELECT id FROM jsworker.batches WHERE finished_at IS NULL LIMIT 1)) AS need""",
    """
INSERT INTO jsworker.jobs (id, kind, payload, status, held_by, held_at, batch_id)
SELECT uuidv7(), :kind, '{}', 'scheduled', 'needs', now(), each
FROM unnest(CAST(:dependants AS uuid[])) AS each""",
)

# Many workflows, each a chain of batches with one member; the first members have ended.
CHAINS = (
    """
INSERT INTO jsworker.workflows (id, name) SELECT uuidv7(), 'w' FROM generate_series(1, 2000)""",
    """
INSERT INTO jsworker.batches (id, workflow, name, kind, place, on_failure)
SELECT uuidv7(), w.id, 'b' || place, 'k', place, 'run'
FROM jsworker.workflows AS w, generate_series(0, 19) AS place""",
    """
INSERT INTO jsworker.batch_needs (batch, needs)
SELECT b.id, n.id FROM jsworker.batches AS b
JOIN jsworker.batches AS n ON n.workflow = b.workflow AND n.place = b.place - 1""",
    """
INSERT INTO jsworker.jobs (id, kind, payload, status, held_by, held_at, batch_id)
SELECT gen_random_uuid(), %(kind)s, '{}', 'scheduled', 'needs', now(), id FROM jsworker.batches
WHERE place > 0 ORDER BY random()""",
    """
INSERT INTO jsworker.jobs (id, kind, payload, status, run_at, finished_at, batch_id)
SELECT gen_random_uuid(), %(kind)s, '{}', 'cancelled', now(), now(), id
FROM jsworker.batches WHERE place = 0""",
)
READ = """
SELECT (SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'jobs') + (
  SELECT CAST(sum(idx_tup_read) AS bigint) FROM pg_stat_user_indexes WHERE relname = 'jobs') AS read,
  (SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'jobs') AS written
"""


@pytest.fixture(scope="module")
def full_url(databases: TestDatabases, migrated: str) -> str:
    values = {"workflow": WORKFLOW, "batch": BATCH, "needs": NEEDS, "kind": KIND, "members": MEMBERS}
    return databases.create_full(migrated, ROWS, **values)


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def table(request: pytest.FixtureRequest, databases: TestDatabases, full_url: str) -> Iterator[Connection]:
    create = databases.create_analyzed if request.param == "after ANALYZE" else databases.create_copy
    with connected(create(full_url)) as connection:
        yield connection


def test_finish_looks_at_the_youngest_members(table: Connection) -> None:
    values = {"ids": uuid_array([BATCH])}
    assert rows_read(table, workflows.FINISH, values) < 30
    assert "jobs_of_batch" in access_paths(table, workflows.FINISH, values)
    assert rows_read(table, workflows.FINISH, {"ids": uuid_array([NEEDS])}) < 30


def test_needs_reads_as_many_members_as_it_moves(table: Connection) -> None:
    table.execute(workflows.FINISH, {"ids": uuid_array([BATCH])})
    values = {"batches": uuid_array([BATCH]), "limit": 100}
    table.commit()
    # Without statistics it reads the batches, too, but never their members.
    assert rows_read(table, workflows.NEEDS, values) < 12 * 100 + 2 * 2002 + 50
    seen = {"ids": uuid_array([BATCH]), "generations": [0]}
    assert rows_read(table, workflows.PROPAGATED, seen) < 50


@pytest.mark.parametrize("then", [(), ("ANALYZE",)], ids=["before ANALYZE", "after ANALYZE"])
async def test_needs_of_many_small_batches(
    databases: TestDatabases, migrated: str, then: tuple[str, ...]
) -> None:
    url = databases.create_full(migrated, *CHAINS, *then, kind=KIND)
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        first = "SELECT id FROM jsworker.batches WHERE place = 0 ORDER BY id LIMIT 50"
        ids = [row["id"] for row in connection.execute(first)]
        before_and_after = connection.execute(READ).fetchall()
        async with Database(url, statement_timeout=60) as database:
            done = await workflows.advance(database, ids)
        assert (done.woken, len(done.batches)) == (50, 50)

        def noted() -> bool:
            before_and_after[1:] = connection.execute(READ).fetchall()
            return bool(before_and_after[1]["written"] == before_and_after[0]["written"] + 50)

        await eventually(noted, "what was read is noted")
    assert before_and_after[1]["read"] - before_and_after[0]["read"] < 2_000


def test_each_dependant_is_looked_at_once_however_many_batches_it_needs(table: Connection) -> None:
    needs, dependants = ([UUID(int=start + place) for place in range(60)] for start in (1000, 2000))
    values = {"workflow": WORKFLOW, "kind": KIND, "needs": needs, "dependants": dependants}
    for statement in DENSE:
        table.execute(text(statement), values)
    seen = {"ids": uuid_array(needs), "generations": [0] * len(needs)}
    assert rows_read(table, workflows.PROPAGATED, seen) <= 2 * len(dependants)


def test_the_sweep_reads_a_few_rows_of_each_open_batch(table: Connection) -> None:
    values = {"limit": 2000, "after": UUID(int=0)}
    assert rows_read(table, workflows.LEFT, values) < 5 * 2000
    jobs = {path for path in access_paths(table, workflows.LEFT, values) if "jobs" in path}
    assert jobs == {"jobs_of_batch"}


def test_doctor_reads_the_table_of_jobs_by_indexes(table: Connection) -> None:
    jobs = {path for path in access_paths(table, LEFT_BATCHES, {}) if "jobs" in path}
    assert jobs <= {"jobs_of_batch", "jobs_held_of_batch", "jobs_held"}
    assert rows_read(table, LEFT_BATCHES, {}) < 2 * MEMBERS + 10 * 2002


def test_members_by_status(table: Connection) -> None:
    last = UUID(int=2**128 - 1)
    place = {"id": WORKFLOW, "limit": 100, "batch": last, "status": "scheduled", "before": last}
    assert rows_read(table, workflow_control.LIVE_MEMBERS, place) < 4 * 2002
    assert {p for p in access_paths(table, workflow_control.LIVE_MEMBERS, place) if "jobs" in p} == {
        "jobs_of_batch"
    }
    place["status"] = "failed"
    assert rows_read(table, workflow_control.FAILED_MEMBERS, place) < 4 * 2002
