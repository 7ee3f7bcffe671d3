"""How the statements find their rows in a full table: by the primary key, the sweeps by their own indexes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import Connection, TextClause, create_engine, text
from sqlalchemy.engine import make_url

from jsworker.ownership.database import Database
from jsworker.ownership.pool import ALONG_INDEX
from jsworker.ownership.predicates import ANY_AGE, RunAge
from jsworker.ownership.queries import failures, listing, results, status
from jsworker.ownership.queries import job_report as inspection
from jsworker.ownership.queries.job_filter import ANY_JOB
from jsworker.ownership.queries.job_report import BACKLOG, MOST_HELD, MOST_QUEUES
from jsworker.ownership.transitions import (
    claim,
    clock_ahead,
    control,
    expire,
    heartbeat,
    limits,
    looks,
    priorities,
    publish,
    republish,
    reschedule,
    reset,
    settle,
    snooze,
    steps,
    waiting_keys,
    workers,
)

from .conftest import TestDatabases
from .polling import eventually
from .rows import KIND, OTHER_WORKER, WORKER, insert_job

QUEUED = 100_000
KINDS = 50_000
WAITS, RUNS = {"jobs_unique_waiting"}, {"jobs_unique_running"}
"""Read for a job with a key of which one may wait and one run, and for no other."""
FEW = 500
"""Jobs in each of the other states that a sweep looks for."""

QUEUE = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, publish_after, queued_at, needs_publish)
SELECT uuidv7(), %(kind)s, '{"path": "a/b/c"}', 'queued', 1, now(),
  now() - interval '1 hour' + n * interval '1 ms', n > %(queued)s
FROM generate_series(1, %(queued)s + %(few)s) AS n;
"""

JUNK = """
INSERT INTO jsworker.workers (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)
VALUES ('host-1-0badf00d', 'host', 1, '{zzz-served}', 1, '1', '5 s', 'running');

INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, stream_seq, queued_at)
SELECT uuidv7(), CASE n WHEN 0 THEN 'zzz-served' ELSE 'junk-' || n END, '{}', 'queued', 1, 1,
  now() - interval '1 hour'
FROM generate_series(0, %(kinds)s) AS n;

INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), 'zzz-served', '{}', 'completed', 1, 1, now(), 1 FROM generate_series(1, %(kinds)s) AS n;
"""

OTHER_STATES = """
INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)
SELECT uuidv7(), %(kind)s, '{}', 'scheduled', now() FROM generate_series(1, %(few)s);

INSERT INTO jsworker.jobs (
  id, kind, payload, status, worker_id, fencing_token, attempts, max_attempts, max_stalls, claimed_at,
  last_activity_at, stale_after, dispatch)
SELECT uuidv7(), %(kind)s, '{}', 'processing', CASE WHEN n %% 2 = 0 THEN %(worker)s ELSE %(other)s END,
  1, 1, 3, 3, now() - interval '1 hour', now() - interval '1 hour', '30 s', 1
FROM generate_series(1, %(few)s) AS n;

INSERT INTO jsworker.jobs (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)
SELECT uuidv7(), %(kind)s, '{}', 'completed', 1, 1, now(), 1 FROM generate_series(1, %(few)s);
"""


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    with engine.connect() as opened:
        yield opened
    engine.dispose()


VALUES = {"kind": KIND, "queued": QUEUED, "few": FEW, "worker": WORKER, "other": OTHER_WORKER}


@pytest.fixture(scope="module")
def full_url(databases: TestDatabases, migrated: str) -> str:
    return databases.create_full(migrated, QUEUE, OTHER_STATES, **VALUES)


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE", "ANALYZE of an empty queue"])
def table(request: pytest.FixtureRequest, databases: TestDatabases, migrated: str) -> Iterator[Connection]:
    """A connection to the full table; it explains and writes nothing."""
    if request.param == "ANALYZE of an empty queue":
        url = databases.create_full(migrated, OTHER_STATES, "ANALYZE", QUEUE, **VALUES)
    else:
        url = request.getfixturevalue("full_url")
        if request.param == "after ANALYZE":
            url = databases.create_analyzed(url)
    with connected(url) as opened:
        yield opened


@pytest.fixture(scope="module")
def many_kinds_url(databases: TestDatabases, migrated: str) -> str:
    return databases.create_full(migrated, JUNK, kinds=KINDS)


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def many_kinds(
    request: pytest.FixtureRequest, databases: TestDatabases, many_kinds_url: str
) -> Iterator[Connection]:
    """A connection to a table with a kind for each queued job; it explains and writes nothing."""
    analyzed = request.param == "after ANALYZE"
    with connected(databases.create_analyzed(many_kinds_url) if analyzed else many_kinds_url) as opened:
        yield opened


