"""A mark in encrypted jobs, and the keys: neither is in any table, log, event, message, metric or listing."""

import asyncio
import base64
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import nats
import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker import JobClient
from jsworker.core.contents import is_encoded_value
from jsworker.core.settings import Settings
from tests.cli.commands import Cli
from tests.security.conftest import variables
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually

KINDS = {"keeps": "completed", "raises": "failed", "fails": "failed", "strict": "failed", "alone": "failed"}
MARK = f"c4n4ry-{secrets.token_hex(6)}"
KEY = base64.b64encode(secrets.token_bytes(32)).decode()


def found_in(text: str) -> list[str]:
    """Return what a text holds of what must be nowhere."""
    parts = {"the mark": MARK, "the number": "73010417", "the key": KEY[:16], "the key's end": KEY[16:40]}
    return [name for name, part in parts.items() if part in text]


@pytest.fixture
def sealed(make_settings: Callable[..., Settings], tmp_path: Path) -> Settings:
    (tmp_path / "keys").write_text(f"one:{KEY}\n")
    return make_settings(
        encryption_keys=f"one:{KEY}", encrypted_only=True, publish_events=True, log_level="debug", http_port=0
    )


@pytest.fixture
def environment(sealed: Settings, tmp_path: Path) -> dict[str, str]:
    found = variables(sealed)
    del found["JSWORKER_ENCRYPTION_KEYS"]
    return found | {"JSWORKER_ENCRYPTION_KEYS_FILE": str(tmp_path / "keys")}


def whole_database(url: str) -> str:
    """Return every row of every table of the database as text."""
    found = []
    with psycopg.connect(url, row_factory=dict_row) as connection:
        names = "SELECT format('%I.%I', schemaname, tablename) AS name FROM pg_tables WHERE schemaname IN "
        for table in connection.execute(names + "('jsworker', 'public')").fetchall():
            rows = connection.execute(f"SELECT t::text AS row FROM {table['name']} AS t".encode())  # noqa: S608 -- a name of the catalogue
            found += [str(row["row"]) for row in rows]
    return "\n".join(found)


async def all_ended(url: str) -> list[dict[str, Any]]:
    async def ended() -> list[dict[str, Any]]:
        with psycopg.connect(url, row_factory=dict_row) as connection:
            rows = connection.execute("SELECT * FROM jsworker.jobs").fetchall()
        assert {row["kind"]: row["status"] for row in rows} == KINDS, rows
        return rows

    return await eventually(ended)


def listings(jobs: dict[str, Any]) -> list[list[str]]:
    whole = [["jobs"], ["jobs", "--json"], ["workers", "--json"], ["doctor"], ["doctor", "--json"]]
    whole += [["schedules", "--json"], ["jobs", "--status", "failed"], ["dead-messages"]]
    for job_id in jobs.values():
        for more in ([], ["--json"], ["--all"], ["--traceback"], ["--full-traceback"]):
            whole.append(["job", str(job_id), *more])
    return whole


async def test_neither_the_mark_nor_the_key_is_found_anywhere(
    *,
    sealed: Settings,
    environment: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(Path(__file__).with_name("sealed_jobs.py"), tmp_path / "sealed_jobs.py")
    messages: list[bytes] = []

    async def hear(message: Any) -> None:
        messages.append(message.subject.encode() + message.data + str(message.headers).encode())

    listener = await nats.connect(sealed.nats_url)
    await listener.subscribe(">", cb=hear)
    await listener.flush()
    targets = (f"sealed_jobs:{name.capitalize()}" for name in KINDS)
    parent = ParentProcess(*targets, folder=tmp_path, environment=environment)
    try:
        async with JobClient(sealed) as client:
            payload = {"secret": MARK, "number": 73010417}
            jobs = {kind: (await client.enqueue(kind, payload)).id for kind in KINDS}
            rows = await all_ended(sealed.database_dsn())
            assert (await client.get(jobs["alone"])).checkpoint == payload
            assert await client.result(jobs["keeps"], 60) == {"found": MARK}
        assert all(is_encoded_value(row["payload"]) for row in rows)
        [listening] = await parent.tells("http.listening")
        answer = await asyncio.to_thread(urlopen, f"http://127.0.0.1:{listening['port']}/metrics", timeout=30)
        assert found_in(answer.read().decode()) == []
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        cli = Cli(capsys)
        for arguments in listings(jobs):
            said = await asyncio.to_thread(cli, *arguments)
            assert found_in(said.out + said.err) == [], arguments
        said = await asyncio.to_thread(
            cli, "enqueue", "later", "--payload", f'{{"secret": "{MARK}"}}', "--delay", "60"
        )
        assert found_in(said.ok().out) == []
    finally:
        parent.kill_all()
    assert len(parent.lines("job.completed")) == 1
    assert found_in(parent.log) == []
    assert found_in(whole_database(sealed.database_dsn())) == []
    await listener.flush()
    events = [message for message in messages if b".events." in message]
    assert len(events) >= len(KINDS)
    assert found_in(str(messages)) == []
    await listener.close()
