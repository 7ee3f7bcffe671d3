"""What a client may ask about jobs and do to them, and how it is refused."""

from typing import Any
from uuid import UUID, uuid4

import pytest

from jsworker import JobClient, JobDetails
from jsworker.core.errors import JobNotFound, TransitionRefused
from jsworker.core.job import Job
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.reset import Reset
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

NO_IDS = ("7", "", "not-an-id", str(UUID(int=7)))


async def force(rows: Rows, job_id: Any, status: str) -> None:
    """Put a scheduled job into a final state."""
    await rows.query(
        "UPDATE jsworker.jobs SET status = %s, finished_at = clock_timestamp(), attempts = %s, errors = %s "
        "WHERE id = %s",
        status,
        int(status != "cancelled"),
        int(status == "failed"),
        job_id,
    )


async def test_a_job_is_told_by_column_name_with_payload_and_result(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(scripted(echo))
    job = await client.enqueue(KIND, {"a": [1.5, "é"]})
    await rows.becomes(job.id, "completed")
    for job_id in (job.id, str(job.id)):
        found = await client.get(job_id)
        assert found == JobDetails.of_row(await rows.job(job.id))
        assert found.payload == found.result == {"a": [1.5, "é"]}


@pytest.mark.parametrize("job_id", NO_IDS)
async def test_an_id_without_a_job_is_refused_in_one_line(client: JobClient, job_id: str) -> None:
    for call in (client.get(job_id), client.clear_and_reenqueue(job_id, "why")):
        with pytest.raises(JobNotFound, match="no job has id") as refusal:
            await call
        assert "\n" not in str(refusal.value)
    with pytest.raises((JobNotFound, TransitionRefused)):
        await client.retry(job_id)


async def test_jobs_are_listed_by_status_and_kind_the_newest_first(client: JobClient, rows: Rows) -> None:
    first, second, third = [await client.enqueue(KIND, {"n": n}, delay=60.0) for n in range(3)]
    other = await client.enqueue("other", {})
    await client.cancel(second.id)
    assert [row.id for row in await client.list()] == [other.id, third.id, second.id, first.id]
    assert [row.id for row in await client.list(kind=KIND)] == [third.id, second.id, first.id]
    assert [row.id for row in await client.list(status="cancelled")] == [second.id]
    next_due = await client.list(status="scheduled", kind=KIND, limit=1)
    assert [row.id for row in next_due] == [first.id]
    behind = await client.list(status="scheduled", kind=KIND, after=first.id)
    assert [row.id for row in behind] == [third.id]
    assert [row.id for row in await client.list(after=second.id)] == [first.id]
    assert await client.list(status="failed") == []
    assert not hasattr((await client.list())[0], "payload")


async def test_the_timeline_tells_what_happened_oldest_first(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        if job.attempt == 1:
            raise ValueError("once")

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    told = await client.timeline(job.id)
    assert [row.event for row in told] == ["error", "claimed"]
    assert (told[0].error or "").startswith("ValueError: once")
    assert told[0].worker_id == told[1].worker_id == running.worker.id
    assert [row.fencing_token for row in told] == [1, 2]
    assert told[0].at <= told[1].at
    assert await client.timeline(uuid4()) == []


async def test_a_cancel_tells_what_it_did_to_each_job(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    await start(scripted(gate.process))
    waiting = await client.enqueue(KIND, {}, delay=60.0)
    final = await client.enqueue(KIND, {}, delay=60.0)
    await force(rows, final.id, "failed")
    running = await client.enqueue(KIND, {})
    await gate.met()
    unknown = uuid4()
    done = await client.cancel(waiting.id, str(final.id), running.id, unknown, waiting.id)
    assert done.cancelled == [waiting.id]
    assert done.requested == [running.id]
    assert done.final == {final.id: "failed"}
    assert done.unknown == [unknown]
    await rows.becomes(running.id, "cancelled")
    assert (await client.cancel()).unknown == []


async def test_a_failed_job_is_retried_with_its_counters_at_zero_and_its_token_kept(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        if not healed:
            raise ValueError("still broken")
        return {"attempt": job.attempt, "token": job.fencing_token}

    healed: list[bool] = []
    running = await start(scripted(process, max_attempts=2))
    job = await client.enqueue(KIND, {})
    failed = await rows.becomes(job.id, "failed")
    assert failed["fencing_token"] == 2
    healed.append(True)
    await client.retry(str(job.id))
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"attempt": 1, "token": 3}
    assert (row["attempts"], row["errors"], row["failure_reason"]) == (1, 0, None)
    assert "retried" in await rows.told(job.id)
    await running.stream_is_empty()


@pytest.mark.parametrize("status", ["scheduled", "completed"])
async def test_only_a_failed_or_cancelled_job_is_retried(client: JobClient, rows: Rows, status: str) -> None:
    job = await client.enqueue(KIND, {}, delay=60.0)
    if status != "scheduled":
        await force(rows, job.id, status)
    before = await rows.job(job.id)
    with pytest.raises(
        TransitionRefused, match=f"^job {job.id} is {status}; only a failed or cancelled job can be retried$"
    ):
        await client.retry(job.id)
    assert await rows.job(job.id) == before


async def test_a_retry_is_refused_while_a_live_job_holds_its_key(client: JobClient, rows: Rows) -> None:
    failed = await client.enqueue(KIND, {}, unique_key="order-7", delay=60.0)
    await force(rows, failed.id, "failed")
    heir = await client.enqueue(KIND, {}, unique_key="order-7", delay=60.0)
    assert heir.created
    with pytest.raises(TransitionRefused, match="a live job holds its unique key"):
        await client.retry(failed.id)
    assert (await rows.job(failed.id))["status"] == "failed"


@pytest.mark.parametrize("status", ["scheduled", "completed", "failed", "cancelled"])
async def test_only_a_running_job_is_cleared(client: JobClient, rows: Rows, status: str) -> None:
    job = await client.enqueue(KIND, {}, delay=60.0)
    if status != "scheduled":
        await force(rows, job.id, status)
    before = await rows.job(job.id)
    with pytest.raises(
        TransitionRefused, match=f"^job {job.id} is {status}; only a running job can be cleared$"
    ):
        await client.clear_and_reenqueue(job.id, "why")
    assert await rows.job(job.id) == before


async def test_a_clear_that_comes_second_says_what_may_have_come_before(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    clear = reset.reset_by_operator

    async def behind_another(*given: Any, **named: Any) -> Any:
        assert (await clear(*given, **named)).resets
        return await clear(*given, **named)

    monkeypatch.setattr(reset, "reset_by_operator", behind_another)
    says = f"^job {job.id} was settled or taken back just now: look at it again$"
    with pytest.raises(TransitionRefused, match=says):
        await client.clear_and_reenqueue(job.id, "why")
    gate.open()
    assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 2


async def test_a_clear_gives_way_to_an_owner_that_is_just_settling(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    async with rows.connection.transaction():
        await rows.query("SELECT 1 FROM jsworker.jobs WHERE id = %s FOR UPDATE", job.id)
        with pytest.raises(TransitionRefused, match="locked by another transaction: try again"):
            await client.clear_and_reenqueue(job.id, "why")
    gate.open()
    assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1
    await running.stream_is_empty()


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("stuck", "stuck"),
        ("a\0b\ud800c\nd", "a\\x00b\\ud800c\\nd"),
        ("x" * 100_000, "x" * 999 + "…"),
        ("", ""),
    ],
    ids=["plain", "hostile", "long", "empty"],
)
async def test_the_reason_of_a_clear_reaches_the_next_run_as_one_line(
    client: JobClient, rows: Rows, start: StartWorker, reason: str, told: str
) -> None:
    async def process(job: Job[Any]) -> Any:
        if not job.cleared:
            await gate.process(job)
        return job.clear_reason

    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    reset = await eventually(lambda: cleared(client, job.id, reason))
    assert (reset.id, reset.status, reset.dispatch) == (job.id, "queued", 2)
    assert (await rows.becomes(job.id, "completed"))["result"] == told
    await running.stream_is_empty()


async def cleared(client: JobClient, job_id: UUID, reason: str) -> Reset:
    """Clear a job; while its owner writes a heartbeat, that is refused."""
    try:
        return await client.clear_and_reenqueue(job_id, reason)
    except TransitionRefused as refused:
        raise AssertionError(refused) from refused


async def test_running_jobs_are_listed_by_their_age(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        if job.payload["progresses"]:
            await job.update_progress(stage="half-way")
        await gate.process(job)

    gate = Gate()
    await start(scripted(process))
    jobs = [await client.enqueue(KIND, {"progresses": progresses}) for progresses in (True, False)]
    for _ in jobs:
        await gate.met()
    await rows.query("UPDATE jsworker.jobs SET claimed_at = claimed_at - interval '1 hour'")
    ids = [job.id for job in jobs]
    assert {job.id for job in await client.list(running_for=1800.0)} == set(ids)
    assert [job.id for job in await client.list(no_progress_for=1800.0)] == ids[1:]
    assert await client.list(running_for=1800.0, stale_for=1800.0) == []
    gate.open()


async def test_a_job_that_was_cancelled_and_is_cleared_ends_cancelled(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await running.worker._components.beats.stop()
    await client.cancel(job.id)
    reset = await client.clear_and_reenqueue(job.id, "both at once")
    assert reset.status == "cancelled"
    assert (await rows.job(job.id))["status"] == "cancelled"
    gate.open()
    await running.events.told("job.lost")
    await running.stream_is_empty()