LISTED_JOBS = """
INSERT INTO jsworker.jobs (
  id, kind, payload, status, worker_id, fencing_token, attempts, errors, claimed_at, last_activity_at,
  stale_after, run_at, dispatch, queued_at, finished_at)
SELECT uuidv7(), CASE n % 2 WHEN 0 THEN 'other-kind' ELSE %(kind)s END, '{}', s.status,
  CASE s.status WHEN 'processing' THEN 'host-' || n % 100 END, 1,
  CASE WHEN s.status IN ('processing', 'completed', 'failed') THEN 1 ELSE 0 END,
  CASE s.status WHEN 'failed' THEN 1 ELSE 0 END, now(),
  CASE s.status WHEN 'processing' THEN now() END, '30 s', now() + n * interval '1 ms', 1,
  now() + n * interval '1 ms',
  CASE WHEN s.status IN ('completed', 'failed', 'cancelled') THEN now() END
FROM unnest(ARRAY['failed', 'cancelled', 'queued', 'scheduled', 'processing', 'completed']) AS s(status),
  generate_series(1, %(each)s) AS n;
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, held_by, held_at, limit_key)
SELECT uuidv7(), CASE n % 2 WHEN 0 THEN 'other-kind' ELSE %(kind)s END, '{}', 'scheduled', 1, now(),
  CASE n % 3 WHEN 0 THEN 'needs' ELSE 'limit' END, now(), 'key-' || n % 100
FROM generate_series(1, %(each)s) AS n
"""


@pytest.fixture(scope="module")
def listed_url(databases: TestDatabases, migrated: str) -> str:
    rows = LISTED_JOBS.replace(" % ", " %% ")
    return databases.create_full(migrated, rows, kind=KIND, each=TestListings.EACH)


@pytest.fixture(scope="module", params=["before ANALYZE", "after ANALYZE"])
def listed(request: pytest.FixtureRequest, databases: TestDatabases, listed_url: str) -> Iterator[Connection]:
    """A connection to a table with many jobs of each status; it explains and writes nothing."""
    analyzed = request.param == "after ANALYZE"
    with connected(databases.create_analyzed(listed_url) if analyzed else listed_url) as opened:
        yield opened


def access_paths(connection: Connection, statement: TextClause, parameters: dict[str, Any]) -> set[str]:
    """Return how a statement reaches the rows of ``jobs``: names of indexes, or ``Seq Scan``."""
    explain = text(f"EXPLAIN (FORMAT JSON) {statement.text}")
    (plan,) = connection.execute(explain, parameters).scalar_one()
    connection.rollback()
    return _paths(plan["Plan"])


def _paths(root: dict[str, Any]) -> set[str]:
    paths = set()
    for node in _nodes(root):
        if "Index Name" in node:
            paths.add(node["Index Name"])
        elif node["Node Type"] == "Seq Scan":  # the timeline is empty here
            paths.add(f"Seq Scan on {node['Relation Name']}")
    return paths


def _nodes(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield root
    for node in root.get("Plans", []):
        yield from _nodes(node)


def of_jobs(paths: set[str]) -> set[str]:
    """Return how the rows of ``jobs`` are reached, without the other tables, which are small here."""
    return {path for path in paths if not any(table in path for table in ("workers", "job_events", "limits"))}


def rows_read(connection: Connection, statement: TextClause, parameters: dict[str, Any]) -> int:
    """Run a reading statement and return how many rows of ``jobs`` its scans looked at."""
    explain = text(f"EXPLAIN (ANALYZE, BUFFERS OFF, FORMAT JSON) {statement.text}")
    (plan,) = connection.execute(explain, parameters).scalar_one()
    connection.rollback()
    names = ((node.get("Index Name", node.get("Relation Name", "")), node) for node in _nodes(plan["Plan"]))
    scans = [node for name, node in names if name.startswith("jobs")]
    looked_at: list[float] = [
        (scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)) * scan["Actual Loops"] for scan in scans
    ]
    return round(sum(looked_at))


def some(connection: Connection, status: str, count: int) -> list[UUID]:
    query = text("SELECT id FROM jsworker.jobs WHERE status = :status ORDER BY random() LIMIT :count")
    found = list(connection.execute(query, {"status": status, "count": count}).scalars())
    assert len(found) == count
    return found


def hand(ids: list[UUID]) -> dict[str, Any]:
    return {"worker_id": WORKER, "ids": ids, "tokens": [1] * len(ids)}


