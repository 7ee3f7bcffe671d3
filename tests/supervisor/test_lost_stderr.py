"""A job replaces or closes ``sys.stderr``: its process is watched, and ends, as before."""

import signal

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.supervisor.test_deaths import ends_completed, owner_of_sleeper
from tests.supervisor.test_signals import are_gone

pytestmark = pytest.mark.parametrize("how", ["captured", "closed"])

WATCHDOG_SECONDS = 4.0
LONGER_THAN_LAST_RESORT = 12.0
"""Seconds; it ends a process 9 s after it was postponed last."""


async def without_stderr(parent: ParentProcess, client: JobClient, sql: Sql, how: str) -> int:
    """Wait until the only child of a parent has lost its stderr, and return the child's process id."""
    [pid] = await parent.ready()
    await ends_completed(sql, (await client.enqueue("loses-stderr", {"how": how})).id)
    return pid


async def test_the_last_resort_is_postponed_and_jobs_are_handed_back_when_the_parent_is_killed(
    how: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("LosesStderr", "Nap", "Quiet", watchdog_timeout=WATCHDOG_SECONDS)
    pid = await without_stderr(parent, client, sql, how)
    naps = (await client.enqueue("nap", {"seconds": LONGER_THAN_LAST_RESORT})).id
    await owner_of_sleeper(sql)
    quiet = (await client.enqueue("quiet", {})).id
    for job_id in (quiet, naps):
        assert counters(await ends_completed(sql, job_id)) == (1, 0, 0)
    assert parent.lines("child.died") == []
    held = (await client.enqueue("nap", {"seconds": 3600})).id
    await owner_of_sleeper(sql)
    parent.send(signal.SIGKILL)
    await are_gone([pid])
    job = read_job(sql, held)
    assert (job["status"], counters(job)) == ("queued", (0, 0, 0))


async def test_a_run_that_ignores_its_time_out_still_ends_with_it_and_is_shown(
    how: str, supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("LosesStderr", "Stubborn", watchdog_timeout=WATCHDOG_SECONDS)
    pid = await without_stderr(parent, client, sql, how)
    job_id = (await client.enqueue("stubborn", {})).id
    assert counters(await ends_completed(sql, job_id)) == (2, 0, 1)
    [condemned] = await parent.tells("child.stop_ignored")
    assert (condemned["pid"], condemned["culprits"]) == (pid, [str(job_id)])
    await parent.says("my_jobs.py")  # the stack
