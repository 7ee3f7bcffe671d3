"""Steps under kill -9: what was kept is never called again, what was cut off is; every job ends."""

import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.supervisor.test_deaths import SLOW_RULES, ends_completed, pid_of
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

DUE = "UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE status = 'scheduled' AND stalls > 1"
OWNERS = """
SELECT DISTINCT j.worker_id FROM jsworker.jobs AS j JOIN jsworker.job_steps AS s ON s.job_id = j.id
WHERE j.status = 'processing'
"""
KEPT = "SELECT job_id, name, result, fencing_token FROM jsworker.job_steps WHERE sleeps_until IS NULL"


def calls_in(file: Path) -> dict[tuple[str, str], list[int]]:
    """Return the tokens of the runs that called each step, by job and step."""
    calls: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line in file.read_text().splitlines():
        job_id, number, token = line.split()
        calls[job_id, f"step {number}"].append(int(token))
    return calls


async def an_owner(sql: Sql, parent: ParentProcess) -> str:
    """Wait until a process that was not killed runs a job of which a step is kept, and return it."""

    async def found() -> str:
        sql.execute(DUE)
        dead = {line["worker_id"] for line in parent.lines("child.died")}
        owners = {row["worker_id"] for row in sql.execute(OWNERS)} - dead
        assert owners
        return str(min(owners))

    return await eventually(found, seconds=60.0)


async def test_a_process_that_is_killed_within_a_step_and_between_two(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    file = tmp_path / "calls"
    parent = supervise("InSteps", **SLOW_RULES)
    await parent.ready()
    payload = {"file": str(file), "steps": 4, "seconds": 0.0, "dies": ["within 0", "after 2"]}
    job_id = (await client.enqueue("in-steps", payload)).id

    async def completed() -> dict[str, Any]:
        sql.execute(DUE)
        return await ends_completed(sql, job_id, seconds=0.5)

    job = await eventually(completed, seconds=90.0)
    assert (job["result"], counters(job), job["snoozes"]) == ([0, 1, 4, 9], (3, 0, 2), 0)
    # Runs 1 (killed in step 0), 2 (asleep after step 1), 3 (killed after step 2), 4.
    assert calls_in(file) == {
        (str(job_id), "step 0"): [1, 2],
        (str(job_id), "step 1"): [2],
        (str(job_id), "step 2"): [3],
        (str(job_id), "step 3"): [4],
    }


async def test_processes_that_are_killed_at_any_moment(
    supervise: Supervise, client: JobClient, sql: Sql, tmp_path: Path
) -> None:
    file = tmp_path / "calls"
    parent = supervise("InSteps", processes=2, **SLOW_RULES)
    await parent.ready(2)
    payload = {"file": str(file), "steps": 6, "seconds": 0.1}
    last = payload | {"until": str(tmp_path / "go on")}  # so that there is one to be killed in each time
    jobs = [(await client.enqueue("in-steps", each)).id for each in [payload] * 34 + [last] * 6]
    for kill in range(1, 5):
        owner = await an_owner(sql, parent)
        parent.send(signal.SIGKILL, await pid_of(parent, owner))
        await parent.tells("child.died", kill)
    (tmp_path / "go on").touch()

    async def all_completed() -> None:
        sql.execute(DUE)
        assert {read_job(sql, job_id)["status"] for job_id in jobs} == {"completed"}

    await eventually(all_completed, seconds=120.0)
    calls = calls_in(file)
    kept = sql.execute(KEPT).fetchall()
    assert len(kept) == len(jobs) * 6
    for step in kept:
        by = calls.pop((str(step["job_id"]), step["name"]))
        assert by == sorted(by)
        assert by.count(step["fencing_token"]) == 1
        assert by[-1] == step["fencing_token"], "called by a run after the one that kept it"
    assert not calls
    assert all(read_job(sql, job_id)["result"] == [0, 1, 4, 9, 16, 25] for job_id in jobs)