@pytest.mark.parametrize("batch", [1, 20, 100, 200])
class TestByPrimaryKey:
    def test_claim(self, table: Connection, batch: int) -> None:
        parameters = {
            "worker_id": WORKER,
            "kind": KIND,
            "ids": some(table, "queued", batch),
            "stale_after": 30.0,
            "crash_after": 15.0,
            "timeout": None,
            "max_attempts": 3,
            "max_stalls": 3,
        }
        assert access_paths(table, claim.CLAIM, parameters) == {"jobs_pkey"} | RUNS

    def test_read_back(self, table: Connection, batch: int) -> None:
        parameters = {"worker_id": WORKER, "ids": some(table, "queued", batch)}
        assert access_paths(table, claim.READ_BACK, parameters) == {"jobs_pkey"}

    def test_mark(self, table: Connection, batch: int) -> None:
        ids = some(table, "queued", batch)
        parameters = {"ids": ids, "dispatches": [1] * batch, "seqs": [1] * batch, "created": None}
        assert access_paths(table, publish.MARK, parameters) == {"jobs_pkey"}

    def test_heartbeat(self, table: Connection, batch: int) -> None:
        parameters = hand(some(table, "processing", batch))
        assert access_paths(table, heartbeat.HEARTBEAT, parameters) == {"jobs_pkey"}
        assert access_paths(table, heartbeat.STILL_MINE, parameters) == {"jobs_pkey"}

    def test_complete(self, table: Connection, batch: int) -> None:
        parameters = hand(some(table, "processing", batch)) | {"results": ["{}"] * batch}
        assert access_paths(table, settle.COMPLETE, parameters) == {"jobs_pkey"}
        assert access_paths(table, settle.complete.alone, parameters) == {"jobs_pkey"}

    def test_verdict(self, table: Connection, batch: int) -> None:
        paths = access_paths(table, settle.VERDICT, hand(some(table, "processing", batch)))
        assert {path for path in paths if "job_events" not in path} == {"jobs_pkey"}

    def test_fail(self, table: Connection, batch: int) -> None:
        columns = {"errors": ["e"] * batch, "reasons": [None] * batch, "delays": [1.0] * batch}
        columns |= {"stalled": [False] * batch}
        parameters = hand(some(table, "processing", batch)) | columns
        assert access_paths(table, settle.FAIL, parameters) == {"jobs_pkey"} | WAITS

    def test_release(self, table: Connection, batch: int) -> None:
        columns = {"reasons": ["r"] * batch, "delays": [None] * batch}
        parameters = hand(some(table, "processing", batch)) | columns
        assert access_paths(table, settle.RELEASE, parameters) == {"jobs_pkey"} | WAITS

    def test_ends(self, table: Connection, batch: int) -> None:
        parameters: dict[str, Any] = {"ids": some(table, "completed", batch), "most": results.MOST_ENDS}
        assert access_paths(table, results.ENDS, parameters) == {"jobs_pkey"}
        for statement in (results.WHOLE_END, results.LIVE_KIND):
            assert access_paths(table, statement, {"id": parameters["ids"][0]}) == {"jobs_pkey"}

    def test_snooze(self, table: Connection, batch: int) -> None:
        columns = {"reasons": ["r"] * batch, "delays": [1.0] * batch, "most": [9] * batch}
        parameters = hand(some(table, "processing", batch)) | columns | {"errors": ["e"] * batch}
        assert access_paths(table, snooze.SNOOZE, parameters) == {"jobs_pkey"} | WAITS
        assert access_paths(table, snooze.snooze.alone, parameters) == {"jobs_pkey"} | WAITS

    def test_step(self, table: Connection, batch: int) -> None:
        [job_id] = some(table, "processing", batch)[:1]
        parameters = {"worker_id": WORKER, "id": job_id, "token": 1, "name": "charge"}
        found = access_paths(table, steps.FOUND, parameters)
        assert {path for path in found if "job_steps" not in path} == {"jobs_pkey"}
        kept = parameters | {"result": "[1]", "sleeps": None, "write": "step"}
        assert of_jobs(access_paths(table, steps.STEP, kept)) == {"jobs_pkey"}

    def test_resets(self, table: Connection, batch: int) -> None:
        ids = some(table, "processing", batch)
        seen = hand(ids) | {"reason": "r", "counted": True, "activities": [None] * batch}
        seen |= {"uncounted": [False] * batch, **RunAge(60.0, 60.0, 60.0).values()}
        assert access_paths(table, reset.RESET_STALE, seen) == {"jobs_pkey"} | WAITS
        assert access_paths(table, reset.RESET_CRASHED, seen) == {"jobs_pkey"} | WAITS
        assert access_paths(table, reset.RESET_BY_OPERATOR, seen) == {"jobs_pkey"} | WAITS

    def test_claim_of_a_stale_owners_job(self, table: Connection, batch: int) -> None:
        parameters = hand(some(table, "processing", batch)) | {
            "activities": [None] * batch,
            "kind": KIND,
            "stale_after": 30.0,
            "crash_after": 15.0,
            "timeout": None,
            "max_attempts": 3,
            "max_stalls": 3,
        }
        assert of_jobs(access_paths(table, claim.CLAIM_STALE, parameters)) == {"jobs_pkey"}

    def test_refused(self, table: Connection, batch: int) -> None:
        parameters = {"kind": KIND, "ids": some(table, "processing", batch), "worker_id": WORKER}
        assert of_jobs(access_paths(table, claim.REFUSED, parameters)) == {"jobs_pkey"} | RUNS

    def test_waiting_keys(self, table: Connection, batch: int) -> None:
        parameters = {"ids": some(table, "queued", batch)}
        for statement in (waiting_keys.DEFER, waiting_keys.WAKE):
            assert of_jobs(access_paths(table, statement, parameters)) <= {"jobs_pkey"} | RUNS | WAITS

    def test_republish(self, table: Connection, batch: int) -> None:
        parameters = {"worker_id": WORKER, "ids": some(table, "queued", batch), "dispatches": [1] * batch}
        assert access_paths(table, republish.REPUBLISH, parameters) == {"jobs_pkey"}

    def test_progress(self, table: Connection, batch: int) -> None:
        (job_id, *_) = some(table, "processing", batch)
        parameters = {"worker_id": WORKER, "id": job_id, "token": 1, "write": "progress"}
        values = {"stage": "s", "progress": 0.5, "message": None}
        assert of_jobs(access_paths(table, heartbeat.PROGRESS, parameters | values)) == {"jobs_pkey"}
        values = {"checkpoint": "1", "seen": None}
        assert of_jobs(access_paths(table, heartbeat.CHECKPOINT, parameters | values)) == {"jobs_pkey"}

    def test_cancel(self, table: Connection, batch: int) -> None:
        parameters = {"ids": some(table, "queued", batch), "statuses": list(control.LIVE), **ANY_AGE.values()}
        assert access_paths(table, control.CANCEL, parameters) == {"jobs_pkey"}

    def test_what_operators_do(self, table: Connection, batch: int) -> None:
        parameters = {"ids": some(table, "queued", batch), "priority": 0, "run_at": None}
        for statement in (control.RETRY, priorities.SET_PRIORITY, reschedule.RESCHEDULE):
            assert access_paths(table, statement, parameters) == {"jobs_pkey"}


