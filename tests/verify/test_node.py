"""docs/other-languages.md: its programs in Node, on real servers. Run by ``make verify``.

Needs nodejs and npm (Debian packages); ``npm ci`` takes the packages of node/package-lock.json.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest

from jsworker import Job, JobClient, JobProcessor, Settings, Worker
from tests.ownership.test_enqueue_function import CONTRACT
from tests.security.guarded import apply_roles, make_logins
from tests.support.polling import eventually
from tests.support.servers import as_role

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

NODE = Path(__file__).with_name("node")
PAGE = Path(__file__).parents[2] / "docs" / "other-languages.md"
LOGIN = "node_shop"

Run = Callable[..., Any]


class SendInvoice(JobProcessor[dict[str, int]]):
    """Does the jobs that Node enqueues."""

    async def process(self, job: Job[dict[str, int]]) -> dict[str, int]:
        return {"invoice": job.payload["order"] + 1000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's programs, ours, and the packages that they need."""
    made: Path = tmp_path_factory.mktemp("node")
    for file in NODE.iterdir():
        shutil.copy(file, made)
    for program in re.findall(r"(?ms)^```js\n(.*?)^```$", PAGE.read_text()):
        name = re.match(r"// (\w+\.mjs): ", program)
        assert name is not None
        (made / name[1]).write_text(program)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=made, check=True)
    return made


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(publish_events=True, crash_threshold=None, stale_threshold=60.0, ack_wait=90.0)


@pytest.fixture
def login(database_url: str) -> Iterator[str]:
    """The URL of a login that enqueues, reads, and has a table of its own."""
    apply_roles(database_url)
    for role in ("producer", "reader"):
        make_logins(database_url, {role: LOGIN})
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {LOGIN} AUTHORIZATION {LOGIN}".encode())
        connection.execute(f"CREATE TABLE {LOGIN}.orders (number bigint PRIMARY KEY, total numeric)".encode())
        connection.execute(f"ALTER TABLE {LOGIN}.orders OWNER TO {LOGIN}".encode())
    yield as_role(database_url, LOGIN)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"DROP OWNED BY {LOGIN} CASCADE".encode())


@pytest.fixture
def node(folder: Path, login: str, settings: Settings) -> Run:
    """Run a program and return what it printed, a JSON value."""
    environment = {
        "PATH": os.environ["PATH"],
        "DATABASE_URL": login,
        "NATS_URL": settings.nats_url,
        "SUBJECT_PREFIX": settings.subject_prefix,
    }

    def run(program: str, *arguments: str, code: int = 0) -> Any:
        done = subprocess.run(
            ["node", program, *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    return run


async def it_reads_rows(settings: Settings) -> None:
    """Check that a program of the login has read a job's row: it has listened before."""
    with psycopg.connect(settings.database_dsn()) as connection:
        count = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND query LIKE 'SELECT status%%'"
        assert connection.execute(count, [LOGIN]).fetchone() == (1,)


async def test_an_order_and_its_job_are_committed_together_and_its_result_is_read(
    node: Run, settings: Settings
) -> None:
    placed = await asyncio.to_thread(node, "place_order.mjs", "14")
    assert placed["created"] is True
    assert "duplicate key" in await asyncio.to_thread(node, "place_order.mjs", "14", code=1)
    waiting = asyncio.create_task(asyncio.to_thread(node, "await_result.mjs", placed["id"]))
    await eventually(partial(it_reads_rows, settings), seconds=60.0)
    connection = await nats.connect(settings.nats_url)
    for what in (b"no JSON", b"null", b'{"stream": "JOBS", "seq": 3}'):
        await connection.publish(f"{settings.subject_prefix}.events.send-invoice.completed", what)
    await connection.close()
    async with Worker([SendInvoice], settings):
        assert await waiting == {"status": "completed", "result": {"invoice": 1014}, "last_error": None}
        async with JobClient(settings) as client:
            assert (await client.get(placed["id"])).unique_key == "order:14"
    gone = "00000000-0000-4000-8000-000000000001"
    assert await asyncio.to_thread(node, "await_result.mjs", gone) is None


async def test_events_reach_a_plain_subscriber(node: Run, settings: Settings) -> None:
    heard = asyncio.create_task(asyncio.to_thread(node, "hear.mjs", "3"))
    async with Worker([SendInvoice], settings), JobClient(settings) as client:
        while not heard.done():  # from when it listens on it hears
            await (await client.enqueue("send-invoice", {"order": 1})).result(60)
            await asyncio.sleep(0.1)
    events = await heard
    assert {(each["subject"], each["event"]["event"]) for each in events} == {
        (f"{settings.subject_prefix}.events.send-invoice.completed", "completed")
    }


def test_every_argument_of_the_contract_and_every_refusal(node: Run, settings: Settings) -> None:
    said = node("contract.mjs")
    assert [name for name, _, _ in CONTRACT if name not in said["given"]] == []
    assert said["created"] == [True, False]
    assert said["codes"] == {
        "kind": "22023",
        "payload": "22P02",
        "delay": "22007",
        "debounce": "42501",
        "untyped": "42883",
    }
    with psycopg.connect(settings.database_dsn()) as connection:
        [row] = connection.execute(
            "SELECT kind, payload, status, max_attempts, max_stalls, limit_key, priority, "
            "expires_at IS NOT NULL, traceparent FROM jsworker.jobs"
        ).fetchall()
    assert row == ("k", {"ä": [1.5]}, "scheduled", 2, 3, "tenant", 0, True, said["traceparent"])
