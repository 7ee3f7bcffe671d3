"""Real servers for every test: one PostgreSQL and one nats-server per test process, a database per test."""

import gc
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker import JobClient
from jsworker.core.settings import Settings, variable_of
from jsworker.embedded import resources
from jsworker.ownership.database import Database
from jsworker.worker.context import WorkerContext
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from tests.ownership.rows import Sql
from tests.support.servers import (
    TEMPLATE,
    TestServers,
    copy_database,
    drop_database,
    new_servers_folder,
    start_copied_servers,
    start_migrated_servers,
)

# Collecting thousands of tests makes hardly any garbage; that is looked for again once they are collected.
gc.disable()

# A port is free for any other process until its server is started, or started again. So each process has
# ports of its own, and none of those from which the commands that tests start choose.
resources.PORTS = range(10_000, resources.PORTS.start)
if "PYTEST_XDIST_WORKER" in os.environ:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    resources.PORTS = resources.PORTS[number :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]

# Started in the background, a process ignores Ctrl-C, and so would every command that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Likewise a hang-up, under nohup.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The time scale of the fault suite: everything happens a few hundred times faster than by default.
FAST = {
    "heartbeat_interval": 0.3,
    "statement_timeout": 0.25,
    "crash_threshold": 0.9,
    "stale_threshold": 2.0,
    "scan_interval": 0.4,
    "relay_interval": 0.1,
    "ack_wait": 5.0,
    "watchdog_timeout": 1.5,
    "shutdown_timeout": 5.0,
}

UNHURRIED = FAST | {
    "crash_threshold": None,
    "stale_threshold": 60.0,
    "ack_wait": 90.0,
    "watchdog_timeout": 30.0,
}
"""On a busy machine no owner is taken for dead, nor stops itself, nor is killed for a silent event loop."""


LONG = (
    "test_short_run.py",
    "test_flow.py",
    "test_rolling_upgrade.py",
    "test_promotion.py",
    "test_ownership.py",
)
"""Modules whose tests take half a minute each: run last, they would keep one core waiting for the other."""


def pytest_collection_finish() -> None:
    """Look for garbage from here on, but not among all that was loaded, which stays."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("JSWORKER_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServers]:
    folder = new_servers_folder()
    if "PYTEST_XDIST_WORKER" in os.environ:
        running = start_copied_servers(folder, tmp_path_factory.getbasetemp().parent)
    else:
        running = start_migrated_servers(folder)
    yield running
    running.stop()


@pytest.fixture
def database_url(servers: TestServers) -> Iterator[str]:
    """A database of the test's own, dropped with it: a thousand of them would fill the memory.

    None is emptied for the next test: what a test leaves in it would be the next one's.
    """
    name = f"test_{secrets.token_hex(6)}"
    yield copy_database(servers.postgres, name, TEMPLATE)
    drop_database(servers.postgres, name)


@pytest.fixture
def sql(database_url: str) -> Iterator[Sql]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def pace(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The settings of time: with thresholds that no busy machine reaches, but for tests about silence."""
    hurried = request.node.get_closest_marker("hurried")
    if hurried is not None and hurried.args != (False,):
        return FAST
    request.getfixturevalue("patient")
    return UNHURRIED


@pytest.fixture
def make_settings(servers: TestServers, database_url: str, pace: dict[str, Any]) -> Callable[..., Settings]:
    """Return settings on a stream of the test's own; keyword arguments replace any of them."""
    unique = secrets.token_hex(4)

    def make(**changes: Any) -> Settings:
        values: dict[str, Any] = {
            "database_url": database_url,
            "nats_url": servers.nats.url,
            "stream": f"TEST_{unique}",
            "subject_prefix": f"test-{unique}",
            **pace,
        }
        return Settings(**(values | changes))

    return make


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings()


@pytest.fixture
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that lead to the test's servers, for a page's code and commands."""
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    for name in ("nats_url", "stream", "subject_prefix"):
        monkeypatch.setenv(variable_of(name), getattr(settings, name))


@pytest.fixture
async def client(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobClient]:
    """A client that is patient with a busy machine; the workers' time-outs are the test's business."""
    monkeypatch.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 30.0)
    async with JobClient(settings.model_copy(update={"statement_timeout": 10.0})) as opened:
        yield opened


@pytest.fixture(params=[1, 1_000], ids=["COPY", "INSERT"])
def copied_or_inserted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs without keys go the way of many, then that of few."""
    monkeypatch.setattr("jsworker.ownership.transitions.enqueue._LEAST_COPIED", request.param)


@pytest.fixture
async def database(settings: Settings) -> AsyncIterator[Database]:
    opened = Database(settings.database_dsn(), statement_timeout=5.0)
    await opened.check_usable()
    yield opened
    await opened.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let statements take as long as a busy machine needs, for tests that are not about silent databases."""

    def patient_database(dsn: str, *, statement_timeout: float, **options: Any) -> Database:
        return Database(dsn, statement_timeout=max(statement_timeout, 5.0), **options)

    prepare = ThrottledScan.__init__

    def prepare_patiently(scan: ThrottledScan, context: WorkerContext, what: str, **options: Any) -> None:
        prepare(scan, context, what, **options)
        scan._least = scan._seconds = max(scan._seconds, 5.0)

    monkeypatch.setattr("jsworker.worker.worker.Database", patient_database)
    monkeypatch.setattr("jsworker.client.job_client.Database", patient_database)
    # Nor is a scan slow that a busy machine lengthens: it would rest fifty times as long.
    monkeypatch.setattr("jsworker.worker.maintenance.throttled_scan._QUICK_SECONDS", 2.5)
    monkeypatch.setattr(ThrottledScan, "__init__", prepare_patiently)