class TestSweeps:
    def test_publish(self, table: Connection) -> None:
        assert access_paths(table, publish.PUBLISH, {"limit": 200, "within": 1e9}) == {
            "jobs_to_publish",
            "jobs_pkey",
        }

    def test_promote(self, table: Connection) -> None:
        assert access_paths(table, publish.PROMOTE, {"limit": 200, "within": 1e9}) == {
            "jobs_due",
            "jobs_pkey",
        }

    def test_looks(self, table: Connection) -> None:
        paths = access_paths(table, looks.DUE, {"within": 1e9, "kinds": [KIND]})
        assert {path for path in paths if "limits" not in path} == {"jobs_due", "jobs_to_publish"}
        assert not any("Seq Scan on jobs" in path for path in access_paths(table, looks.LEFT_TO_DO, {}))
        assert rows_read(table, looks.LEFT_TO_DO, {}) <= 10

    def test_expire(self, table: Connection) -> None:
        assert access_paths(table, expire.EXPIRE, {"limit": 200}) == {"jobs_expiring", "jobs_pkey"}

    def test_expired_jobs_of_keys(self, table: Connection) -> None:
        values = {"kind": KIND, "unique_keys": ["a", "b"]}
        assert access_paths(table, expire.OVER_BY_KEY, values) <= {"jobs_unique_live", "jobs_unique_waiting"}
        paths = access_paths(table, expire.EXPIRE_HOLDERS, values)
        assert paths <= {"jobs_unique_live", "jobs_unique_waiting", "jobs_pkey"}
        paths = access_paths(table, expire.OVER_BESIDE, {"ids": some(table, "processing", 2)})
        assert paths <= {"jobs_unique_live", "jobs_unique_waiting", "jobs_pkey"}

    def test_what_was_claimed_once_is_not_passed_by_each_search_for_the_expired(
        self, table: Connection
    ) -> None:
        row = table.exec_driver_sql(
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index"
            " WHERE indexrelid = 'jsworker.jobs_expiring'::regclass"
        )
        assert "(fencing_token = 0)" in row.scalar_one()

    def test_suspects(self, table: Connection) -> None:
        parameters = {"heartbeat_interval": 5.0, "limit": 500}
        assert of_jobs(access_paths(table, reset.LATE, parameters)) == {"jobs_owned"}

    def test_instants_ahead(self, table: Connection) -> None:
        paths = {"jobs_owned", "jobs_to_publish", "jobs_queued_in_order"}
        assert access_paths(table, clock_ahead.AHEAD, {"kinds": [KIND]}) == paths
        # The running jobs, which a bitmap counts twice, and none that is queued.
        assert rows_read(table, clock_ahead.AHEAD, {"kinds": [KIND]}) <= 2 * FEW
        assert access_paths(table, clock_ahead.BRING_BACK, hand(some(table, "queued", 500))) == {"jobs_pkey"}

    @pytest.mark.parametrize("culprits", [0, 3])
    def test_reset_of_the_dead(self, table: Connection, culprits: int) -> None:
        parameters = {
            "worker_id": WORKER,
            "owner": OTHER_WORKER,
            "reason": "r",
            "counted": True,
            "culprits": some(table, "processing", 3)[:culprits],
            "in_line": [],
            "ids": some(table, "processing", 200),
        }
        assert access_paths(table, reset.RESET_DEAD, parameters) == {"jobs_pkey"} | WAITS
        assert of_jobs(access_paths(table, reset.OWNED, {"owner": OTHER_WORKER})) == {"jobs_owned"}

    def test_workers(self, table: Connection) -> None:
        me = {"id": WORKER, "hostname": "alpha", "pod_uid": "uid", "name": "alpha"}
        assert of_jobs(access_paths(table, workers.EARLIER_LIVES, me)) == {"jobs_owned"}
        assert of_jobs(access_paths(table, workers.DUPLICATES, me)) == {"jobs_owned"}
        silent = {"silent_for": 60.0, "ids": [WORKER]}
        assert of_jobs(access_paths(table, workers.SILENT, silent)) == {"jobs_owned"}
        assert of_jobs(access_paths(table, workers.FORGET, silent)) == {"jobs_owned"}

    def test_strays(self, table: Connection) -> None:
        parameters = hand(some(table, "processing", 100)) | {"claiming": [], "older_than": 6.0}
        assert access_paths(table, heartbeat.ORPHANED, parameters) == {"jobs_owned"}

    def test_queued_kinds(self, table: Connection) -> None:
        parameters = {"kinds": [KIND, "ghost", "ghost-2"]}
        table.execute(ALONG_INDEX)
        assert rows_read(table, republish.QUEUED_KINDS, parameters) <= 3
        table.execute(ALONG_INDEX)
        assert access_paths(table, republish.QUEUED_KINDS, parameters) <= {"jobs_queued_in_order"}


