"""The pipeline: its nodes in their order, its limits, and a worker that is killed within a log."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from jsworker import JobClient, JobFailed, Settings, Worker
from pipeline.jobs import PROCESSORS, CountLog, Letter, LogFile, NightlyReport
from pipeline.logs import Counts, count, write_sample
from tests.ownership.rows import Sql
from tests.support.polling import eventually
from tests.support.servers import new_servers_folder

EXAMPLES = Path(__file__).parents[3] / "examples"
LINES = 300
DEADLINE = 240.0


@pytest.fixture
def settings(make_settings: Callable[..., Settings], monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings that the processors' own clients find in the environment, too."""
    found = make_settings(crash_threshold=None, stale_threshold=60.0, ack_wait=90.0)
    for name in ("database_url", "nats_url", "stream", "subject_prefix"):
        value = found.database_dsn() if name == "database_url" else str(getattr(found, name))
        monkeypatch.setenv(f"JSWORKER_{name.upper()}", value)
    return found


@pytest.fixture
def sql(database_url: str) -> Iterator[Sql]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four logs on two disks, and two subscribers."""
    for number in range(4):
        write_sample(tmp_path / "logs" / f"disk-{number % 2}" / f"{number}.log", lines=LINES, seed=number)
    (tmp_path / "subscribers.txt").write_text("ada grace\n")
    return tmp_path


def counts_of(*logs: Path) -> Counts:
    total = Counts()
    for log in logs:
        total.add(count(log.read_bytes().splitlines()))
    return total


def test_lines_are_counted(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.log", lines=LINES, seed=1)
    found = counts_of(tmp_path / "a.log")
    assert (found.requests, sum(found.by_status.values()), found.unreadable) == (LINES, LINES, 0)
    assert count([b"no line of a log\n"]).unreadable == 1


async def test_a_night(settings: Settings, client: JobClient, sql: Sql, folder: Path) -> None:
    logs = [folder / "logs" / f"disk-{number % 2}" / f"{number}.log" for number in range(4)]
    async with Worker(PROCESSORS, settings):
        job = await client.enqueue(NightlyReport, {"folder": str(folder)})
        workflow = await job.result(timeout=DEADLINE)

        async def completed() -> dict[str, Any]:
            found = await client.workflows.get(workflow)
            assert found["status"] == "completed", found
            return found

        found = await eventually(completed, seconds=DEADLINE)
    nodes = {node["name"]: node for node in found["nodes"]}
    assert {name: node["jobs"] for name, node in nodes.items()} == {
        "logs": {"completed": 4},
        "report": {"completed": 1},
        "letters": {"completed": 2},
    }
    assert nodes["logs"]["finished_at"] <= nodes["report"]["finished_at"] <= nodes["letters"]["finished_at"]
    [report] = (folder / "reports").iterdir()
    assert Counts(**json.loads(report.read_text())) == counts_of(*logs)
    assert [file.name.partition(" ")[2] for file in sorted((folder / "letters").iterdir())] == [
        "ada.txt",
        "grace.txt",
    ]
    numbers = sql.execute("SELECT kind, max_running, rate FROM jsworker.limits WHERE key = ''").fetchall()
    assert {row["kind"]: (row["max_running"], row["rate"]) for row in numbers} == {
        "count-log": (2, None),
        "send-letter": (None, 20),
    }
    [schedule] = await client.schedules.list()
    assert (schedule["name"], schedule["kind"]) == ("nightly-report", "nightly-report")


async def test_a_night_without_logs_fails_and_says_why(
    settings: Settings, client: JobClient, tmp_path: Path
) -> None:
    (tmp_path / "subscribers.txt").write_text("")
    async with Worker(PROCESSORS, settings):
        job = await client.enqueue(NightlyReport, {"folder": str(tmp_path)})
        with pytest.raises(JobFailed, match=r"has no logs/DISK/NAME\.log"):
            await job.result(timeout=DEADLINE)


@pytest.mark.usefixtures("settings")
async def test_a_log_whose_worker_is_killed_is_read_on_behind_what_was_saved(
    client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    log = tmp_path / "large.log"
    write_sample(log, lines=400_000, seed=1)
    job = await client.enqueue(CountLog, LogFile(path=str(log), disk="disk-0"))

    async def has_saved() -> None:
        [row] = sql.execute("SELECT checkpoint FROM jsworker.jobs").fetchall()
        assert row["checkpoint"] is not None

    with running_worker(tmp_path) as worker:
        await eventually(has_saved, seconds=DEADLINE)
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
    with running_worker(tmp_path):
        result = await job.result(timeout=DEADLINE)
    assert result.pop("begun_at") > 0
    assert Counts(**result) == counts_of(log)
    [row] = sql.execute("SELECT fencing_token FROM jsworker.jobs").fetchall()
    assert row["fencing_token"] == 2


@contextmanager
def running_worker(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a worker in a process group of its own, and kill what is left of it at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jsworker", "run", "pipeline.jobs:CountLog"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES)},
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_command_runs_a_night_on_servers_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "--lines", "50", "--data", new_servers_folder() / "data"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES), "PIPELINE_FOLDER": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, report = done.stdout.split("\n", 1)
    assert Path(file).parent == tmp_path / "reports"
    assert json.loads(report)["requests"] == 300
    assert "logs 6/6, report 1/1, letters 3/3" in done.stderr


def test_payloads_are_plain_json() -> None:
    letter = Letter(folder="/a", day="2026-11-21", subscriber="ada")
    assert letter.file() == Path("/a/reports/2026-11-21.json")
