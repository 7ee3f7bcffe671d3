"""Servers behind the shipped roles and users."""

import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker.core.settings import Settings, variable_of
from tests.conftest import FAST
from tests.ownership.rows import Sql, insert_job
from tests.security.guarded import HARNESS, PASSWORDS, Guarded, guard, nats_permissions
from tests.stream.certificates import Authority
from tests.stream.nats_server import NatsServer
from tests.supervisor.parent_process import ParentProcess
from tests.support.servers import TestServers, copy_database

TEMPLATE = "guarded_template"

JOBS_MODULE = '''
import asyncio

from jsworker import Job, JobProcessor


class Echo(JobProcessor):
    async def process(self, job):
        await job.update_progress(stage="at work", progress=0.5)
        await job.save_checkpoint({"seen": True})
        return job.payload


class Twice(JobProcessor):
    """Ends its process in its first run."""

    async def process(self, job):
        if not job.cleared:
            import os
            os.abort()
        async with job.transaction(result="second run") as session:
            pass
'''


@pytest.fixture(scope="session")
def guarded_template(servers: TestServers) -> str:
    guard(servers.postgres.create_database(TEMPLATE))
    return TEMPLATE


@pytest.fixture
def guarded(servers: TestServers, guarded_template: str) -> Guarded:
    """A migrated database of the test's own."""
    name = f"guarded_{secrets.token_hex(6)}"
    return Guarded(copy_database(servers.postgres, name, guarded_template))


@pytest.fixture(scope="session")
def untouched(servers: TestServers, guarded_template: str) -> Guarded:
    """A database with one job, for tests that leave nothing behind."""
    found = Guarded(servers.postgres.create_database("guarded_untouched", template=guarded_template))
    with psycopg.connect(found.admin_url, autocommit=True, row_factory=dict_row) as connection:
        insert_job(connection)
    return found


@pytest.fixture
def sql(guarded: Guarded) -> Iterator[Sql]:
    """The superuser's connection."""
    with psycopg.connect(guarded.admin_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
async def guarded_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NatsServer]:
    """A nats-server that includes the shipped file and finds the passwords in its environment."""
    for variable, password in PASSWORDS.items():
        monkeypatch.setenv(variable, f'"{password}"')
    (tmp_path / "permissions.conf").write_text(nats_permissions())
    server = NatsServer(tmp_path, extra="max_payload: 64KB\ninclude permissions.conf")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def guarded_settings(
    guarded: Guarded, guarded_nats: NatsServer, request: pytest.FixtureRequest
) -> Callable[..., Settings]:
    """Return settings of a login; keyword arguments replace any of them."""
    request.getfixturevalue("patient")  # for the test's own clients; worker processes are as hurried as told

    def make(role: str, **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "database_url": guarded.url(role),
            "nats_url": guarded_nats.url,
            **FAST,
        }
        return Settings(**(values | changes))

    return make


@pytest.fixture
def harness_settings(guarded: Guarded, guarded_nats: NatsServer) -> Settings:
    """Settings of somebody who may do everything."""
    return Settings(database_url=guarded.admin_url, nats_url=guarded_nats.url, **FAST, **HARNESS)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., ParentProcess]]:
    """Start ``jsworker run`` with settings; kill what is left at the end."""
    (tmp_path / "guarded_jobs.py").write_text(JOBS_MODULE)
    started: list[ParentProcess] = []

    def start(settings: Settings, *targets: str, **options: Any) -> ParentProcess:
        parent = ParentProcess(
            *(f"guarded_jobs:{target}" for target in targets),
            folder=tmp_path,
            environment=variables(settings),
            **options,
        )
        started.append(parent)
        return parent

    yield start
    for parent in started:
        parent.kill_all()


def variables(settings: Settings) -> dict[str, str]:
    """Return what was set as environment variables, secrets in clear."""
    found = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        found[variable_of(name)] = str(getattr(value, "get_secret_value", lambda value=value: value)())
    return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)
