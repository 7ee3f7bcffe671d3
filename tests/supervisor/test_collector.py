"""The garbage collector of a worker process."""

from jsworker import JobClient
from tests.ownership.rows import Sql
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import ends_completed


async def test_a_worker_process_does_not_collect_after_every_few_jobs(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Collects")
    await parent.ready()
    job = await ends_completed(sql, (await client.enqueue("collects", {})).id)
    assert job["result"] == [10_000, 10, 10]
