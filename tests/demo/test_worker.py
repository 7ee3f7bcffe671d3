"""One worker process of the demo by itself."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jsworker.core.settings import Settings, variable_of
from jsworker.demo.fleet import Fleet, WorkerEnded
from jsworker.demo.worker import main
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workers import list_workers
from tests.support.polling import eventually


async def test_it_stops_when_the_demo_is_gone_also_where_no_signal_says_so(
    settings: Settings, database: Database
) -> None:
    names = ("database_url", "nats_url", "stream", "subject_prefix")
    variables = {variable_of(name): str(getattr(settings, name)) for name in names}
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "jsworker.demo.worker"],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    async def works() -> None:
        assert [row["state"] for row in await list_workers(database, limit=5)] == ["running"]

    try:
        await eventually(works)
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_wrong_settings_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://localhost/demo")
    monkeypatch.setenv("JSWORKER_ACK_WAIT", "1")

    assert main() == 2
    assert capsys.readouterr().err.startswith("JSWORKER_ACK_WAIT=1 must exceed JSWORKER_STALE_THRESHOLD=300")


async def test_a_worker_that_ends_by_itself_is_named_with_its_last_words(
    database: Database, tmp_path: Path
) -> None:
    wrong = {"JSWORKER_DATABASE_URL": "postgresql://localhost/demo", "JSWORKER_ACK_WAIT": "1"}
    with Fleet(wrong, logs=tmp_path, size=1, run="test") as fleet, pytest.raises(WorkerEnded) as ended:
        await fleet.wait_until_registered(database)

    first, second = str(ended.value).splitlines()
    assert first == f"worker-1 ended by itself with exit code 2; the end of {tmp_path}/worker-1.log:"
    assert second.startswith("JSWORKER_ACK_WAIT=1 must exceed")
