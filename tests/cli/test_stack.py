"""``job ID --stack`` and ``workers ID --stack``: where a run and a worker are, and why it is not known."""

import os
import signal
from pathlib import Path

import pytest

from tests.ownership.rows import WORKER, Sql, insert_job, read_job, read_value

from .commands import Cli, Spawn, as_if_at_once, wait_until
from .test_jobs import insert_worker
from .test_run import FAST, wait_for_stage

pytestmark = pytest.mark.usefixtures("here")


def test_where_runs_and_their_worker_are(cli: Cli, sql: Sql, spawn: Spawn) -> None:
    [sleepy] = cli("enqueue", "sleepy").lines
    [stuck] = cli("enqueue", "stuck-in-pool").lines
    [thread] = cli("enqueue", "stuck-thread").lines
    worker = spawn("run", "cli_jobs:Sleepy", "cli_jobs:StuckInPool", "cli_jobs:StuckThread", *FAST)
    wait_for_stage(sql, "asleep")
    wait_for_stage(sql, "stuck", 2)
    # Their stages may be stored before they know that.
    for job_id, innermost in ((sleepy, " in sleep"), (stuck, "shows all of them")):

        def is_there(job_id: str = job_id, innermost: str = innermost) -> bool:
            return cli("job", job_id, "--stack").out.rstrip().endswith(innermost)

        wait_until(is_there, f"{job_id} is{innermost}")
    owner = read_value(sql, "SELECT worker_id FROM jsworker.jobs WHERE id = %s", sleepy)

    lines = cli("job", sleepy, "--stack").ok().lines
    assert lines[0].startswith(f"worker {owner}, pid ")
    assert lines[1].startswith(f"job {sleepy} of kind sleepy, attempt 1, running for ")
    assert lines[2] == "  coroutine, waiting for Future, the innermost call last:"
    assert lines[3].endswith(" in Sleepy.process")
    assert "cli_jobs.py:" in lines[3]
    assert lines[-1].endswith(" in sleep")

    lines = cli("job", stuck, "--stack").ok().lines
    assert lines[-1] == "    it waits for a thread: `jsworker workers ID --stack` shows all of them"
    lines = cli("job", thread, "--stack").ok().lines
    assert lines[2] == "  thread, the innermost call last:"
    assert lines[3].endswith(" in StuckThread.process")

    answer = cli("job", sleepy, "--stack", "--json").ok().json
    assert (answer["worker_id"], answer["job"]["job_id"]) == (owner, sleepy)
    text = cli("workers", owner, "--stack").ok().out
    assert all(f"job {job_id} of kind " in text for job_id in (sleepy, stuck, thread))
    assert "thread, the innermost call last:" in text
    assert "task of the worker, waiting for " in text

    worker.popen.send_signal(signal.SIGKILL)
    os.kill(int(answer["pid"]), signal.SIGKILL)
    worker.popen.wait()

    def is_gone() -> bool:
        found = cli("workers", owner, "--stack")
        return found.code == 1 and found.errors[0].startswith(f"nothing listens for worker {owner} on NATS")

    wait_until(is_gone, "nothing answers for the dead worker")


def test_a_blocked_event_loop_is_named_as_such(cli: Cli, sql: Sql, spawn: Spawn, here: Path) -> None:
    [blocking] = cli("enqueue", "blocking").lines
    spawn("run", "cli_jobs:Blocking", *FAST)
    wait_until((here / "blocks").exists, "it blocks the event loop")
    owner = read_value(sql, "SELECT worker_id FROM jsworker.jobs WHERE id = %s", blocking)
    line = cli("job", blocking, "--stack").refused(1)
    assert line.startswith(f"worker {owner} is connected and did not answer within 5 s (last heartbeat ")
    assert "its event loop is blocked" in line


def test_only_a_job_that_runs_has_a_stack(cli: Cli, sql: Sql) -> None:
    queued = insert_job(sql)
    line = cli("job", queued, "--stack").refused(1)
    assert line == f"job {queued} is queued: only a job that runs has a stack"
    running = insert_job(sql, "processing")
    line = cli("job", running, "--stack").refused(1)
    assert line.startswith(f"nothing listens for worker {WORKER} on NATS (it is not registered): its process")
    assert read_job(sql, running)["status"] == "processing"


def test_a_worker_is_named(cli: Cli, sql: Sql) -> None:
    line = cli("workers", "alpha", "--stack").refused(1)
    assert line == "no worker has id alpha: `jsworker workers` lists them"
    insert_worker(sql, "alpha-1-0badf00d")
    line = cli("workers", "alpha-1-0badf00d", "--stack").refused(1)
    assert "(last heartbeat 0s ago)" in as_if_at_once(line)
    for arguments in (("--stack",), ("alpha-1-0badf00d",)):
        line = cli("workers", *arguments).refused(2)
        assert line == "--stack goes with the id of a worker, and an id with --stack"
