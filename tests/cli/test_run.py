"""``run`` as a process: jobs are done, signals stop it, and its exit code tells how it ended."""

import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ownership.rows import Sql, read_value

from .commands import Cli, Process, Spawn, Terminal, wait_until

pytestmark = pytest.mark.usefixtures("here")

FAST = ("--relay-interval", "0.1", "--scan-interval", "1", "--shutdown-timeout", "20")

# A loop that ends in an error which nobody expected.
BROKEN_MODULE = """
from cli_jobs import Double
from jsworker.worker.maintenance.looks import RelayLook


async def come_off(self):
    raise LookupError("the wheel came off")


RelayLook.step = come_off
"""


def logged(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for_status(sql: Sql, status: str, count: int = 1) -> None:
    query = "SELECT count(*) FROM jsworker.jobs WHERE status = %s"
    wait_until(lambda: read_value(sql, query, status) == count, f"{count} jobs are {status}")


def wait_for_stage(sql: Sql, stage: str, count: int = 1) -> None:
    query = "SELECT count(*) FROM jsworker.jobs WHERE stage = %s"
    wait_until(lambda: read_value(sql, query, stage) == count, f"{count} jobs are {stage}")


def test_jobs_are_done_until_a_signal_stops_the_worker(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    done = cli("enqueue", "cli_jobs:Double", "--payload", '{"n": 21}').lines
    failed = cli("enqueue", "boom").lines
    options = ("--log-format", "json", "--event-loop", "asyncio")
    variables = {"JSWORKER_CONCURENCY": "3", "PYTHONWARNINGS": "always::ResourceWarning"}
    worker = spawn("run", "cli_jobs:Double", "cli_jobs:Boom", *FAST, *options, **variables)
    wait_for_status(sql, "completed")
    wait_for_status(sql, "failed")
    worker.signal(signal.SIGTERM)
    ended = worker.wait()
    assert (ended.code, ended.out) == (0, "")
    assert [line for line in ended.errors if "ResourceWarning" in line] == []
    assert read_value(sql, "SELECT result FROM jsworker.jobs WHERE id = %s", done[0]) == 42
    events = logged(ended.errors)
    [warning] = [line for line in events if line["event"] == "setting.unknown"]
    assert (warning["level"], warning["reason"]) == (
        "warning",
        "JSWORKER_CONCURENCY is no setting: did you mean JSWORKER_CONCURRENCY?",
    )
    names = [line["event"] for line in events]
    assert [name for name in names if name.startswith("worker.")] == [
        *("worker.started", "worker.draining", "worker.stopped"),
    ]
    [started] = [line for line in events if line["event"] == "worker.started"]
    assert started["event_loop"] == "asyncio"
    [failure] = [line for line in events if line["event"] == "job.failed"]
    assert failure["job_id"] == failed[0]
    [row] = cli("workers", "--json").json
    assert (row["id"], row["state"]) == (failure["worker_id"], "stopped")


@pytest.fixture
def with_core_dumps() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, before)


def event_loop_of(worker: Process) -> str:
    """Wait until a worker has started, stop it and return which event loop it had."""
    started = json.loads(worker.read_errors_until("worker.started"))
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0
    return str(started["event_loop"])


@pytest.mark.usefixtures("with_core_dumps")
def test_neither_the_worker_nor_its_children_leave_core_dumps_and_uvloop_is_used_where_it_is(
    spawn: Spawn,
) -> None:
    worker = spawn("run", "cli_jobs:Double", *FAST, "--log-format", "json")
    started = json.loads(worker.read_errors_until("worker.started"))
    assert started["event_loop"] == "uvloop"
    parent = psutil.Process(worker.popen.pid)
    assert {each.rlimit(psutil.RLIMIT_CORE)[0] for each in [parent, *parent.children()]} == {0}
    worker.signal(signal.SIGTERM)
    assert worker.wait().code == 0


@pytest.fixture
def without_uvloop(tmp_path: Path) -> str:
    """A folder for PYTHONPATH, with which uvloop cannot be imported, as where the extra was not installed."""
    (tmp_path / "sitecustomize.py").write_text("import sys\n\nsys.modules['uvloop'] = None\n")
    return str(tmp_path)


def test_without_uvloop_a_worker_takes_asyncios_own(spawn: Spawn, without_uvloop: str) -> None:
    worker = spawn("run", "cli_jobs:Double", *FAST, "--log-format", "json", PYTHONPATH=without_uvloop)
    assert event_loop_of(worker) == "asyncio"


def test_an_event_loop_that_is_not_installed_is_told_in_one_line(spawn: Spawn, without_uvloop: str) -> None:
    ended = spawn("run", "cli_jobs:Double", "--event-loop", "uvloop", PYTHONPATH=without_uvloop).wait()
    assert ended.code == 2
    [line] = [each for each in ended.errors if "JSWORKER_EVENT_LOOP" in each]
    assert "JSWORKER_EVENT_LOOP='uvloop' cannot be used: " in line
    assert line.endswith("install it: pip install 'jsworker[uvloop]'")


def test_a_second_signal_hands_back_at_once(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    cli("enqueue", "sleepy").ok()
    worker = spawn("run", "cli_jobs:Sleepy", *FAST, "--shutdown-timeout", "120")
    wait_for_stage(sql, "asleep")
    worker.signal(signal.SIGINT)
    worker.read_errors_until("worker.draining")
    asked_at = time.monotonic()
    worker.signal(signal.SIGINT)
    ended = worker.wait()
    assert ended.code == 0
    assert time.monotonic() - asked_at < 60
    [job] = cli("jobs", "--json").json
    assert (job["status"], job["attempts"], job["clear_reason"]) == ("queued", 0, "the worker was stopped")


def test_threads_that_never_end_do_not_keep_the_process(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    cli("enqueue", "stuck-thread").ok()
    in_thread = spawn("run", "cli_jobs:StuckThread", "--shutdown-timeout", "0.1")
    wait_for_stage(sql, "stuck")
    cli("enqueue", "stuck-in-pool").ok()
    in_pool = spawn("run", "cli_jobs:StuckInPool", "--shutdown-timeout", "0.1")
    wait_for_stage(sql, "stuck", 2)
    in_thread.signal(signal.SIGTERM)
    in_pool.signal(signal.SIGTERM)
    ended = in_thread.wait()
    assert ended.code == 0
    [stopped] = [line for line in logged(ended.errors) if line["event"] == "worker.stopped"]
    assert stopped["left"] == 1
    assert "still here" in ended.out
    assert in_pool.wait().code == 0


def test_a_signal_during_the_start_ends_it(sql: Sql, spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "slow_start.py").write_text(
        "import asyncio, pathlib\n"
        "from cli_jobs import Double\n"
        "class SlowStart(Double):\n"
        "    async def setup(self):\n"
        "        pathlib.Path('in-setup').touch()\n"
        "        await asyncio.sleep(3600)\n"
    )
    worker = spawn("run", "slow_start:SlowStart")
    wait_until((tmp_path / "in-setup").exists, "the worker starts")
    worker.signal(signal.SIGTERM)
    ended = worker.wait()
    assert ended.code == 0
    assert [line["event"] for line in logged(ended.errors)][-1:] == ["supervisor.stopping"]
    assert read_value(sql, "SELECT count(*) FROM jsworker.workers") == 0


def test_a_worker_whose_loop_dies_is_started_again(sql: Sql, spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN_MODULE)
    worker = spawn("run", "broken:Double", "--log-format", "json", "--event-loop", "uvloop")
    started = json.loads(worker.read_errors_until('"worker.started"'))
    assert started["event_loop"] == "uvloop"
    died = json.loads(worker.read_errors_until('"worker.died"'))
    assert died["exception"].endswith("LookupError: the wheel came off")
    assert "come_off" in died["exception"]
    buried = json.loads(worker.read_errors_until('"child.died"'))
    assert (buried["how"], buried["reason"]) == (
        "exit code 1",
        "relay look ended in LookupError: the wheel came off",
    )
    state = read_value(sql, "SELECT state FROM jsworker.workers WHERE id = %s", started["worker_id"])
    assert state == "stopped"
    again = json.loads(worker.read_errors_until('"child.started"'))
    assert again["generation"] == 2
    worker.signal(signal.SIGTERM)
    ended = worker.wait()
    assert not any(line.startswith("Traceback") for line in ended.errors)


def test_an_error_in_setup_is_told(sql: Sql, spawn: Spawn, tmp_path: Path) -> None:
    (tmp_path / "no_setup.py").write_text(
        "from cli_jobs import Double\n"
        "class NoSetup(Double):\n"
        "    async def setup(self):\n"
        "        raise KeyError('model')\n"
    )
    ended = spawn("run", "no_setup:NoSetup").wait()
    assert ended.code == 1
    place = f"{tmp_path / 'no_setup.py'}, line 4"
    assert ended.errors[-1] == f"setup of kind no-setup raised KeyError: 'model' ({place})"
    assert read_value(sql, "SELECT count(*) FROM jsworker.workers") == 0


def test_a_terminal_tells_every_second_what_is_done_and_ctrl_c_for_whom_it_waits(
    cli: Cli, sql: Sql, tmp_path: Path, cli_environment: Mapping[str, str]
) -> None:
    terminal = Terminal(
        *("run", "cli_jobs:Double", "cli_jobs:Sleepy", *FAST),
        cwd=tmp_path,
        environment=os.environ | cli_environment,
    )
    terminal.read_until(r"0 done, 0/s, waiting for jobs\x1b\[K\r")
    cli("enqueue", "double", "--payload", '{"n": 1}', "--count", 3).ok()
    cli("enqueue", "sleepy").ok()
    terminal.read_until(r"3 done, \d/s, 1 running")
    terminal.type("\x03")
    terminal.read_until(r"stopping \(signal=SIGINT, .*: waiting up to 20 s for 1 job; again to force")
    terminal.type("\x03")
    terminal.read_until(r"stopping \(signal=SIGINT, .*: handing 1 job back")
    assert terminal.wait() == 0
