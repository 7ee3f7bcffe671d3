"""Signals to the parent, to its group, and the end of the parent itself."""

import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters, read_job, read_value
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import SLOW_RULES, ends_completed, owner_of_sleeper
from tests.support.polling import eventually
from tests.support.processes import has_ended

pytestmark = pytest.mark.hurried

STATES = "SELECT string_agg(DISTINCT state, ' ') FROM jsworker.workers"


async def are_gone(pids: list[int], seconds: float = 60.0) -> None:
    async def gone() -> None:
        assert [pid for pid in pids if not has_ended(pid)] == []

    await eventually(gone, seconds=seconds)


@pytest.mark.parametrize("to", ["parent", "group"])
async def test_sigterm_drains_and_what_that_does_not_end_is_handed_back_and_not_counted(
    to: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", processes=2, shutdown_timeout=4.0, **SLOW_RULES)
    await parent.ready(2)
    long = (await client.enqueue("nap", {"seconds": 3600})).id
    await owner_of_sleeper(sql)
    short = (await client.enqueue("nap", {"seconds": 1.0})).id
    await eventually(lambda: sleeps(sql, short))
    # With the group, as systemd does it, children get it from there and from their parent.
    os.kill(-parent.pid if to == "group" else parent.pid, signal.SIGTERM)
    assert await parent.ends() == 0
    assert (read_job(sql, short)["status"], read_value(sql, STATES)) == ("completed", "stopped")
    job = read_job(sql, long)
    assert (job["status"], counters(job)) == ("queued", (0, 0, 0))
    assert job["clear_reason"] == "the worker was stopped"
    assert parent.lines("child.died") == parent.lines("worker.died") == []


async def sleeps(sql: Sql, job_id: Any) -> None:
    assert read_job(sql, job_id)["stage"] == "asleep"


async def test_ctrl_c_reaches_the_group_and_drains(supervise: Supervise, client: JobClient, sql: Sql) -> None:
    parent = supervise("Nap")
    await parent.ready()
    job_id = (await client.enqueue("nap", {"seconds": 1.0})).id
    await eventually(lambda: sleeps(sql, job_id))
    os.killpg(parent.pid, signal.SIGINT)
    assert await parent.ends() == 0
    assert read_job(sql, job_id)["status"] == "completed"
    assert "Traceback" not in parent.log


async def test_a_second_signal_hands_everything_back(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", shutdown_timeout=60.0)
    await parent.ready()
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    await owner_of_sleeper(sql)
    parent.send(signal.SIGTERM)
    await parent.tells("worker.draining")
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    job = read_job(sql, job_id)
    assert (job["status"], job["clear_reason"]) == ("queued", "the worker was stopped")


async def test_a_child_that_does_not_end_is_killed_and_its_jobs_are_not_counted(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    # At its own end the parent has two statement time-outs to take the jobs back.
    rules = SLOW_RULES | {"statement_timeout": 3.0, "heartbeat_interval": 4.0}
    parent = supervise("Blocks", shutdown_timeout=0.1, watchdog_timeout=1.9, **rules)
    await parent.ready()
    job_id = (await client.enqueue("blocks", {})).id
    await parent.says("keeps the event loop")
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 1
    job = read_job(sql, job_id)
    assert (job["status"], counters(job)) == ("queued", (0, 0, 0))


async def test_children_hand_back_and_end_when_the_parent_is_killed(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", processes=2, shutdown_timeout=60.0)
    pids = await parent.ready(2)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL)
    await are_gone(pids)
    job = read_job(sql, job_id)
    assert (job["status"], counters(job)) == ("queued", (0, 0, 0))


async def test_a_process_that_can_start_no_more_threads_settles_its_jobs_and_ends_with_its_parent(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("QuietWithoutThreads", "Nap")
    pids = await parent.ready()
    quiet = (await client.enqueue("quiet-without-threads", {})).id
    assert counters(await ends_completed(sql, quiet)) == (1, 0, 0)
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL)
    await are_gone(pids)
    job = read_job(sql, job_id)
    assert (job["status"], counters(job)) == ("queued", (0, 0, 0))
    assert "Exception in callback" not in parent.log


async def test_a_hung_child_does_not_outlive_its_parent_for_ever(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise("HoldsGil")
    pids = await parent.ready()
    await client.enqueue("holds-gil", {})
    await parent.says("keeps the interpreter")
    parent.send(signal.SIGKILL)
    await are_gone(pids, seconds=20.0)
    assert "Timeout (" in parent.log  # faulthandler's own words


async def test_a_child_that_ended_itself_while_its_parent_was_frozen_is_told_with_the_reason(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise("HoldsGil")
    pids = await parent.ready()
    await client.enqueue("holds-gil", {})
    await parent.says("keeps the interpreter")
    parent.send(signal.SIGSTOP)
    await are_gone(pids)
    parent.send(signal.SIGCONT)
    died, *_ = await parent.tells("child.died")
    assert died["how"] == "exit code 1"
    assert "its supervisor stood still for" in died["reason"]


async def test_a_parent_that_was_frozen_kills_nobody(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", processes=2)
    pids = await parent.ready(2)
    job_id = (await client.enqueue("nap", {"seconds": 4.0})).id
    await owner_of_sleeper(sql)
    parent.send(signal.SIGSTOP)
    frozen = await client.enqueue("nap", {"seconds": 3.0})  # twice the watchdog's time-out
    await ends_completed(sql, frozen.id)
    parent.send(signal.SIGCONT)
    await ends_completed(sql, job_id)
    assert [process.pid for process in psutil.Process(parent.pid).children()] == pids
    assert parent.lines("child.hung") == []


UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def may_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0
    )


needs_unshare = pytest.mark.skipif(not may_unshare(), reason="a PID namespace of its own is not allowed here")

SLOW_IMPORT = """
import pathlib, sys, time

class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            pathlib.Path("importing").touch()
            while not pathlib.Path("go on").exists():
                time.sleep(0.01)

sys.meta_path.insert(0, Waits())
"""


async def test_a_stopped_start_tears_down_what_it_has_set_up_to_the_end(supervise: Supervise) -> None:
    parent = supervise("ClosesWhileStopped", "SetsUpSlowly")
    await parent.says("sets up")
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    assert "is closed" in parent.log


@pytest.mark.parametrize("module", ["jsworker.cli.app", "jsworker.supervisor.parent"])
@pytest.mark.parametrize("prefix", [(), pytest.param(UNSHARE, marks=needs_unshare)], ids=["", "process 1"])
async def test_sigterm_ends_a_supervisor_that_still_imports(
    prefix: tuple[str, ...],
    module: str,
    supervise: Supervise,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT.format(module=module))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    parent = supervise("Nap", prefix=prefix)

    async def imports() -> None:
        assert (tmp_path / "importing").exists()

    await eventually(imports)
    importing = psutil.Process(parent.pid).children()[0].pid if prefix else parent.pid
    parent.send(signal.SIGTERM, importing)
    (tmp_path / "go on").touch()
    assert await parent.ends() == 0
    assert parent.log == ""


@needs_unshare
async def test_as_process_1_it_reaps_orphans_and_drains(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    parent = supervise("Leaves", "Nap", prefix=UNSHARE)
    await parent.ready()
    [process_1] = psutil.Process(parent.pid).children()
    await ends_completed(sql, (await client.enqueue("leaves", {})).id)

    async def there_are(count: int) -> None:
        assert len(process_1.children()) == count

    await eventually(lambda: there_are(2))  # the worker, and the orphan that it has left
    (tmp_path / "go on").touch()
    await eventually(lambda: there_are(1))
    job_id = (await client.enqueue("nap", {"seconds": 0.5})).id
    await eventually(lambda: sleeps(sql, job_id))
    process_1.send_signal(signal.SIGTERM)
    assert await parent.ends() == 0
    assert read_job(sql, job_id)["status"] == "completed"
