"""Worker processes by themselves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from code_evolution.workers import SHORT, WorkerEnded, end_of_log, start_workers
from jsworker import Settings, load_settings

from .demo_process import EXAMPLES, nothing_is_left_of

WRONG = {"JSWORKER_DATABASE_URL": "postgresql://localhost/demo", "JSWORKER_ACK_WAIT": "1"}
START_AND_FREEZE = """
import asyncio, os, pathlib, signal, sys
from code_evolution.workers import start_workers

async def start_and_freeze():
    async with start_workers(1, os.environ, pathlib.Path(sys.argv[1])) as [worker]:
        await worker.wait_until_started()
        worker.send(signal.SIGSTOP)
        print(worker.process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(start_and_freeze())
"""


def environment(settings: Settings) -> dict[str, str]:
    names = ("database_url", "nats_url", "stream", "subject_prefix")
    variables = {f"JSWORKER_{name.upper()}": str(getattr(settings, name)) for name in names}
    return {**os.environ, **variables, "PYTHONPATH": str(EXAMPLES)}


async def test_workers_start_and_stop_in_order(settings: Settings, tmp_path: Path) -> None:
    async with start_workers(2, environment(settings), tmp_path) as workers:
        assert [worker.state for worker in workers] == ["starting", "starting"]
        await asyncio.gather(*(worker.wait_until_started() for worker in workers))
        assert [worker.state for worker in workers] == ["running", "running"]
        assert len({worker.id for worker in workers}) == 2

    assert [(worker.state, worker.process.returncode) for worker in workers] == [("stopped", 0)] * 2
    assert "worker.started" in (tmp_path / "worker-1.log").read_text()


async def test_a_worker_stops_when_the_demo_is_gone_also_where_no_signal_says_so(settings: Settings) -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "code_evolution.worker"],
        env=environment(settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        async with asyncio.timeout(60):
            assert await process.stdout.readline()
            process.stdin.close()
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_a_frozen_worker_does_not_outlive_a_demo_that_is_killed(settings: Settings, tmp_path: Path) -> None:
    command = [sys.executable, "-c", START_AND_FREEZE, str(tmp_path)]
    options = {"start_new_session": True, "env": environment(settings)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as demo:  # type: ignore[call-overload]
        try:
            assert demo.stdout is not None
            worker = psutil.Process(int(demo.stdout.readline()))
            wait_until_stopped(worker)
        finally:
            demo.kill()
        assert psutil.wait_procs([worker], timeout=60)[1] == []
    assert nothing_is_left_of(tmp_path)


def is_stopped(worker: psutil.Process) -> bool:
    """Return whether all its threads are: only then a dead parent makes the kernel wake it."""
    tasks = Path(f"/proc/{worker.pid}/task").glob("*/stat")  # on other systems there are none
    try:
        threads = [stat.read_text().rpartition(")")[2].split()[0] for stat in tasks]
    except FileNotFoundError:  # a thread has ended meanwhile
        return False
    return worker.status() == psutil.STATUS_STOPPED and set(threads) <= {"T"}


def wait_until_stopped(worker: psutil.Process) -> None:
    """Wait until the kernel has stopped it: a signal that was sent is not yet acted upon."""
    deadline = time.monotonic() + 60
    while not is_stopped(worker):
        assert time.monotonic() < deadline
        time.sleep(0.005)


async def test_a_worker_that_ends_by_itself_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(WorkerEnded) as ended:
        async with start_workers(1, {**os.environ, **WRONG}, tmp_path) as [worker]:
            await worker.wait_until_started()

    first, second = str(ended.value).splitlines()
    assert first == f"worker-1 ended by itself with exit code 1; the end of {tmp_path}/worker-1.log:"
    assert second.startswith("JSWORKER_ACK_WAIT=1 must exceed JSWORKER_STALE_THRESHOLD=300")


async def test_a_worker_that_does_not_stop_is_killed(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("code_evolution.workers._STOP_SECONDS", 0.05)
    async with start_workers(1, environment(settings), tmp_path) as [worker]:
        await worker.wait_until_started()
        worker.send(signal.SIGSTOP)

    assert worker.process.returncode == -signal.SIGKILL


def test_a_log_is_shown_by_its_end(tmp_path: Path) -> None:
    log = tmp_path / "worker-1.log"
    log.write_text("".join(f"line {number}\n" for number in range(20)))
    (tmp_path / "empty.log").touch()

    lines = [f"line {number}" for number in range(12, 20)]
    assert end_of_log(log).splitlines() == [f"the end of {log}:", *lines]
    assert end_of_log(tmp_path / "empty.log") == f"{tmp_path}/empty.log is empty"


def test_the_short_times_keep_every_rule_and_are_shorter_than_the_defaults() -> None:
    usual = load_settings(database_url="postgresql://localhost/demo")
    short = load_settings(database_url="postgresql://localhost/demo", **SHORT)

    assert {name: getattr(short, name) for name in SHORT} == SHORT
    assert all(seconds < getattr(usual, name) for name, seconds in SHORT.items())