class TestBacklog:
    """Reads of the queue look at a page of it, however long it is."""

    LIMIT = 200

    def waiting(self, kind: str, older_than: float) -> dict[str, Any]:
        page = {"limit": self.LIMIT, "length": self.LIMIT, "besides": [], "delivered": None}
        return {"kind": kind, "older_than": older_than} | page

    @pytest.mark.parametrize(("older_than", "found"), [(0.0, LIMIT), (7200.0, 0)])
    def test_waiting(self, table: Connection, older_than: float, found: int) -> None:
        parameters = self.waiting(KIND, older_than)
        assert access_paths(table, republish.WAITING, parameters) == {"jobs_queued_in_order"}
        assert len(table.execute(republish.WAITING, parameters).all()) == found
        assert rows_read(table, republish.WAITING, parameters) <= 3 * found + 1

    def test_waiting_behind_rows_set_aside(self, table: Connection) -> None:
        aside = """
            INSERT INTO jsworker.refused_rows
              (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, worker_id, retry_at)
            SELECT id, 'claim', kind, status, fencing_token, dispatch, 'P0001', 'w', now() + interval '1 hour'
            FROM jsworker.jobs WHERE status = 'queued' AND kind = :kind ORDER BY queued_at LIMIT 1000
        """
        table.execute(text(aside), {"kind": KIND})
        parameters = self.waiting(KIND, 0.0)
        assert access_paths(table, republish.WAITING_BESIDES, parameters) == {
            "jobs_queued_in_order",
            "refused_rows_pkey",
        }
        assert len(table.execute(republish.WAITING_BESIDES, parameters).all()) == self.LIMIT

    def test_waiting_among_thousands_of_one_instant(self, table: Connection) -> None:
        together = """
            INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, publish_after, queued_at)
            SELECT uuidv7(), 'together', '{}', 'queued', 1, now(), now() - interval '1 hour'
            FROM generate_series(1, 3000)
        """
        table.execute(text(together))
        parameters = self.waiting("together", 0.0)
        assert rows_read(table, republish.WAITING, parameters) <= 3 * self.LIMIT + 1

    def test_waiting_for_no_first_delivery(self, table: Connection) -> None:
        """No more than a page is read, however few are found."""
        parameters = self.waiting(KIND, 0.0) | {"limit": 5000, "length": 1000, "delivered": 0}
        assert access_paths(table, republish.WAITING, parameters) == {"jobs_queued_in_order"}
        assert len(table.execute(republish.WAITING, parameters).all()) == 1000
        assert rows_read(table, republish.WAITING, parameters) <= 3 * 1000 + 1

    @pytest.mark.parametrize(("priority", "found"), [(0, 0), (2, LIMIT)])
    def test_waiting_in_a_lane(self, table: Connection, priority: int, found: int) -> None:
        low = """
            INSERT INTO jsworker.jobs
              (id, kind, payload, status, dispatch, publish_after, queued_at, priority)
            SELECT uuidv7(), :kind, '{}', 'queued', 1, now(), now() - (1000 + n) * interval '1 ms', 2
            FROM generate_series(1, 1000) AS n
        """
        table.execute(text(low), {"kind": KIND})
        parameters = self.waiting(KIND, 0.0) | {"priority": priority}
        assert len(table.execute(republish.WAITING_IN_LANE, parameters).all()) == found
        assert rows_read(table, republish.WAITING_IN_LANE, parameters) <= 3 * found + 1
        table.execute(text(low), {"kind": KIND})
        assert access_paths(table, republish.WAITING_IN_LANE, parameters) == {"jobs_queued_lanes"}

    def test_lanes_with_jobs(self, table: Connection) -> None:
        parameters = {"kinds": [KIND, KIND, "ghost"], "priorities": [0, 2, 0]}
        table.execute(ALONG_INDEX)
        assert access_paths(table, priorities.LANES, parameters) <= {"jobs_queued_lanes"}

    @pytest.mark.parametrize("place", [None, 0, QUEUED // 2, QUEUED - 100])
    def test_posted(self, table: Connection, place: int | None) -> None:
        after = after_place(table, place) or {"after": "-infinity", "after_id": UUID(int=0)}
        parameters = {"older_than": 0.0, "limit": self.LIMIT} | after
        assert of_jobs(access_paths(table, republish.POSTED, parameters)) == {"jobs_queued_in_order"}
        found = len(table.execute(republish.POSTED, parameters).all())
        assert found == min(self.LIMIT, QUEUED - (place or 0) - (place is not None))
        # The last page looks at the rows behind it as well, which wait for their relay.
        assert rows_read(table, republish.POSTED, parameters) <= 3 * 4 * self.LIMIT

    @pytest.mark.parametrize("place", [0, 1500])
    def test_posted_among_thousands_of_one_instant(self, table: Connection, place: int) -> None:
        """Each step begins behind the row before, and passes none of the others."""
        together = """
            INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, stream_seq, queued_at)
            SELECT uuidv7(), 'together', '{}', 'queued', 1, n, now() - interval '2 hours'
            FROM generate_series(1, 3000) AS n
        """
        table.execute(text(together))
        after = after_place(table, place)
        parameters = {"older_than": 0.0, "limit": self.LIMIT} | (after or {})
        assert len(table.execute(republish.POSTED, parameters).all()) == self.LIMIT
        assert rows_read(table, republish.POSTED, parameters) <= 3 * 4 * self.LIMIT


def after_place(connection: Connection, place: int | None) -> dict[str, Any] | None:
    """Return the cursor behind the published job at a place of the queue."""
    query = text("""
        SELECT queued_at AS after, id AS after_id FROM jsworker.jobs
        WHERE status = 'queued' AND NOT needs_publish ORDER BY queued_at, id OFFSET :place LIMIT 1
    """)
    if place is None:
        return None
    return dict(connection.execute(query, {"place": place}).mappings().one())


async def test_heartbeats_are_hot_updates(databases: TestDatabases, migrated: str) -> None:
    url = databases.create(migrated)
    runs, beats = 200, 50
    figures = """
        SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables
        WHERE schemaname = 'jsworker' AND relname = 'jobs'
    """
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as sql:
        held = [(insert_job(sql, "processing"), 1) for _ in range(runs)]
        database = Database(url, statement_timeout=10.0)
        for _ in range(beats):
            assert len((await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=held)).alive) == runs
        await database.close()  # a connection reports its figures when it ends

        def updates() -> dict[str, int]:
            return dict(sql.execute(figures).fetchone() or {})

        await eventually(lambda: updates().get("n_tup_upd") == runs * beats, "every update is counted")
        assert updates()["n_tup_hot_upd"] >= 0.95 * runs * beats


class TestManyKinds:
    """Producers invent kinds as they like; one INSERT can bring hundreds of thousands."""

    def test_posted(self, many_kinds: Connection) -> None:
        beginning = {"after": "-infinity", "after_id": UUID(int=0)}
        parameters = {"older_than": 0.0, "limit": 300} | beginning
        assert rows_read(many_kinds, republish.POSTED, parameters) <= 10_000
        kinds = {row.kind for row in many_kinds.execute(republish.POSTED, parameters | {"limit": 2_000})}
        assert len(kinds) == 1_000 + 1
        assert "zzz-served" in kinds  # the last by name, and a worker is for it

    def test_queues_of_the_doctor(self, many_kinds: Connection) -> None:
        parameters = {"served": ["zzz-served", "idle"]}
        assert rows_read(many_kinds, inspection.QUEUED, parameters) <= 10_000
        kinds = [row.kind for row in many_kinds.execute(inspection.QUEUED, parameters)]
        assert len(kinds) == MOST_QUEUES + 1
        assert kinds[-1] == "zzz-served"

    @pytest.mark.parametrize("statement", [listing.OTHER_KINDS, listing.OTHER_KINDS_IN_LANE])
    def test_kinds_that_a_listing_leaves_out(self, many_kinds: Connection, statement: TextClause) -> None:
        many_kinds.execute(ALONG_INDEX)
        assert rows_read(many_kinds, statement, {}) <= 10_000

    def test_backlog_brings_a_row_for_each_kind_that_is_asked_for(self, many_kinds: Connection) -> None:
        rows = many_kinds.execute(BACKLOG, {"kinds": ["zzz-served", "idle"]}).all()
        queued = {row.kind: row.number for row in rows if row.what == "queued"}
        assert queued == {"zzz-served": 1, None: KINDS}
        paths = access_paths(many_kinds, BACKLOG, {"kinds": ["zzz-served", "idle"]})
        others = {f"Seq Scan on {name}" for name in ("dead_messages", "refused_rows", "schedules")}
        pauses = {"limits_pkey", "Seq Scan on limits"}  # if it is known to be empty
        assert len(paths & pauses) == 1
        assert paths - others - pauses == {
            "jobs_queued_in_order",
            "jobs_due",
            "jobs_owned",
            "jobs_queued_lanes",
            "jobs_to_publish",
            "jobs_held",
        }

    @pytest.mark.parametrize(
        ("statement", "values"),
        [(status.RUNNING, {}), (status.KINDS, {"after": "", "most": 50, "lately": []})],
        ids=["running", "kinds"],
    )
    def test_runs_that_ended_are_not_looked_at_again_and_again(
        self, many_kinds: Connection, statement: TextClause, values: dict[str, Any]
    ) -> None:
        many_kinds.execute(ALONG_INDEX)
        explain = text(f"EXPLAIN (FORMAT JSON) {statement.text}")
        (plan,) = many_kinds.execute(explain, values).scalar_one()
        many_kinds.rollback()
        scans = {node["Node Type"] for node in _nodes(plan["Plan"]) if node.get("Index Name") == "jobs_owned"}
        assert scans == {"Index Scan"}  # which marks their entries; a bitmap's does not

    def test_limits_are_read_where_slots_and_held_jobs_stand(self, many_kinds: Connection) -> None:
        use = access_paths(many_kinds, inspection.LIMIT_USE, {"kinds": ["idle"]})
        assert {path for path in use if "jobs" in path} == {"jobs_slots"}
        beginning = {"after_kind": "", "after_key": ""}
        held = access_paths(many_kinds, inspection.LIMITS, beginning)
        assert {path for path in held if "jobs" in path} == {"jobs_held_by_key", "jobs_slots"}
        assert rows_read(many_kinds, inspection.LIMITS, beginning) == 0

    def test_held_jobs_without_a_key_are_found_among_the_held(self, many_kinds: Connection) -> None:
        paths = access_paths(many_kinds, limits.GIVE_KEYS, {})
        assert paths in ({"jobs_held_by_key", "jobs_pkey"}, {"jobs_held", "jobs_pkey"})
        assert rows_read(many_kinds, limits.GIVE_KEYS, {}) == 0


def test_backlog_finds_pauses_by_key_among_many_limits(databases: TestDatabases, migrated: str) -> None:
    keys = (
        "INSERT INTO jsworker.limits (kind, key)"
        " SELECT 'kind-' || n %% 100, 'key-' || n FROM generate_series(1, %(keys)s) AS n"
    )
    with connected(databases.create_full(migrated, keys, keys=20_000)) as many_keys:
        paths = access_paths(many_keys, BACKLOG, {"kinds": ["kind-7", "idle"]})
    assert {path for path in paths if "limits" in path} == {"limits_pkey"}


MIDDLE = text("""
SELECT id AS after, run_at AS place FROM jsworker.jobs WHERE status = 'scheduled' AND held_by IS NULL
ORDER BY run_at OFFSET :place LIMIT 1
""")
NO_ERROR = UUID("d41d8cd9-8f00-b204-e980-0998ecf8427e")
"""The group of those that failed without an error, as the listed ones did."""
LISTED: dict[str, tuple[TextClause, dict[str, Any], set[str]]] = {
    "newest": (listing.NEWEST, {"status": None, "window": 500}, {"jobs_pkey"}),
    "completed": (listing.NEWEST, {"status": "completed", "window": 500}, {"jobs_pkey"}),
    "failed": (listing.LISTED["failed"], {"status": "failed"}, {"jobs_failed"}),
    "cancelled of a kind": (
        listing.LISTED_OF_KIND["cancelled"],
        {"status": "cancelled", "kind": "other-kind"},
        {"jobs_failed_of_kind"},
    ),
    "of a group of failures": (
        listing.LISTED["failure"],
        {"kind": KIND, "failure": NO_ERROR},
        {"jobs_failures"},
    ),
    "page of a group of failures": (
        listing.PAGE_OF_FAILURE,
        {"kind": KIND, "failure": NO_ERROR},
        {"jobs_failures"},
    ),
    "next due": (listing.LISTED["scheduled"], {}, {"jobs_due"}),
    "next due of a priority": (listing.LISTED["scheduled"], {"priority": 2}, {"jobs_due"}),
    "failed of a priority": (listing.LISTED["failed"], {"status": "failed", "priority": 2}, {"jobs_failed"}),
    "page of queued of a priority": (
        listing.PAGES["queued"],
        {"priority": 0, "place_kind": KIND},
        {"jobs_queued_in_order"},
    ),
    "next due of a kind": (listing.LISTED_OF_KIND["scheduled"], {"kind": KIND}, {"jobs_due_of_kind"}),
    "held": (listing.LISTED["held"], {"place_kind": KIND, "place": "limit"}, {"jobs_held"}),
    "held of a kind": (listing.LISTED_OF_KIND["held"], {"kind": KIND}, {"jobs_due_of_kind"}),
    "page of held jobs": (listing.PAGES["held"], {"place_kind": KIND, "place": "limit"}, {"jobs_held"}),
    "page of held of a kind": (listing.PAGES_OF_KIND["held"], {"kind": KIND}, {"jobs_due_of_kind"}),
    "last queued": (listing.LAST_QUEUED, {}, {"jobs_queued_in_order"}),
    "last queued of a kind": (listing.LAST_QUEUED, {"kind": KIND}, {"jobs_queued_in_order"}),
    "last queued of a priority": (listing.LAST_IN_LANE, {"priority": 2}, {"jobs_queued_lanes"}),
    **{
        f"page of {status} {of}": (pages[status], {"kind": kind, "place_kind": KIND}, {index})
        for of, kind, pages in (("jobs", None, listing.PAGES), ("a kind", KIND, listing.PAGES_OF_KIND))
        for status, index in (
            ("scheduled", "jobs_due_of_kind"),
            ("queued", "jobs_queued_in_order"),
            ("failed", "jobs_failed" + "_of_kind" * (kind is not None)),
        )
    },
}


STATUS: dict[str, tuple[TextClause, dict[str, Any], set[str]]] = {
    "kinds": (
        status.KINDS,
        {"after": "", "most": 50, "lately": []},
        {"jobs_queued_in_order", "jobs_due_of_kind", "jobs_failed_of_kind", "jobs_owned"},
    ),
    "counts": (
        status.COUNTS,
        {"kinds": [KIND, "other-kind"]},
        {"jobs_queued_in_order", "jobs_due_of_kind", "jobs_failed_of_kind"},
    ),
    "held": (status.HELD, {"kinds": [KIND, "other-kind"]}, {"jobs_held"}),
    "running": (status.RUNNING, {}, {"jobs_owned"}),
    "enqueued": (status.ENQUEUED, {}, {"jobs_pkey"}),
    "ended": (status.ENDED, {}, {"jobs_finished"}),
}


class TestStatus:
    """Its counts end at a bound, and read what they count along an index that holds nothing else."""

    @pytest.mark.parametrize("name", STATUS)
    def test_nothing_else_is_read(self, listed: Connection, name: str) -> None:
        statement, parameters, wanted = STATUS[name]
        listed.execute(ALONG_INDEX)
        assert of_jobs(access_paths(listed, statement, parameters)) == wanted
        bounded = text(statement.text.replace(f"LIMIT {status.BOUND}", "LIMIT 100"))
        listed.execute(ALONG_INDEX)
        least = 0 if name in ("kinds", "running") else 100
        most = 4 * TestListings.EACH if least == 0 else 2_000
        assert least <= rows_read(listed, bounded, parameters) <= most

    def test_queued_jobs_are_counted_from_the_last_one(self, listed: Connection) -> None:
        """The first entries that a flood leaves in the index lead to rows that wait no longer."""
        listed.execute(ALONG_INDEX)
        explain = text(f"EXPLAIN (FORMAT JSON) {status.COUNTS.text}")
        (plan,) = listed.execute(explain, {"kinds": [KIND]}).scalar_one()
        queued = [node for node in _nodes(plan["Plan"]) if node.get("Index Name") == "jobs_queued_in_order"]
        assert [node["Scan Direction"] for node in queued] == ["Backward", "Forward"]  # how many, since when

    def test_held_jobs_are_counted_up_to_a_bound(self, listed: Connection) -> None:
        none, bounded = [
            text(BACKLOG.text.replace(f"ORDER BY j.id LIMIT {MOST_HELD}", f"ORDER BY j.id LIMIT {most}"))
            for most in (0, 100)
        ]
        read = []
        for statement in (none, bounded):
            listed.execute(ALONG_INDEX)
            read.append(rows_read(listed, statement, {"kinds": [KIND]}))
        assert 0 < read[1] - read[0] <= 4 * 100
        rows = listed.execute(bounded, {"kinds": [KIND]}).all()
        assert {(row.kind, row.what): row.number for row in rows if row.what.startswith("held")} == {
            (kind, f"held by {why}"): 100 for kind in (KIND, None) for why in ("limit", "needs")
        }
        listed.rollback()

    def test_as_many_kinds_as_there_may_be(self, many_kinds: Connection) -> None:
        many_kinds.execute(ALONG_INDEX)
        assert rows_read(many_kinds, status.KINDS, {"after": "junk-5", "most": 50, "lately": []}) <= 1_000


class TestListings:
    """Each looks at a few rows through an index, however many jobs there are of its status, and of others."""

    EACH = 10_000

    @pytest.mark.parametrize("name", LISTED)
    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_few_rows_are_read_by_index(self, listed: Connection, name: str, *, is_first: bool) -> None:
        statement, own, wanted = LISTED[name]
        middle = {"place": self.EACH // 2}
        place: dict[str, Any] = dict(listed.execute(MIDDLE, middle).mappings().one())
        place = dict.fromkeys(place) if is_first else place
        every = {"kind": None, "digits": None, "priority": None, **ANY_JOB.values(), **ANY_AGE.values()}
        parameters = {**every, "limit": 200, **place} | own
        listed.execute(ALONG_INDEX)
        paths = access_paths(listed, statement, parameters)
        assert paths - {"jobs_pkey"} == wanted - {"jobs_pkey"}
        listed.execute(ALONG_INDEX)
        assert rows_read(listed, statement, parameters) <= 2_000

    @pytest.mark.parametrize("is_first", [True, False])
    def test_of_a_kind_a_few_that_have_ended_are_read_and_those_that_have_not(
        self, listed: Connection, *, is_first: bool
    ) -> None:
        query = text(
            "SELECT id FROM jsworker.jobs WHERE status = 'completed' ORDER BY id OFFSET 5000 LIMIT 1"
        )
        every = {"status": None, "digits": None, "priority": None, **ANY_JOB.values()}
        place = None if is_first else listed.execute(query).scalar_one()
        parameters = {**every, "kind": KIND, "window": 50, "limit": 50, "after": place}
        listed.execute(ALONG_INDEX)
        live = {"jobs_queued_in_order", "jobs_due_of_kind", "jobs_owned"}
        assert access_paths(listed, listing.NEWEST_OF_KIND, parameters) == {
            *("jobs_ended_of_kind", "jobs_pkey"),
            *live,
        }
        bounded = text(listing.NEWEST_OF_KIND.text.replace(f"LIMIT {listing.WINDOW}", "LIMIT 100"))
        listed.execute(ALONG_INDEX)
        assert rows_read(listed, bounded, parameters) <= 3 * 2 * 100 + 2 * 2 * 50

    @pytest.mark.parametrize("order", ["processing", *listing.SINCE])
    @pytest.mark.parametrize("is_first", [True, False])
    def test_only_running_jobs_are_read_for_a_list_of_them(
        self, listed: Connection, order: str, *, is_first: bool
    ) -> None:
        place = dict(listed.execute(MIDDLE, {"place": 1}).mappings().one())
        place = dict.fromkeys(place) if is_first else place
        ages = ANY_AGE.values() | {age: 0.0 for age in listing.SINCE if age == order}
        parameters = {"kind": None, "priority": None, **ANY_JOB.values(), **ages, "limit": 200, **place}
        listed.execute(ALONG_INDEX)
        assert access_paths(listed, listing.LISTED[order], parameters) == {"jobs_owned"}
        listed.execute(ALONG_INDEX)
        assert rows_read(listed, listing.LISTED[order], parameters) <= 2 * self.EACH


class TestFailures:
    """Groups are found by leaps, and looked at in as far as they are counted."""

    def test_groups_are_found_by_leaps(self, listed: Connection) -> None:
        parameters = {"after_kind": "", "after_failure": UUID(int=0), "kind": None, "limit": 100}
        listed.execute(ALONG_INDEX)
        assert access_paths(listed, failures.FAILURES, parameters) == {"jobs_failures"}
        listed.execute(ALONG_INDEX)
        assert rows_read(listed, failures.FAILURES, parameters) <= 10

    def test_a_group_is_counted_up_to_a_bound(self, listed: Connection) -> None:
        parameters = {"kinds": [KIND, "other-kind"], "failures": [NO_ERROR] * 2, "bound": 100}
        listed.execute(ALONG_INDEX)
        assert access_paths(listed, failures.FAILURE_GROUPS, parameters) == {"jobs_failures"}
        listed.execute(ALONG_INDEX)
        assert rows_read(listed, failures.FAILURE_GROUPS, parameters) <= 2 * (2 + 100) + 100
