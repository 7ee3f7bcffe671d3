"""``work_until_empty`` and ``advance``: all that waits is done, and what waits for later is made due."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from jsworker import (
    Every,
    Fail,
    Job,
    JobClient,
    JobFailed,
    JobProcessor,
    Limit,
    Rate,
    Retry,
    Settings,
    Snooze,
    enqueue_statement,
)
from jsworker.ownership.for_tests import undone
from jsworker.ownership.transitions import workers
from jsworker.testing import RunError, advance, work_until_empty
from jsworker.testing.shared_servers import database_at
from jsworker.worker.recovery.earlier_lives import identify
from tests.support.polling import eventually
from tests.worker.lives import ended_pid


class Shout(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> str:
        return str(job.payload["text"]).upper()


class Hushed(Shout):
    pass


class Split(JobProcessor):
    """Enqueues a job for each word, in its own transaction."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction() as session:
            for word in job.payload["text"].split():
                await session.execute(enqueue_statement(Shout, {"text": word}))


class Broken(JobProcessor):
    """Raises what its payload names."""

    max_attempts = 2

    async def process(self, job: Job[dict[str, Any]]) -> int:
        match job.payload["raises"]:
            case "ValueError":
                raise ValueError("no number")
            case "Fail":
                raise Fail("given up")
            case "Retry":
                raise Retry(after=3600)
            case "Snooze":
                raise Snooze(after=3600)
        return job.attempt


async def test_all_is_done_with_what_the_jobs_enqueue(job_client: JobClient) -> None:
    job = await job_client.enqueue(Split, {"text": "to be or not"})
    await job_client.enqueue("of-others", {})
    done = await work_until_empty([Split, Shout])
    assert done.completed == {"split": 1, "shout": 4}
    assert not done.errors
    assert not done.cancelled
    assert (await job_client.get(job.id)).status == "completed"
    assert [row.status for row in await job_client.list(kind="of-others")] == ["queued"]


async def test_nothing_to_do_is_done_at_once(job_client: JobClient) -> None:
    assert not (await work_until_empty([Shout])).completed


async def test_it_raises_what_the_processor_raised(job_client: JobClient) -> None:
    jobs = [await job_client.enqueue(Broken, {"raises": name}) for name in ("ValueError", "none")]
    with pytest.raises(ValueError, match="no number") as caught:
        await work_until_empty([Broken])
    assert caught.value.__notes__ == [f"raised in attempt 1 of job {jobs[0].id} of kind broken"]
    assert caught.traceback[-1].name == "process"
    assert [(await job_client.get(job.id)).status for job in jobs] == ["scheduled", "completed"]


async def test_several_errors_are_noted(job_client: JobClient) -> None:
    await job_client.enqueue_many(Broken, [{"raises": "Fail"}] * 3)
    with pytest.raises(Fail) as caught:
        await work_until_empty([Broken])
    assert len(caught.value.__notes__) == 3
    assert all("of kind broken: given up" in note for note in caught.value.__notes__[1:])


async def test_errors_are_counted_instead(job_client: JobClient) -> None:
    names = ("ValueError", "Fail", "Retry", "Snooze", "none")
    await job_client.enqueue_many(Broken, [{"raises": name} for name in names])
    done = await work_until_empty([Broken], raise_failures=False)
    assert (done.completed["broken"], done.failed["broken"]) == (1, 1)
    assert (done.retrying["broken"], done.snoozed["broken"]) == (2, 1)
    seen = {(error.is_final, error.attempt, type(error.exception)) for error in done.errors}
    assert seen == {(False, 1, Retry), (False, 1, ValueError), (True, 1, Fail)}


async def test_all_that_was_cancelled_is_counted(job_client: JobClient) -> None:
    cancelled = await job_client.enqueue(Shout, {"text": "before"})
    await job_client.cancel(cancelled.id)
    await job_client.enqueue(Shout, {"text": "late"}, expires_in=60)
    await advance(minutes=2)
    async with job_client.workflow("mine") as flow:
        fails = flow.job(Broken, {"raises": "Fail"})
        flow.batch(Hushed, [{"text": "one"}, {"text": "two"}], after=fails)
    done = await work_until_empty([Shout, Hushed, Broken], raise_failures=False)
    assert done.failed == {"broken": 1}
    assert done.cancelled == {"shout": 1, "hushed": 2}


