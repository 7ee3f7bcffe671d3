"""The pipeline, tested as its users would test it: its order, its limits, a worker killed within a log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jsworker import Fail, JobClient
from jsworker.testing import AtProgress, kill_worker_during, run_job, work_until_empty
from pipeline.jobs import PROCESSORS, CountLog, Letter, LogFile, NightlyReport
from pipeline.logs import Counts, count, write_sample
from tests.support.servers import new_servers_folder

EXAMPLES = Path(__file__).parents[3] / "examples"
LINES = 300
DEADLINE = 240.0


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


async def test_a_night(job_client: JobClient, folder: Path) -> None:
    logs = [folder / "logs" / f"disk-{number % 2}" / f"{number}.log" for number in range(4)]
    job = await job_client.enqueue(NightlyReport, {"folder": str(folder)})
    done = await work_until_empty(PROCESSORS, timeout=DEADLINE)
    assert done.completed == {"nightly-report": 1, "count-log": 4, "write-report": 1, "send-letter": 2}
    found = await job_client.workflows.get(await job.result())
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
    numbers = {row["kind"]: (row["max_running"], row["rate"]) for row in await job_client.limits.list()}
    assert numbers == {"count-log": (2, None), "send-letter": (None, 20)}
    [schedule] = await job_client.schedules.list()
    assert (schedule["name"], schedule["kind"]) == ("nightly-report", "nightly-report")


async def test_a_night_without_logs_fails_and_says_why(job_client: JobClient, tmp_path: Path) -> None:
    (tmp_path / "subscribers.txt").write_text("")
    await job_client.enqueue(NightlyReport, {"folder": str(tmp_path)})
    with pytest.raises(Fail, match=r"has no logs/DISK/NAME\.log"):
        await work_until_empty(PROCESSORS, timeout=DEADLINE)


async def test_a_log_is_counted_from_where_it_was_saved(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    write_sample(log, lines=2 * LINES, seed=1)
    first, rest = log.read_bytes().splitlines()[:LINES], log.read_bytes().splitlines()[LINES:]
    offset = sum(len(line) + 1 for line in first)
    saved = {"offset": offset, "counts": count(first).model_dump()}
    run = await run_job(CountLog, LogFile(path=str(log), disk="disk-0"), checkpoint=saved)
    assert run.result == {**counts_of(log).model_dump(), "begun_at": offset}
    assert run.checkpoint["offset"] == log.stat().st_size
    assert (run.progress, len(rest)) == (1.0, LINES)


@pytest.mark.usefixtures("jsworker_settings")
async def test_a_log_whose_worker_is_killed_is_read_on_behind_what_was_saved(tmp_path: Path) -> None:
    log = tmp_path / "large.log"
    write_sample(log, lines=40_000, seed=1)
    payload = LogFile(path=str(log), disk="disk-0")
    killed = await kill_worker_during(CountLog, payload, at=AtProgress(0.5), timeout=DEADLINE)
    assert (killed.status, killed.runs) == ("completed", 2)
    assert killed.result.pop("begun_at") >= 0.5 * log.stat().st_size
    assert Counts(**killed.result) == counts_of(log)


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
