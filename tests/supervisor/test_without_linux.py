"""``jsworker run`` without prctl, pidfd, memfd, a boot time clock and /proc: what takes their place."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, read_events
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import SLOW_RULES, ends_completed, owner_of_sleeper
from tests.supervisor.test_signals import (
    are_gone,
    test_children_hand_back_and_end_when_the_parent_is_killed,
)
from tests.support import without_linux
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

__all__ = ["test_children_hand_back_and_end_when_the_parent_is_killed"]  # the same, without what Linux has

LOOK = """
import ctypes, os, pathlib, time
print(hasattr(ctypes.CDLL(None), "prctl"), hasattr(os, "pidfd_open"), hasattr(time, "CLOCK_BOOTTIME"),
  pathlib.Path("/proc/self/stat").exists())
"""


@pytest.fixture(autouse=True)
def _without_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take from every Python process of the test what only Linux has."""
    folder = tmp_path / "other_system"
    folder.mkdir()
    shutil.copy(without_linux.__file__, folder / "sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    found = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=False)
    assert found.stdout.split() == ["False"] * 4, found.stderr


async def test_a_hung_child_does_not_outlive_its_parent_for_ever(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise("HoldsGil")
    pids = await parent.ready()
    await client.enqueue("holds-gil", {})
    await parent.says("keeps the interpreter")
    parent.send(signal.SIGKILL)
    await are_gone(pids)


async def test_a_child_that_hangs_is_killed_and_only_its_culprit_is_counted(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Blocks", concurrency=1, watchdog_timeout=1.5, **SLOW_RULES)
    await parent.ready()
    culprit, waits = [(await client.enqueue("blocks", {})).id for _ in range(2)]
    await parent.says("keeps the event loop")
    await parent.tells("child.hung")
    jobs = [await ends_completed(sql, job_id) for job_id in (culprit, waits)]
    assert sorted(job["stalls"] for job in jobs) in ([0, 1], [1, 1])  # the other may block the next child


async def test_what_a_killed_machine_held_is_taken_back_by_its_silence(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Nap", **SLOW_RULES)
    await parent.ready()
    job_id = (await client.enqueue("nap", {"seconds": 3600})).id
    owner = await owner_of_sleeper(sql)
    [row] = sql.execute("SELECT boot_id, pid_namespace, process_started FROM jsworker.workers").fetchall()
    assert set(row.values()) == {None}
    parent.kill_all()
    again = supervise("Nap", **SLOW_RULES)
    await again.ready()
    [told] = await again.tells("reconcile.completed")
    assert told["workers"] == []  # nothing proves that it is dead
    aged = "UPDATE jsworker.jobs SET last_activity_at = now() - interval '201 s' WHERE status = 'processing'"
    sql.execute(aged)
    await ends_completed(sql, job_id)
    [reset] = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
    assert (reset["detail"]["cause"], reset["detail"]["owner"]) == ("crashed", owner)


async def test_a_job_that_runs_alone_dies_with_its_owner_whatever_it_does(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    parent = supervise("HoldsGilAlone", watchdog_timeout=250.0, **SLOW_RULES)
    [owner] = await parent.ready()
    file = tmp_path / "pid"
    await client.enqueue("holds-gil-alone", {"file": str(file)})

    async def begun() -> int:
        found = file.read_text() if file.exists() else ""
        assert found
        return int(found)

    alone = await eventually(begun)
    parent.send(signal.SIGKILL, owner)
    await are_gone([alone])


async def test_an_isolated_process_ends_by_its_memory_and_with_its_owner(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("LeaksApart", isolated_processes=1, **SLOW_RULES)
    [owner] = await parent.ready()
    heavy = await client.enqueue("leaks-apart", {"bytes": 260_000_000})
    first = (await ends_completed(sql, heavy.id))["result"]
    await are_gone([first])
    light = await client.enqueue("leaks-apart", {"bytes": 0})
    second = (await ends_completed(sql, light.id))["result"]
    parent.send(signal.SIGKILL, owner)
    await are_gone([second])
