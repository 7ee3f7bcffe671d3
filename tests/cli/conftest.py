"""One migrated database and one stream for all tests of the command line; each test finds empty tables."""

import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest
import structlog
from psycopg.rows import dict_row

from jsworker.telemetry import logs
from tests.ownership.rows import TABLES, Sql, empty_tables
from tests.support.servers import TEMPLATE, TestServers, copy_database

from .commands import Cli, Spawn

JOBS_MODULE = """
import asyncio
import sys
import time
from pathlib import Path

from pydantic import BaseModel

from jsworker import Job, JobProcessor

print("this line is no JSON")


class Numbers(BaseModel):
    n: int


class Double(JobProcessor[Numbers]):
    async def process(self, job: Job[Numbers]) -> int:
        return 2 * job.payload.n


class Boom(JobProcessor):
    max_attempts = 1

    def process(self, job):
        raise ValueError("boom")


class Sleepy(JobProcessor):
    async def process(self, job):
        await job.update_progress(stage="asleep")
        await asyncio.sleep(3600)


class StuckThread(JobProcessor):
    def process(self, job):
        job.sync.update_progress(stage="stuck")
        while True:
            print("still here")
            time.sleep(0.01)


class StuckInPool(JobProcessor):
    async def process(self, job):
        await job.update_progress(stage="stuck")
        await asyncio.to_thread(time.sleep, 3600)


class Blocking(JobProcessor):
    async def process(self, job):
        Path("blocks").touch()
        time.sleep(600)


class Unfinished(JobProcessor):
    pass


class Demanding(JobProcessor):
    def __init__(self, needed):
        self.needed = needed

    def process(self, job):
        pass


class Outer:
    class Inner(Double):
        pass


class Double2(JobProcessor):
    kind = "double"

    def process(self, job):
        pass


class Patient(JobProcessor):
    stale_threshold = 1000.0

    def process(self, job):
        pass


made = Double()
a_number = 42
"""


@pytest.fixture(scope="session")
def cli_environment(servers: TestServers) -> Mapping[str, str]:
    """Variables that lead to the tests' own database and stream."""
    name = f"cli_{secrets.token_hex(4)}"
    return {
        "JSWORKER_DATABASE_URL": copy_database(servers.postgres, name, TEMPLATE),
        "JSWORKER_NATS_URL": servers.nats.url,
        "JSWORKER_STREAM": name,
        "JSWORKER_SUBJECT_PREFIX": name,
    }


@pytest.fixture(scope="session")
def observer(cli_environment: Mapping[str, str]) -> Iterator[Sql]:
    url = cli_environment["JSWORKER_DATABASE_URL"]
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def sql(observer: Sql) -> Sql:
    """A connection of the test's own, on empty tables."""
    empty_tables(observer, TABLES - {"installation"})  # the stream names it
    return observer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a module of processors in it."""
    (tmp_path / "cli_jobs.py").write_text(JOBS_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "cli_jobs", raising=False)
    return tmp_path


@pytest.fixture
def _logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``run`` sends this process's logs to a stream that ends with the test."""
    monkeypatch.setattr(logs, "_own", logs.own_logger())
    configured, handlers = structlog.get_config(), logging.getLogger().handlers[:]
    yield
    structlog.configure(**configured)
    logging.getLogger().handlers[:] = handlers


@pytest.fixture
def cli(
    _logs_as_before: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cli_environment: Mapping[str, str],
) -> Cli:
    """Calls commands in this process, with the variables of the tests' servers."""
    monkeypatch.delenv("COLUMNS", raising=False)
    # On a busy machine a message may be stored after the two seconds for which a client waits, or be sent so
    # late that it is left to workers; the command then says on stderr that a worker publishes it.
    for limit in ("_CONNECT_SECONDS", "_PUBLISH_SECONDS", "_RESERVED_SECONDS"):
        monkeypatch.setattr(f"jsworker.client.client_publisher.{limit}", 60.0)
    for name, value in cli_environment.items():
        monkeypatch.setenv(name, value)
    return Cli(capsys)


@pytest.fixture
def spawn(tmp_path: Path, cli_environment: Mapping[str, str]) -> Iterator[Spawn]:
    """Starts commands as processes, with the same variables; kills what is left at the end."""
    starter = Spawn(tmp_path, cli_environment)
    yield starter
    starter.end()
