"""Time limits: the attempt fails, and however the processor takes it, the job ends."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import Retry, SettingsError
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.core.tracebacks import raised_at
from jsworker.worker.pipeline import attempt, kinds
from jsworker.worker.pipeline.kinds import resolve_kinds, without_timeout
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker.processors import KIND, LATER, Scripted, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


async def for_ever(job: Job[Any]) -> None:
    await asyncio.Event().wait()


async def test_a_run_that_takes_too_long_fails_its_attempt_and_is_retried(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(for_ever, timeout=0.2, max_attempts=2))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"], row["last_error"]) == (
        "attempts",
        2,
        "timed out after 0.2 s",
    )
    assert [told["error"] for told in await rows.timeline(job.id) if told["error"]] == [
        "timed out after 0.2 s"
    ] * 2
    [event] = await running.events.told("job.error")
    assert event["error"] == "timed out after 0.2 s"
    await running.stream_is_empty()


@pytest.mark.parametrize("limit", ["timeout", "progress_timeout"])
async def test_a_blocked_event_loop_costs_no_other_job_its_attempt(
    client: JobClient, rows: Rows, start: StartWorker, limit: str
) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def block(job: Job[Any]) -> None:
        await begun.wait()
        time.sleep(12)  # noqa: ASYNC251 -- what no job should do
        over.set()

    async def ends_soon(job: Job[Any]) -> None:
        begun.set()
        await over.wait()
        await asyncio.sleep(0.5)

    async def never_ends(job: Job[Any]) -> None:
        await over.wait()
        await for_ever(job)

    limits: dict[str, Any] = {limit: 6.0}
    await start(
        scripted(block, kind="blocks"),
        scripted(ends_soon, kind="soon", **limits),
        scripted(never_ends, kind="never", backoff=LATER, **limits),
    )
    await client.enqueue("blocks", {})
    never = await client.enqueue("never", {})
    soon = await client.enqueue("soon", {})
    row = await rows.becomes(soon.id, "completed")
    assert (row["errors"], row["stalls"]) == (0, 0)
    row = await rows.becomes(never.id, "scheduled")
    assert row["errors"] == 1


@pytest.mark.parametrize("made_of_it", ["retry", "error"])
@pytest.mark.parametrize("limit", ["timeout", "progress_timeout"])
async def test_what_a_processor_makes_of_its_cancellation_does_not_hide_the_limit(
    client: JobClient, rows: Rows, start: StartWorker, limit: str, made_of_it: str
) -> None:
    async def process(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if made_of_it == "retry":
                raise Retry(after=3600.0, reason="later") from None
            raise ValueError("half-way") from None

    limits: dict[str, Any] = {limit: 0.1}
    await start(scripted(process, backoff=LATER, **limits))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    passed = {"timeout": "timed out after 0.1 s", "progress_timeout": "no progress for 0.1 s"}[limit]
    assert row["last_error"].startswith(
        f"{passed}; {'later' if made_of_it == 'retry' else 'ValueError: half-way'}"
    )


async def test_the_deadline_is_told_in_database_time(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> str:
        assert job.deadline is not None
        return job.deadline.isoformat()

    async def process_without(job: Job[Any]) -> bool:
        return job.deadline is None

    await start(scripted(process, timeout=60.0), scripted(process_without, kind="without", timeout=None))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert datetime.fromisoformat(row["result"]) == row["deadline_at"]
    assert 55 < (row["deadline_at"] - datetime.now(UTC)).total_seconds() <= 60
    job = await client.enqueue("without", {})
    assert (await rows.becomes(job.id, "completed"))["result"] is True


async def test_the_classs_time_out_beats_the_settings_and_none_means_none(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    async def slow(job: Job[Any]) -> str:
        await asyncio.sleep(0.4)
        return "in time"

    await start(
        scripted(for_ever, kind="of-settings", backoff=LATER),
        scripted(slow, kind="unlimited", timeout=None, progress_timeout=None),
        scripted(slow, kind="longer", timeout=10.0, progress_timeout=10.0),
        with_settings=make_settings(job_timeout=0.1, progress_timeout=5.0),
    )
    cut = await client.enqueue("of-settings", {})
    assert (await rows.becomes(cut.id, "scheduled"))["last_error"] == "timed out after 0.1 s"
    for kind in ("unlimited", "longer"):
        job = await client.enqueue(kind, {})
        assert (await rows.becomes(job.id, "completed"))["result"] == "in time"


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_long_time_out_is_kept_without_a_timer_for_each_run(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch, *, is_async: bool
) -> None:
    monkeypatch.setattr(kinds, "_LONG_SECONDS", 0.0)
    monkeypatch.setattr(attempt, "time_limits", None)

    def plain(job: Job[Any]) -> None:
        while not job.should_stop:
            time.sleep(0.01)
        raise RuntimeError("told to stop")

    await start(scripted(for_ever if is_async else plain, timeout=0.2, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"].startswith("timed out after 0.2 s")


def test_kinds_without_a_limit_of_their_own_are_named(make_settings: Callable[..., Settings]) -> None:
    processors = [
        scripted(echo, kind="left-open"),
        scripted(echo, kind="unlimited", timeout=None),
        scripted(echo, kind="limited", timeout=5),
        scripted(echo, kind="watched", progress_timeout=5.0),
    ]
    found = resolve_kinds(processors, make_settings())
    assert without_timeout(found) == ["left-open", "unlimited"]
    assert {name: kind.limits.timeout for name, kind in found.items()} == {
        "left-open": 86_400.0,
        "unlimited": None,
        "limited": 5,
        "watched": 86_400.0,
    }
    assert not found["left-open"].needs_timers
    assert without_timeout(resolve_kinds(processors, make_settings(progress_timeout=60.0))) == []


async def test_a_worker_tells_of_them_at_its_start_and_in_its_row(rows: Rows, start: StartWorker) -> None:
    running = await start(scripted(echo, kind="left-open"), scripted(echo, kind="limited", timeout=5.0))
    [started] = running.events.of("worker.started")
    assert started["kinds_without_timeout"] == ["left-open"]
    [worker] = await rows.query("SELECT kinds_without_timeout AS kinds FROM jsworker.workers")
    assert worker["kinds"] == ["left-open"]


async def test_without_a_sign_of_life_of_its_own_a_run_fails_whatever_the_heartbeat_says(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(scripted(for_ever, progress_timeout=0.2, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"] == "no progress for 0.2 s"


@pytest.mark.parametrize("sign", ["progress", "checkpoint", "quiet", "members"])
async def test_signs_of_life_keep_a_run_from_its_progress_time_out(
    client: JobClient, rows: Rows, start: StartWorker, sign: str
) -> None:
    async def process(job: Job[Any]) -> str:
        if sign == "quiet":
            await job.quiet(30.0)
        for step in range(10):
            if sign == "progress":
                await job.update_progress(progress=step / 10)
            elif sign == "checkpoint":
                await job.save_checkpoint(step)
            elif sign == "members":
                await job.add_to_batch("other", [{}])
            await asyncio.sleep(0.35)
        return "alive"

    await start(scripted(process, progress_timeout=3.0, backoff=LATER))
    async with client.workflow("one node") as flow:
        flow.job(KIND, {})
    job_id = await rows.value("SELECT id FROM jsworker.jobs WHERE kind = %s", KIND)
    assert (await rows.becomes(job_id, "completed"))["result"] == "alive"


async def test_progress_that_ends_is_noticed(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> None:
        await job.update_progress(progress=0.5)
        await job.quiet(0.1)
        await asyncio.Event().wait()

    await start(scripted(process, progress_timeout=0.2, backoff=LATER))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["last_error"] == "no progress for 0.2 s"


async def test_a_processor_that_finishes_in_spite_of_its_time_out_has_finished(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return f"saved, should_stop={job.should_stop}, cancelled={job.cancelled}"
        raise AssertionError

    processor = scripted(process, timeout=0.1)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == "saved, should_stop=True, cancelled=False"
    await running.stream_is_empty()
    assert not processor.lost
    assert not processor.failed


async def test_a_processor_may_use_time_outs_of_its_own_after_it_was_cancelled(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """Cancellations that were dealt with must not be counted again."""

    class Hooked(Scripted):
        max_attempts = 1
        timeout = 0.1
        waited = False
        cancellations = -1

        async def process(self, _job: Job[Any]) -> None:
            await asyncio.Event().wait()

        async def on_failed(self, job: Job[Any], error: BaseException) -> None:
            await super().on_failed(job, error)
            task = asyncio.current_task()
            self.cancellations = task.cancelling() if task else -1
            try:
                async with asyncio.timeout(0.01):
                    await asyncio.Event().wait()
            except TimeoutError:
                self.waited = True

    processor = Hooked()
    running = await start(processor)
    job = await client.enqueue("hooked", {})
    await rows.becomes(job.id, "failed")
    await running.worker.close()
    assert processor.waited
    assert processor.cancellations == 0
    [(_, error)] = processor.failed
    assert (type(error), str(error)) == (TimeoutError, "timed out after 0.1 s")
    assert type(error.__cause__) is asyncio.CancelledError
    [told] = [event for event in running.events.events if event.name == "job.failed"]
    assert told.exception is error
    assert __file__ in raised_at(error)


async def test_a_slow_clean_up_is_not_interrupted_again_and_the_job_is_kept_meanwhile(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    cleaned: list[str] = []

    async def process(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)
            row = await rows.job(job.id)
            cleaned.append(row["status"])

    settings = make_settings(heartbeat_interval=10.0)  # it may take two of them
    await start(scripted(process, timeout=0.1, backoff=LATER), with_settings=settings)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert cleaned == ["processing"]
    assert row["last_error"] == "timed out after 0.1 s"


async def test_a_clean_up_that_raises_is_the_attempts_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("while cleaning up")

    await start(scripted(process, timeout=0.1, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"].startswith("timed out after 0.1 s; ValueError: while cleaning up")


async def test_runs_that_end_just_as_their_time_is_over_end_in_one_way_or_the_other(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    limit = 0.05

    async def process(job: Job[Any]) -> str:
        await asyncio.sleep(limit + job.payload["more"])
        return "in time"

    running = await start(scripted(process, timeout=limit, backoff=LATER))
    jobs = await client.enqueue_many(KIND, [{"more": (n - 20) * 0.0002} for n in range(40)])

    async def all_ended() -> None:
        counts = await rows.query(
            "SELECT status, errors, count(*) AS jobs FROM jsworker.jobs GROUP BY status, errors"
        )
        assert {(row["status"], row["errors"]) for row in counts} <= {("completed", 0), ("scheduled", 1)}
        assert sum(row["jobs"] for row in counts) == len(jobs)

    await eventually(all_ended)
    await running.stream_is_empty()


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (
            {"timeout": 0},
            "timeout=0 of kind scripted \\(Made\\) must be None or a number of seconds greater than 0 ",
        ),
        (
            {"timeout": float("nan")},
            "timeout=nan of kind scripted \\(Made\\) must be None or a number of seconds",
        ),
        (
            {"progress_timeout": -1.5},
            "progress_timeout=-1.5 of kind scripted \\(Made\\) must be None or a number",
        ),
        ({"timeout": "5"}, "timeout='5' of kind scripted \\(Made\\) must be None or a number of seconds"),
        (
            {"max_attempts": 0},
            "max_attempts=0 of kind scripted \\(Made\\) must be a whole number from 1 to 1000000",
        ),
        (
            {"max_attempts": None},
            "max_attempts=None of kind scripted \\(Made\\) must be a whole number from 1",
        ),
        (
            {"max_stalls": 1.5},
            "max_stalls=1.5 of kind scripted \\(Made\\) must be a whole number from 1 to 1000000",
        ),
        (
            {"concurrency": 0},
            "concurrency=0 of kind scripted \\(Made\\) must be a whole number from 1 to 1000000",
        ),
        ({"concurrency": True}, "concurrency=True of kind scripted \\(Made\\) must be a whole number"),
        (
            {"priority": "urgent"},
            r"priority='urgent' of kind scripted \(Made\) must be one of high, normal, low$",
        ),
        ({"priority": 0}, r"priority=0 of kind scripted \(Made\) must be one of high, normal, low$"),
        ({"priority": None}, r"priority=None of kind scripted \(Made\) must be one of high, normal"),
        (
            {"backoff": 5},
            r"backoff=5 of kind scripted \(Made\) must be a Backoff, for example Backoff\(first=5.0\)$",
        ),
    ],
)
def test_limits_that_no_job_could_keep_are_refused_in_one_line(
    make_settings: Callable[..., Settings], limit: dict[str, Any], line: str
) -> None:
    with pytest.raises(SettingsError, match=line) as refusal:
        Worker([scripted(for_ever, **limit)], make_settings())
    assert "\n" not in str(refusal.value)
