"""The end of a worker process, whatever its jobs have done to its streams."""

import signal
import subprocess
import sys

import pytest

from jsworker import JobClient
from tests.supervisor.conftest import Supervise


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["sys.{0}.close()", "sys.{0} = None"])
def test_a_process_ends_with_its_code_though_a_job_has_closed_a_stream(stream: str, how: str) -> None:
    loads = "import sys, jsworker.telemetry.logs; from jsworker.supervisor.process_exit import exit_now"
    code = f"{loads}; {how.format(stream)}; exit_now(0)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_what_holds_something_back_is_flushed_and_ends_no_process_late_or_otherwise() -> None:
    code = """
import sys, time
from jsworker.supervisor.process_exit import exit_now, flushes
flushes += [lambda seconds: time.sleep(3600), lambda seconds: 1 / 0, lambda seconds: print("flushed")]
exit_now(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"flushed\n", b"")


@pytest.mark.hurried
async def test_a_worker_ends_well_though_jobs_have_left_no_thread_to_start(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise("TakesAllThreads")
    await parent.ready()
    await (await client.enqueue("takes-all-threads", {})).result(120.0)
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    assert parent.lines("child.killed") == []


async def test_a_worker_ends_well_though_a_job_has_closed_its_streams(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise("ClosesStreams")
    await parent.ready()
    await (await client.enqueue("closes-streams", {})).result(120.0)
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    assert [line["left"] for line in parent.lines("worker.stopped")] == [0]
    assert parent.lines("child.died") == []
