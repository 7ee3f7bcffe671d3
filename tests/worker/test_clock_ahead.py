"""A worker mends what was written while the database's clock was ahead."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from jsworker import JobClient, Rate
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


async def becomes_completed(running: Running, rows: Rows, jobs: Sequence[UUID]) -> None:
    async def are_done() -> None:
        # A row that another statement locks just then is left for the next look.
        running.worker._components.clock.wake()
        assert [(await rows.job(job_id))["status"] for job_id in jobs] == ["completed"] * len(jobs)

    await eventually(are_done)


async def test_jobs_do_not_wait_until_the_clock_is_there_again(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    unpublished, unowned = [(await client.enqueue(KIND, {}, delay=3600)).id for _ in range(2)]
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'queued', run_at = NULL, dispatch = 1, needs_publish = true,"
        " publish_after = clock_timestamp() + interval '1 h', queued_at = clock_timestamp() + interval '1 h'"
    )
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'processing', needs_publish = false, worker_id = 'gone-1-a',"
        " fencing_token = 1, attempts = 1, max_attempts = 3, max_stalls = 3, claimed_at = clock_timestamp(),"
        " stale_after = '2 s', last_activity_at = clock_timestamp() + interval '1 h' WHERE id = %s",
        unowned,
    )
    refused = (await client.enqueue(KIND, {}, delay=3600)).id
    await rows.query(
        "INSERT INTO jsworker.refused_rows"
        " (job_id, attempted, kind, status, fencing_token, dispatch, sqlstate, last_at, retry_at)"
        " SELECT id, 'promote', kind, status, 0, 0, '23514', clock_timestamp() + interval '1 h',"
        " clock_timestamp() + interval '1 h 1 s' FROM jsworker.jobs WHERE id = %s",
        refused,
    )
    running = await start(scripted(echo))
    await rows.query(
        "UPDATE jsworker.jobs SET run_at = clock_timestamp() - interval '1 s' WHERE id = %s", refused
    )
    await becomes_completed(running, rows, [unpublished, unowned, refused])
    row = await rows.job(unowned)
    assert (row["fencing_token"], row["stalls"]) == (2, 1)


async def test_a_rate_and_a_pause_of_seconds_go_on_from_the_present(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(
        scripted(echo, kind="rated", rate=Rate(1, per=0.5)),
        scripted(echo, kind="calls", rate=Rate(1, per=0.5)),
    )
    first = [(await client.enqueue(kind, {})).id for kind in ("rated", "calls")]
    for job_id in first:
        await rows.becomes(job_id, "completed")
    await client.pause("calls", until=timedelta(seconds=1))
    await rows.query("UPDATE jsworker.limits SET full_at = full_at + interval '1 day'")
    await rows.query(
        "UPDATE jsworker.limits SET paused_at = paused_at + interval '1 day',"
        " paused_until = paused_until + interval '1 day' WHERE kind = 'calls'"
    )
    waiting = [(await client.enqueue(kind, {})).id for kind in ("rated", "calls")]
    await becomes_completed(running, rows, waiting)
