"""Looking on: what is read about jobs and who has them, without deciding anything."""

from jsworker.ownership.database import Database
from jsworker.ownership.queries import survey
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.claim import claim
from jsworker.ownership.transitions.enqueue import new_job_id

from .rows import KIND, LIMITS, OTHER_WORKER, WORKER, Sql, insert_job, read_job


async def test_how_far_jobs_are(database: Database, sql: Sql) -> None:
    done = insert_job(sql, "completed", result='{"lines": 3}', last_error="an earlier one")
    failed = insert_job(sql, "failed", last_error="broken")
    running = insert_job(sql, "processing", stage="clone", progress=0.5)
    found = {one.id: one for one in await survey.standings(database, [done, failed, running, new_job_id()])}
    assert found.keys() == {done, failed, running}
    assert (found[done].status, found[done].result, found[done].error) == ("completed", {"lines": 3}, None)
    assert (found[failed].result, found[failed].error) == (None, "broken")
    assert (found[running].worker_id, found[running].fencing_token) == (WORKER, 1)
    assert (found[running].stage, found[running].progress) == ("clone", 0.5)
    assert found[failed].finished_at == read_job(sql, failed)["finished_at"]


async def test_how_many_there_are(database: Database, sql: Sql) -> None:
    ids = [insert_job(sql, status) for status in ("queued", "queued", "failed")]
    insert_job(sql, "completed")
    assert await survey.count_by_status(database, ids) == {"queued": 2, "failed": 1}


async def test_who_holds_what(database: Database, sql: Sql) -> None:
    mine = {(insert_job(sql, "processing"), 1) for _ in range(2)}
    insert_job(sql, "processing", worker_id="gamma-3-cccc")
    held = await survey.holdings(database, [WORKER, OTHER_WORKER])
    assert held.by_worker == {WORKER: mine}
    assert held.at is not None
    assert await survey.holdings(database, [OTHER_WORKER]) == survey.Holdings(at=None, by_worker={})


async def test_who_took_a_job_over(database: Database, sql: Sql) -> None:
    job_id, alone = insert_job(sql, "processing"), insert_job(sql, "processing")
    for token, worker_id in ((1, OTHER_WORKER), (2, WORKER)):
        await reset.reset_by_operator(database, seen=[(job_id, token)], reason="r")
        await claim(database, worker_id=worker_id, kind=KIND, ids=[job_id], limits=LIMITS)
    (taken,) = await survey.takeovers(database, [(job_id, 1), (alone, 1)])
    assert (taken.job_id, taken.worker_id, taken.fencing_token) == (job_id, OTHER_WORKER, 2)
    assert await survey.takeovers(database, [(job_id, 3)]) == []
    assert await survey.resets(database, [job_id, alone]) == {(job_id, 1), (job_id, 2)}
