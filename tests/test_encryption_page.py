"""docs/encryption.md: its code and its commands are run, and what it says of settings is true."""

import asyncio
import re
import secrets
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from jsworker import Every, Job, JobClient, JobProcessor, Settings, Worker
from jsworker.core.settings import load_settings
from tests.support.documents import Page
from tests.support.polling import eventually

PATIENT = {"statement_timeout": 5.0, "heartbeat_interval": 6.0}
PAGE = Page("docs/encryption.md")


class SendInvoice(JobProcessor[dict[str, int]]):
    async def process(self, job: Job[dict[str, int]]) -> dict[str, int]:
        await job.save_checkpoint(job.payload)
        return await job.step("echo", dict, job.payload)


@pytest.fixture
def names() -> dict[str, Any]:
    return PAGE.names()


@pytest.fixture
def session(settings: Settings) -> Iterator[Session]:
    engine = create_engine(settings.database_dsn().replace("postgresql://", "postgresql+psycopg://"))
    with Session(engine) as opened:
        yield opened
    engine.dispose()


async def test_its_commands_make_a_key_and_its_code_enqueues_with_it(
    *,
    names: dict[str, Any],
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
    tmp_path: Path,
) -> None:
    [commands], [count] = PAGE.blocks("sh"), PAGE.blocks("sql")
    install, make, export = commands.splitlines()
    assert install == "pip install 'jsworker[encryption]'"
    make = make.replace("python ", f"{sys.executable} ", 1)
    export = export.replace("$PWD", str(tmp_path)).removeprefix("export ")
    await asyncio.to_thread(subprocess.run, ["/bin/sh", "-c", make], cwd=tmp_path, check=True)
    monkeypatch.setenv(*export.split("=", 1))
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://")
    settings = make_settings(encryption_keys=load_settings().encryption_keys, encrypted_only=True, **PATIENT)
    order = {"order": secrets.randbelow(1000)}
    async with JobClient(settings) as client, Worker([SendInvoice], settings):
        names["place_order"](session, client, order)
        session.commit()
        [job_id] = session.scalars(text("SELECT id FROM jsworker.jobs"))
        assert await client.result(job_id, 60) == order
        await client.schedules.add("yearly", "send-invoice", Every(days=366, payload=order))
        assert [*map(tuple, session.execute(text(count)))] == [("2026-01", 5)]


async def test_its_own_codec_is_one(names: dict[str, Any], make_settings: Callable[..., Settings]) -> None:
    codec, settings = names["Compressed"](), make_settings(**PATIENT)
    async with (
        JobClient(settings, codec=codec) as client,
        Worker([SendInvoice], settings, codec=codec) as worker,
    ):
        job = await client.enqueue(SendInvoice, {"order": 7})
        assert await job.result(60) == {"order": 7}

        async def has_ended() -> None:
            status = worker.status()
            assert status is not None
            assert status.in_flight == {"send-invoice": 0}

        await eventually(has_ended)


def test_its_own_codec_limits_what_it_decodes(names: dict[str, Any]) -> None:
    codec, most = names["Compressed"](), names["MOST_BYTES"]
    place = zlib.crc32(b"place").to_bytes(4, "big")
    largest = b" " * most
    assert codec.decode(*codec.encode(largest, b"place"), b"place") == largest
    with pytest.raises(ValueError, match="larger than"):
        codec.encode(largest + b" ", b"place")
    for refused in (zlib.compress(largest + b" "), zlib.compress(b"cut")[:-1]):
        with pytest.raises(ValueError, match="too large, or cut"):
            codec.decode("1", place + refused, b"place")


def test_it_names_each_setting() -> None:
    named = set(re.findall(r"`JSWORKER_(ENC\w+|CODEC)", PAGE.text))
    assert named == {name.upper() for name in Settings.model_fields if name.startswith(("encrypt", "codec"))}
