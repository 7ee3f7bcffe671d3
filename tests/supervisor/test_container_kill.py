"""A kill of the whole container, supervisor included, as Kubernetes does when its memory is used up."""

from uuid import UUID

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql, counters, read_job
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import SLOW_RULES
from tests.support.polling import eventually

pytestmark = pytest.mark.hurried

JOBS = 3


async def test_only_what_has_begun_alone_has_stalled_for_the_last_time(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    """Nobody is left who knows what had begun, but the rows tell it."""
    jobs = [job.id for job in await client.enqueue_many("silent", [{}] * JOBS, delay=3600)]
    sql.execute(
        "UPDATE jsworker.jobs SET stalls = 2, attempts = 2, max_stalls = 3, run_at = clock_timestamp()"
    )
    first = supervise("Silent", concurrency=JOBS, **SLOW_RULES)
    await first.ready()

    async def all_are_claimed_and_one_has_begun() -> UUID:
        rows = [read_job(sql, each) for each in jobs]
        assert {row["status"] for row in rows} == {"processing"}
        begun = [row["id"] for row in rows if row["progress_at"] is not None]
        assert begun
        return UUID(str(begun[0]))

    alone = await eventually(all_are_claimed_and_one_has_begun, seconds=60.0)
    first.kill_all()
    begun = {each for each in jobs if read_job(sql, each)["progress_at"] is not None}
    assert alone in begun
    supervise("Silent", concurrency=JOBS, **SLOW_RULES)

    async def all_have_ended() -> None:
        statuses = {each: read_job(sql, each)["status"] for each in jobs}
        assert statuses == {each: "failed" if each in begun else "completed" for each in jobs}

    await eventually(all_have_ended, seconds=120.0)
    assert len(begun) == 1
    for each in jobs:
        assert counters(read_job(sql, each)) == ((3, 0, 3) if each in begun else (3, 0, 2))
