"""A rolling upgrade, worker by worker: both versions work side by side, on the new schema or the one before.

The earlier version is the wheel in ``earlier/``, which knows the schema up to revision 0001.
"""

import os
import secrets
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row

import jsworker
from jsworker import JobClient
from jsworker.core.errors import MigrationMissing
from jsworker.core.priorities import PRIORITIES
from jsworker.core.settings import Settings, variable_of
from jsworker.ownership.database import OLDEST_REVISION, REVISIONS
from jsworker.ownership.upgrading import current_revision, upgrade_database
from tests.conftest import FAST
from tests.ownership.rows import Sql
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.servers import TestServers

EARLIER = Path(__file__).parent / "earlier"
JOBS = Path(__file__).parents[1] / "supervisor/jobs_module.py"


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder from which the earlier version can be imported."""
    folder = tmp_path_factory.mktemp("earlier")
    [wheel] = EARLIER.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


class Site:
    """One database and one stream, and workers of either version on them."""

    def __init__(self, servers: TestServers, folder: Path, earlier: Path) -> None:
        unique = secrets.token_hex(4)
        self.url = servers.postgres.create_database(f"upgrade_{unique}")
        self._folder = folder
        self._earlier = earlier
        values = {
            "database_url": self.url,
            "nats_url": servers.nats.url,
            "stream": f"UPGRADE_{unique}",
            "subject_prefix": f"upgrade-{unique}",
            **FAST,
            # No machine is so busy that an owner who lives is taken for dead, or a statement for lost.
            "statement_timeout": 2.5,
            "heartbeat_interval": 3.0,
            "crash_threshold": 10.0,
            "stale_threshold": 20.0,
            "ack_wait": 60.0,
        }
        self.settings = Settings(**values)
        self._environment = {variable_of(name): str(value) for name, value in values.items()}
        self._started: list[ParentProcess] = []
        (folder / "my_jobs.py").write_text(JOBS.read_text())

    def run_earlier(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command of the earlier version."""
        return subprocess.run(
            [sys.executable, "-m", "jsworker", *arguments],
            cwd=self._folder,
            env={**os.environ, **self._environment, "PYTHONPATH": str(self._earlier)},
            capture_output=True,
            text=True,
            check=False,
        )

    async def worker(self, *, is_earlier: bool) -> ParentProcess:
        """Start a worker of either version and wait until it works."""
        path = {"PYTHONPATH": str(self._earlier)} if is_earlier else {}
        parent = ParentProcess("my_jobs:Nap", folder=self._folder, environment={**self._environment, **path})
        self._started.append(parent)
        await parent.ready()
        return parent

    def end(self) -> None:
        for parent in self._started:
            parent.kill_all()


@pytest.fixture
def site(servers: TestServers, earlier: Path, tmp_path: Path) -> Iterator[Site]:
    made = Site(servers, tmp_path, earlier)
    yield made
    made.end()


@pytest.fixture
def sql(site: Site) -> Iterator[Sql]:
    with psycopg.connect(site.url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


def versions_at_work(sql: Sql) -> set[str]:
    rows = sql.execute("SELECT DISTINCT version FROM jsworker.workers WHERE state = 'running'").fetchall()
    return {row["version"] for row in rows}


def completed(sql: Sql) -> int:
    return sql.execute("SELECT FROM jsworker.jobs WHERE status = 'completed'").rowcount


async def all_end_completed(sql: Sql, jobs: int) -> None:
    async def all_ended() -> None:
        assert completed(sql) == jobs

    await eventually(all_ended)


async def holder_of(sql: Sql, kind: str = "nap") -> str:
    async def held() -> str:
        rows = sql.execute(
            "SELECT w.version FROM jsworker.jobs AS j JOIN jsworker.workers AS w ON w.id = j.worker_id "
            "WHERE j.status = 'processing' AND j.kind = %s AND j.stage = 'asleep'",
            [kind],
        ).fetchall()
        assert rows
        return str(rows[0]["version"])

    return await eventually(held)


def enqueue_by_earlier(site: Site, seconds: float, count: int) -> None:
    payload = f'{{"seconds": {seconds}}}'
    enqueued = site.run_earlier("enqueue", "nap", "--payload", payload, "--count", str(count))
    assert enqueued.returncode == 0, enqueued.stderr
    assert len(enqueued.stdout.split()) == count


@pytest.mark.thorough
@pytest.mark.parametrize("revision", [OLDEST_REVISION, "head"])
async def test_workers_are_replaced_one_by_one_and_nothing_is_lost(
    revision: str, site: Site, sql: Sql
) -> None:
    assert site.run_earlier("db", "upgrade").returncode == 0
    old_version, new_version = site.run_earlier("--version").stdout.split()[-1], jsworker.__version__
    old = await site.worker(is_earlier=True)
    enqueue_by_earlier(site, 3600, 1)
    assert await holder_of(sql) == old_version
    if REVISIONS.index(current_revision(site.url)) < REVISIONS.index(OLDEST_REVISION):
        with pytest.raises(MigrationMissing, match="run `jsworker db upgrade`"):
            await JobClient(site.settings).open()

    upgrade_database(
        site.url, revision
    )  # beside a running worker of the old version, as the migration Job does
    async with JobClient(site.settings) as client:
        enqueue_by_earlier(site, 0, 5)
        await client.enqueue_many("nap", [{"seconds": 0}] * 5)
        await all_end_completed(sql, 10)  # by the old worker, on the new schema

        new = await site.worker(is_earlier=False)
        assert versions_at_work(sql) == {old_version, new_version}
        enqueue_by_earlier(site, 0, 20)
        await client.enqueue_many("nap", [{"seconds": 0}] * 20)
        await all_end_completed(sql, 50)
        old.kill_all()
        await all_end_completed(sql, 51)  # the job that the old worker held

        await client.enqueue("nap", {"seconds": 3600})
        assert await holder_of(sql) == new_version
        await site.worker(is_earlier=True)
        new.kill_all()
        await all_end_completed(sql, 52)  # a way back: the old worker takes over from the new one

        upgrade_database(site.url)
        await site.worker(is_earlier=False)
        enqueue_by_earlier(site, 0, 10)
        await client.enqueue_many("nap", [{"seconds": 0}] * 10)
        await all_end_completed(sql, 72)
    assert sql.execute("SELECT FROM jsworker.jobs WHERE errors > 0").rowcount == 0


@pytest.mark.thorough
async def test_jobs_of_every_priority_run_whoever_is_there(site: Site, sql: Sql) -> None:
    """Workers of the earlier version know no lanes: they find such jobs in the table."""
    assert site.run_earlier("db", "upgrade").returncode == 0
    await site.worker(is_earlier=True)
    upgrade_database(site.url)
    async with JobClient(site.settings) as client:
        for priority in PRIORITIES:
            await client.enqueue_many("nap", [{"seconds": 0}] * 3, priority=priority)
        await all_end_completed(sql, 9)
        await site.worker(is_earlier=False)
        for priority in PRIORITIES:
            await client.enqueue_many("nap", [{"seconds": 0}] * 10, priority=priority)
        await all_end_completed(sql, 39)
    assert sql.execute("SELECT FROM jsworker.jobs WHERE attempts <> 1").rowcount == 0