async def test_back_offs_pass_by_advancing(job_client: JobClient) -> None:
    job = await job_client.enqueue(Broken, {"raises": "Retry"})
    assert (await work_until_empty([Broken], raise_failures=False)).retrying == {"broken": 1}
    assert not (await work_until_empty([Broken])).completed
    await advance(minutes=59)
    assert not (await work_until_empty([Broken])).completed
    await advance(minutes=1)
    done = await work_until_empty([Broken], raise_failures=False)
    assert done.failed == {"broken": 1}
    assert (await job_client.get(job.id)).attempts == 2


async def test_what_is_stuck_is_named(job_client: JobClient) -> None:
    class Endless(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.update_progress(stage="turning", progress=0.25)
            await asyncio.Event().wait()

    job = await job_client.enqueue(Endless, {})
    with pytest.raises(TimeoutError) as caught:
        await work_until_empty([Endless], timeout=5)
    assert str(caught.value) == (
        "after 5 s 1 of kind endless were not done:\n"
        f"  job {job.id} of kind endless is processing, attempt 1, stage turning, progress 0.25"
    )


async def test_a_result_that_cannot_be_stored_is_an_error_of_the_job(job_client: JobClient) -> None:
    class Odd(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> Any:
            return object() if job.attempt else None

    await job_client.enqueue(Odd, {})
    with pytest.raises(JobFailed, match="result"):
        await work_until_empty([Odd])


@pytest.mark.parametrize("raise_failures", [False, True])
async def test_a_job_whose_worker_died_too_often_has_failed(
    job_client: JobClient, jsworker_settings: Settings, *, raise_failures: bool
) -> None:
    job = await job_client.enqueue(Shout, {"text": "a"}, max_stalls=1)
    dead = replace(identify(jsworker_settings, [Shout.kind]), id="dead", pid=ended_pid())
    async with database_at(jsworker_settings) as database:
        await workers.seen(database, dead, state="running", answers=False)
    with psycopg.connect(jsworker_settings.database_dsn()) as connection:
        connection.execute(
            "UPDATE jsworker.jobs SET status = 'processing', worker_id = 'dead', fencing_token = 1,"
            " attempts = 1, needs_publish = false, claimed_at = now(), last_activity_at = now(),"
            " progress_at = now(), stale_after = '1 hour' WHERE id = %s",
            [job.id],
        )
    if raise_failures:
        with pytest.raises(JobFailed, match="stalled too often") as caught:
            await work_until_empty([Shout])
        assert caught.value.__notes__ == [f"raised in a run of job {job.id} of kind shout"]
    else:
        done = await work_until_empty([Shout], raise_failures=False)
        assert (done.failed, done.completed) == ({"shout": 1}, {})
        assert done.errors == [RunError(job.id, "shout", None, True, "stalled too often", None)]


class Cut(JobProcessor):
    """Loses its connection to PostgreSQL in its first run."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction() as session:
            if not job.cleared:
                await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


async def test_a_run_that_was_interrupted_is_an_error_while_its_job_waits(job_client: JobClient) -> None:
    job = await job_client.enqueue(Cut, {})
    with pytest.raises(JobFailed, match="PostgreSQL failed in the job's own transaction") as caught:
        await work_until_empty([Cut])
    assert caught.value.__notes__ == [f"raised in a run of job {job.id} of kind cut"]
    await advance(minutes=1)
    assert (await work_until_empty([Cut])).completed == {"cut": 1}


class CancelsCut(JobProcessor):
    """Cancels the job whose run was interrupted while that waits."""

    client: ClassVar[JobClient]

    async def process(self, job: Job[dict[str, Any]]) -> None:
        cut = UUID(job.payload["cut"])

        async def waits() -> None:
            assert (await self.client.get(cut)).status == "scheduled"

        await eventually(waits)
        assert (await self.client.cancel(cut)).cancelled == [cut]


async def test_a_run_that_was_interrupted_is_no_error_if_its_job_was_cancelled(job_client: JobClient) -> None:
    CancelsCut.client = job_client
    cut = await job_client.enqueue(Cut, {})
    await job_client.enqueue(CancelsCut, {"cut": str(cut.id)})
    done = await work_until_empty([Cut, CancelsCut])
    assert (done.cancelled, done.errors) == ({"cut": 1}, [])


class One(JobProcessor):
    limit = Limit(1)

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await asyncio.sleep(0.01 * job.attempt)


class Rated(JobProcessor):
    rate = Rate(2, per=3600)

    async def process(self, job: Job[dict[str, Any]]) -> int:
        return job.attempt


async def test_what_a_limit_holds_is_done(job_client: JobClient) -> None:
    await work_until_empty([One])  # writes the limit
    await job_client.enqueue_many(One, [{}] * 5)
    assert (await work_until_empty([One])).completed == {"one": 5}


async def test_what_a_rate_holds_stays_until_it_has_tokens(job_client: JobClient) -> None:
    await job_client.enqueue_many(Rated, [{}] * 5)
    assert (await work_until_empty([Rated])).completed == {"rated": 2}
    await advance(hours=1)
    assert (await work_until_empty([Rated])).completed == {"rated": 2}
    await advance(minutes=31)
    assert (await work_until_empty([Rated])).completed == {"rated": 1}


async def test_what_is_paused_stays_until_the_pause_has_ended(job_client: JobClient) -> None:
    await job_client.pause(Shout, until=datetime.now(UTC) + timedelta(hours=2))
    await job_client.enqueue(Shout, {"text": "a"})
    assert not (await work_until_empty([Shout])).completed
    await advance(hours=3)
    assert (await work_until_empty([Shout])).completed == {"shout": 1}


async def test_what_needs_a_batch_is_done_after_it(job_client: JobClient) -> None:
    async with job_client.workflow("words") as flow:
        first = flow.batch(Shout, [{"text": "a"}, {"text": "b"}])
        second = flow.job(One, {}, after=first)
        flow.job(Shout, {"text": "c"}, after=second)
    assert (await work_until_empty([Shout])).completed == {"shout": 2}
    assert (await work_until_empty([Shout, One])).completed == {"one": 1, "shout": 1}


async def test_what_needs_a_batch_that_has_just_ended_is_not_done(
    job_client: JobClient, jsworker_settings: Settings
) -> None:
    async with job_client.workflow("words") as flow:
        first = flow.job(Shout, {"text": "a"})
        flow.job(One, {}, after=first)
    async with database_at(jsworker_settings) as database:
        assert await undone(database, ["one"]) == []
    with psycopg.connect(jsworker_settings.database_dsn()) as connection:  # nobody has finished its batch yet
        connection.execute(
            "UPDATE jsworker.jobs SET status = 'completed', attempts = 1, finished_at = now(),"
            " needs_publish = false WHERE kind = 'shout'"
        )
    async with database_at(jsworker_settings) as database:
        assert [row.held_by for row in await undone(database, ["one"])] == ["needs"]
    assert (await work_until_empty([One])).completed == {"one": 1}


class Hourly(JobProcessor):
    schedule = Every(3600, payload={"n": 1})
    seen: ClassVar[list[datetime | None]] = []

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.seen.append(job.scheduled_for)


async def test_schedules_fire_when_their_time_has_come(job_client: JobClient) -> None:
    assert not (await work_until_empty([Hourly])).completed  # writes the schedule
    for times in range(1, 4):
        await advance(hours=1)
        assert (await work_until_empty([Hourly])).completed == {"hourly": 1}
        assert len(Hourly.seen) == times


async def test_delays_expiry_and_windows_move(job_client: JobClient) -> None:
    later = await job_client.enqueue(Shout, {"text": "a"}, delay=7200)
    expiring = await job_client.enqueue(Sleeper, {}, expires_in=7250)
    once = await job_client.enqueue(Shout, {"text": "c"}, unique_key="k", unique_for=7200)
    assert (await work_until_empty([Shout])).completed == {"shout": 1}
    again = await job_client.enqueue(Shout, {"text": "c"}, unique_key="k", unique_for=7200)
    assert again.id == once.id
    await advance(timedelta(hours=2), seconds=51)
    done = await work_until_empty([Shout, Sleeper])
    assert (done.completed, done.snoozed) == ({"shout": 1}, {})
    assert (await job_client.get(later.id)).status == "completed"
    assert (await job_client.get(expiring.id)).failure_reason == "expired"
    assert (await job_client.enqueue(Shout, {"text": "c"}, unique_key="k", unique_for=7200)).created


class Sleeper(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> str:
        await job.sleep(3600, name="nap")
        return job.kind


async def test_sleeps_are_over_after_their_time(job_client: JobClient) -> None:
    await job_client.enqueue(Sleeper, {})
    assert (await work_until_empty([Sleeper])).snoozed == {"sleeper": 1}
    await advance(hours=1)
    assert (await work_until_empty([Sleeper])).completed == {"sleeper": 1}


@pytest.mark.parametrize("by", [{}, {"hours": -1}, {"by": timedelta()}])
async def test_time_does_not_go_back(jsworker_settings: Settings, by: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be more than nothing"):
        await advance(**by)


async def test_without_a_database_it_says_what_to_ask_for() -> None:
    with pytest.raises(RuntimeError, match=r"work_until_empty needs a database: .* fixture job_client"):
        await work_until_empty([Shout])
