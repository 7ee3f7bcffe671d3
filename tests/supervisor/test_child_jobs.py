"""Child jobs of killed processes: a job that has completed has its children once, those of its last run."""

import signal
from collections import defaultdict
from contextlib import suppress

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import ASLEEP, SLOW_RULES, pid_of
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

DUE = "UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE status = 'scheduled'"
CHILDREN = """
SELECT c.payload ->> 'parent' AS parent, CAST(c.payload ->> 'n' AS int) AS n,
  CAST(c.payload ->> 'token' AS bigint) = p.fencing_token AS is_of_last_run
FROM jsworker.jobs AS c JOIN jsworker.jobs AS p ON CAST(p.id AS text) = c.payload ->> 'parent'
WHERE c.kind = 'child'
"""


async def test_processes_that_are_killed_leave_no_child_of_a_run_that_did_not_complete(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Spawns", processes=2, **SLOW_RULES)
    await parent.ready(2)
    jobs = await client.enqueue_many("spawns", [{"seconds": 0.3}] * 16)
    jobs.append(await client.enqueue("spawns", {"seconds": 0.0, "dies": 1}))
    for kill in range(1, 3):

        async def owner() -> str:
            sql.execute(DUE)
            dead = {line["worker_id"] for line in parent.lines("child.died")}
            owners = {row["worker_id"] for row in sql.execute(ASLEEP)} - dead
            completed = all(read_job(sql, job.id)["status"] == "completed" for job in jobs)
            assert owners or completed
            return str(min(owners)) if owners else ""

        if not (found := await eventually(owner)):
            break
        with suppress(ProcessLookupError):  # one of the jobs kills its process itself
            parent.send(signal.SIGKILL, await pid_of(parent, found))
        await parent.tells("child.died", kill)

    async def all_completed() -> None:
        sql.execute(DUE)
        left = [row for job in jobs if (row := read_job(sql, job.id))["status"] != "completed"]
        assert not left, left

    await eventually(all_completed, seconds=180.0)
    of_parent = defaultdict(list)
    for row in sql.execute(CHILDREN):
        assert row["is_of_last_run"]
        of_parent[row["parent"]].append(row["n"])
    assert {name: sorted(found) for name, found in of_parent.items()} == {str(job.id): [0, 1] for job in jobs}
    assert max(read_job(sql, job.id)["fencing_token"] for job in jobs) >= 2
