"""A worker sees its isolated processes end although a job or a library has taken SIGCHLD for itself."""

import signal

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, read_job
from tests.supervisor.conftest import Supervise

pytestmark = pytest.mark.hurried

_SECONDS = 120.0


@pytest.mark.parametrize("event_loop", ["asyncio", "uvloop"])
async def test_a_job_whose_isolated_process_dies_stalls_and_runs_again(
    supervise: Supervise, client: JobClient, sql: Sql, event_loop: str
) -> None:
    parent = supervise("ReplacesSigchld", "DiesApart", isolated_processes=1, event_loop=event_loop)
    await parent.ready()
    await (await client.enqueue("replaces-sigchld", {})).result(_SECONDS)
    job = await client.enqueue("dies-apart", {})
    await job.result(_SECONDS)
    assert read_job(sql, job.id)["stalls"] == 1
    parent.send(signal.SIGTERM)
    assert await parent.ends() == 0
    assert parent.lines("child.killed") == []
