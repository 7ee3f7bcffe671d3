"""Heartbeat, progress, checkpoint and quiet phases: what they write and how long others wait for them."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID

import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseTimeout, InvalidJson, Retry
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import heartbeat
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.stream.message import Delivery
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.in_flight import Run
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import AT_ONCE, KIND, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(crash_threshold=40.0, ack_wait=1000.0)


async def test_heartbeats_renew_every_run_in_one_rhythm_and_keep_its_message(
    client: JobClient,
    rows: Rows,
    js: JetStreamContext,
    settings: Settings,
    start: StartWorker,
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stream would deliver a message again of which it hears nothing for ``ack_wait``."""
    kept: list[UUID] = []
    keep = Delivery.in_progress

    def noted(delivery: Delivery) -> None:
        kept.append(delivery.job_id)
        keep(delivery)

    monkeypatch.setattr(Delivery, "in_progress", noted)
    gate = Gate()
    running = await start(scripted(gate.process))
    jobs = await client.enqueue_many(KIND, [{}] * 3)
    for _ in jobs:
        await gate.met()
    await rows.is_renewed(*(job.id for job in jobs), threshold=settings.stale_threshold)
    assert kept == []
    for run in running.worker._context.in_flight.runs.values():
        run.in_progress_at -= settings.ack_wait / 2
    await rounds_pass(count_rounds(running.worker._components.beats), 3)
    assert sorted(kept) == sorted(job.id for job in jobs)  # and not again with each heartbeat
    consumer = await js.consumer_info(settings.stream, KIND)
    assert (consumer.num_redelivered, consumer.num_ack_pending) == (0, 3)
    gate.open()
    for job in jobs:
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


async def test_progress_is_stored_and_told_and_keeps_what_is_left_out(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.update_progress(stage="clone", progress=0.0, message="starting")
        await job.update_progress(progress=1.0)
        await job.update_progress(stage="x" * 300, message="a\0b\ud800" + "y" * 3000)

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["stage"], row["progress"]) == ("x" * 200, 1.0)
    assert row["message"].startswith("a\\0b\\ud800yyy")
    assert len(row["message"]) < 2020
    told = running.events.of("job.progress")
    assert [(event["stage"], event["progress"]) for event in told[:2]] == [("clone", 0.0), (None, 1.0)]
    assert {event["job_id"] for event in told} == {str(job.id)}


@pytest.mark.parametrize("progress", [-0.1, 1.1, math.nan, math.inf, "50%"])
async def test_progress_outside_its_range_is_refused_before_it_is_written(
    client: JobClient, rows: Rows, start: StartWorker, progress: Any
) -> None:
    async def process(job: Job[Any]) -> str:
        with pytest.raises(ValueError, match="must be a number between 0 and 1") as refusal:
            await job.update_progress(stage="never", progress=progress)
        return str(refusal.value)

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["stage"]) == (f"progress={progress!r} must be a number between 0 and 1", None)


async def test_the_next_run_finds_the_checkpoint(client: JobClient, rows: Rows, start: StartWorker) -> None:
    seen: list[Any] = []

    async def process(job: Job[Any]) -> None:
        seen.append(job.checkpoint)
        await job.save_checkpoint({"page": job.attempt, "text": "é"})
        assert job.checkpoint == {"page": job.attempt, "text": "é"}
        if job.attempt < 3:
            raise Retry

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert seen == [None, {"page": 1, "text": "é"}, {"page": 2, "text": "é"}]
    assert row["checkpoint"] == {"page": 3, "text": "é"}


async def test_a_checkpoint_that_cannot_be_stored_is_refused_and_the_last_one_stays(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> int:
        await job.save_checkpoint("good")
        for value in (object(), {"a": "\0"}, math.nan, "\ud800", 10**400):
            with pytest.raises(InvalidJson, match="checkpoint"):
                await job.save_checkpoint(value)
        assert job.checkpoint == "good"
        return 1

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["checkpoint"] == "good"


async def test_a_quiet_phase_lengthens_the_patience_of_others_and_takes_it_back_afterwards(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.quiet(7200.0)
        await job.quiet(3600.0)  # replaces the first one
        await gate.process(job)

    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    row = await rows.job(job.id)
    stale = timedelta(seconds=settings.stale_threshold)
    assert settings.crash_threshold is not None
    crash = timedelta(seconds=settings.crash_threshold)
    hour = timedelta(seconds=3600)
    assert (row["stale_after"], row["crash_after"]) == (stale + hour, crash + hour)
    running.worker._context.in_flight.runs[job.id].quiet_until = boottime()  # the hour has passed

    async def taken_back() -> None:
        row = await rows.job(job.id)
        assert (row["stale_after"], row["crash_after"]) == (stale, crash)

    await eventually(taken_back)
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_heartbeat_takes_back_no_patience_that_was_just_asked_for(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of one quiet phase is on its way to the database while the job announces the next one."""
    restore, taking_back, go_on = heartbeat.restore_thresholds, asyncio.Event(), asyncio.Event()

    async def slow_to_take_back(*arguments: Any, **named: Any) -> Any:
        if named["thresholds"]:
            taking_back.set()
            await go_on.wait()
        return await restore(*arguments, **named)

    async def process(job: Job[Any]) -> None:
        await job.quiet(0.1)
        await taking_back.wait()
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        await job.quiet(3600.0)
        await go_on.wait()
        await gate.process(job)

    monkeypatch.setattr(heartbeat, "restore_thresholds", slow_to_take_back)
    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rounds_pass(count_rounds(running.worker._components.beats), 3)
    row = await rows.job(job.id)
    assert row["stale_after"] == timedelta(seconds=settings.stale_threshold + 3600)
    assert running.worker._context.in_flight.runs[job.id].quiet_seconds == 3600.0
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_heartbeat_takes_back_no_patience_while_more_is_asked_for(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other way round: a heartbeat finds one quiet phase over while the next one is being announced."""
    set_thresholds, announcing, go_on = heartbeat.set_thresholds, asyncio.Event(), asyncio.Event()

    async def slow_to_announce(*arguments: Any, **named: Any) -> None:
        if named["stale_after"] == settings.stale_threshold + 3600:
            announcing.set()
            await go_on.wait()
        await set_thresholds(*arguments, **named)

    async def process(job: Job[Any]) -> None:
        await job.quiet(0.001)
        await job.quiet(3600.0)
        await gate.process(job)

    monkeypatch.setattr(heartbeat, "set_thresholds", slow_to_announce)
    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await announcing.wait()
    run = running.worker._context.in_flight.runs[job.id]

    async def first_is_over() -> None:
        assert boottime() > run.quiet_until > 0

    await eventually(first_is_over)
    looking = asyncio.create_task(running.worker._components.quiet.follow())
    await asyncio.sleep(0)  # it looks
    go_on.set()
    await gate.met()
    await looking
    row = await rows.job(job.id)
    assert row["stale_after"] == timedelta(seconds=settings.stale_threshold + 3600)
    assert run.quiet_seconds == 3600.0
    gate.open()
    await rows.becomes(job.id, "completed")


@pytest.mark.parametrize(("quiet", "late"), [(0.0, 3600.0), (3600.0, 0.0)], ids=["longer", "shorter"])
async def test_thresholds_that_a_late_write_has_changed_are_written_again(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings, *, quiet: float, late: float
) -> None:
    """A statement that was given up may be executed long after those that came later."""

    async def process(job: Job[Any]) -> None:
        await job.quiet(quiet)
        await gate.process(job)

    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    context = running.worker._context
    run = context.in_flight.runs[job.id]
    await rows.query(
        "UPDATE jsworker.jobs SET stale_after = make_interval(secs => %s),"
        " crash_after = make_interval(secs => %s) WHERE id = %s",
        *run.thresholds(late).values(),
        job.id,
    )

    async def written_again() -> None:
        allowed = (await rows.job(job.id))["stale_after"] - timedelta(seconds=settings.stale_threshold)
        assert quiet - 60 < allowed.total_seconds() <= quiet
        assert quiet - 60 < run.quiet_seconds <= quiet

    await eventually(written_again)
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_the_end_of_a_quiet_phase_that_is_written_late_ends_no_later_one(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner cannot repair it: it may be silent by then."""
    restore, given_up = heartbeat.restore_thresholds, asyncio.Event()
    late: list[Callable[[], Awaitable[frozenset[Held]]]] = []

    async def unanswered(*arguments: Any, **named: Any) -> Any:
        if named["thresholds"] and not late:
            late.append(partial(restore, *arguments, **named))
            allowed.append(run().quiet_seconds)
            given_up.set()
            raise DatabaseTimeout("it gets no answer")
        return await restore(*arguments, **named)

    def run() -> Run:
        return running.worker._context.in_flight.runs[job.id]

    async def process(job: Job[Any]) -> None:
        await job.quiet(0.1)
        await given_up.wait()
        await job.quiet(3600.0)
        await gate.process(job)

    monkeypatch.setattr(heartbeat, "restore_thresholds", unanswered)
    gate, allowed = Gate(), list[float]()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    assert await late[0]() == frozenset()
    row = await rows.job(job.id)
    assert row["stale_after"] == timedelta(seconds=settings.stale_threshold + 3600)
    assert allowed == [0.0]  # the fence counts on no more than what stays if it was written
    gate.open()
    await rows.becomes(job.id, "completed")


@pytest.mark.parametrize("write", ["update_progress", "save_checkpoint"])
async def test_a_run_that_writes_all_the_time_loses_the_patience_of_a_phase_that_is_over(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    write: str,
) -> None:
    """Each write changes the time of activity, in which the end of a phase finds its order."""
    restore, stop, written = heartbeat.restore_thresholds, asyncio.Event(), asyncio.Event()

    async def after_another_write(*arguments: Any, **named: Any) -> Any:
        run = running.worker._context.in_flight.runs[busy.id]
        if run.held in named["thresholds"] and not run.order_lock.locked():
            for _ in range(2):
                written.clear()
                await written.wait()
        return await restore(*arguments, **named)

    async def be_busy(job: Job[Any]) -> None:
        while not stop.is_set():
            await (
                job.update_progress(progress=0.5) if write == "update_progress" else job.save_checkpoint(1)
            )
            written.set()

    async def be_quiet(job: Job[Any]) -> None:
        await job.quiet(3600.0)
        await gate.process(job)

    gate = Gate()
    running = await start(scripted(be_busy, kind="busy"), scripted(be_quiet, kind="quiet"))
    busy = await client.enqueue("busy", {})
    await rows.becomes(busy.id, "processing")
    await client.enqueue("quiet", {})
    await gate.met()
    stale = timedelta(seconds=settings.stale_threshold)
    assert (await rows.job(busy.id))["stale_after"] > stale
    monkeypatch.setattr(heartbeat, "restore_thresholds", after_another_write)
    gate.open()

    async def taken_back() -> None:
        assert (await rows.job(busy.id))["stale_after"] == stale

    await eventually(taken_back)
    stop.set()
    await rows.becomes(busy.id, "completed")


async def lengthen(context: WorkerContext, runs: Sequence[Run], seconds: float) -> None:
    """Give runs the thresholds of a quiet phase, which is over."""
    await heartbeat.set_thresholds_beside(
        context.database,
        worker_id=context.worker_id,
        thresholds={run.held: run.thresholds(seconds) for run in runs},
    )
    for run in runs:
        run.note_written(seconds)


async def test_the_end_of_a_phase_is_written_again_after_a_report_that_was_under_way(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same heartbeat: the next one may find another report under way."""
    restore, tries, allowed = heartbeat.restore_thresholds, list[None](), list[timedelta]()

    async def after_a_report(*arguments: Any, **named: Any) -> Any:
        if run.held in named["thresholds"]:
            if not tries:
                nothing: Any = dict.fromkeys(("stage", "progress", "message"))
                await heartbeat.update_progress(
                    context.database, worker_id=context.worker_id, held=run.held, **nothing
                )
            tries.append(None)
        return await restore(*arguments, **named)

    async def noted() -> None:
        await follow()
        if tries:
            allowed.append((await rows.job(job.id))["stale_after"])

    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    context, quiet = running.worker._context, running.worker._components.quiet
    run, follow = context.in_flight.runs[job.id], quiet.follow
    monkeypatch.setattr(quiet, "follow", noted)
    monkeypatch.setattr(heartbeat, "restore_thresholds", after_a_report)
    await lengthen(context, [run], 3600.0)

    async def looked() -> None:
        assert allowed

    await eventually(looked)
    assert allowed[0] == timedelta(seconds=settings.stale_threshold)
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_run_whose_write_takes_long_keeps_others_no_longer_from_the_end_of_a_phase(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    jobs = await client.enqueue_many(KIND, [{}] * 2)
    for _ in jobs:
        await gate.met()
    context = running.worker._context
    slow, other = runs = [context.in_flight.runs[job.id] for job in jobs]
    await slow.order_lock.acquire()
    await lengthen(context, runs, 3600.0)
    stale = timedelta(seconds=settings.stale_threshold)

    async def taken_back(run: Run) -> None:
        assert (await rows.job(run.id))["stale_after"] == stale
        assert not run.quiet_seconds

    await eventually(partial(taken_back, other))
    assert (await rows.job(slow.id))["stale_after"] > stale
    slow.order_lock.release()
    await eventually(partial(taken_back, slow))
    gate.open()


async def test_the_end_of_a_phase_forgets_no_phase_that_an_isolated_process_reports_meanwhile(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The isolated process writes its row without the lock of this one."""
    restore, believed = heartbeat.restore_thresholds, list[float]()

    async def announced_meanwhile(*arguments: Any, **named: Any) -> Any:
        if run.held in named["thresholds"] and not run.quiet_until:
            limits: Any = run.thresholds(600.0)
            await heartbeat.set_thresholds(
                context.database, worker_id=context.worker_id, held=run.held, **limits
            )
            run.quiet_until = boottime() + 600.0
            run.note_written(600.0)
        return await restore(*arguments, **named)

    async def noted() -> None:
        await follow()
        if run.quiet_until:
            believed.append(run.quiet_seconds)

    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    context, quiet = running.worker._context, running.worker._components.quiet
    run, follow = context.in_flight.runs[job.id], quiet.follow
    monkeypatch.setattr(quiet, "follow", noted)
    monkeypatch.setattr(heartbeat, "restore_thresholds", announced_meanwhile)
    await lengthen(context, [run], 3600.0)

    async def reported() -> None:
        assert believed

    await eventually(reported)
    assert believed[0] == 600.0
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_longer_phase_that_a_run_announces_meanwhile_stays_its_own(
    client: JobClient, start: StartWorker
) -> None:
    """While the locks are taken one by one for a shorter phase, as a block of an hour may follow at once."""
    gate = Gate()
    running = await start(scripted(gate.process))
    jobs = await client.enqueue_many(KIND, [{}] * 2)
    for _ in jobs:
        await gate.met()
    await running.worker._components.beats.stop()  # they would find that no run announces the phase
    quiet = running.worker._components.quiet
    locked, announcing = running.worker._context.in_flight.runs.values()
    for run in (locked, announcing):
        await run.thresholds_lock.acquire()
    quiet.until = boottime() + 100.0

    def announced() -> None:
        announcing.note_written(3600.0)
        announcing.quiet_until = boottime() + 3600.0
        announcing.thresholds_lock.release()

    lengthening = asyncio.create_task(quiet._lengthen())
    asyncio.get_running_loop().call_soon(announced)  # after the task has begun to wait for the first lock
    assert await lengthening
    assert announcing.quiet_seconds == 3600.0
    assert not locked.quiet_seconds
    locked.thresholds_lock.release()
    gate.open()


async def test_a_quiet_phase_may_be_ended_early(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.quiet(3600.0)
        await job.quiet(0)
        await gate.process(job)

    gate = Gate()
    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    assert (await rows.job(job.id))["stale_after"] == timedelta(seconds=settings.stale_threshold)
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_neighbours_of_a_quiet_job_get_its_patience_and_lose_it_with_its_end(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    async def be_quiet(job: Job[Any]) -> None:
        await job.quiet(3600.0)
        await quiet_gate.process(job)

    before_gate, quiet_gate, later_gate = Gate(), Gate(), Gate()
    await start(
        scripted(before_gate.process, kind="before"),
        scripted(be_quiet, kind="quiet"),
        scripted(later_gate.process, kind="later"),
    )
    before = await client.enqueue("before", {})
    await before_gate.met()
    quiet = await client.enqueue("quiet", {})
    await quiet_gate.met()
    stale = timedelta(seconds=settings.stale_threshold)
    hour = timedelta(seconds=3600)
    assert hour < (await rows.job(before.id))["stale_after"] <= stale + hour
    later = await client.enqueue("later", {})
    await later_gate.met()
    row = await rows.job(later.id)
    assert hour - timedelta(seconds=60) < row["stale_after"] <= stale + hour
    assert settings.crash_threshold is not None
    assert row["stale_after"] - row["crash_after"] == stale - timedelta(seconds=settings.crash_threshold)
    quiet_gate.open()
    await rows.becomes(quiet.id, "completed")

    async def taken_back() -> None:
        for job in (before, later):
            assert (await rows.job(job.id))["stale_after"] == stale

    await eventually(taken_back)
    before_gate.open()
    later_gate.open()


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, 1e300])
async def test_quiet_phases_that_no_date_can_hold_are_refused(
    client: JobClient, rows: Rows, start: StartWorker, seconds: float
) -> None:
    async def process(job: Job[Any]) -> str:
        with pytest.raises(ValueError, match=r"quiet for .* must be from 0 to 1000000000") as refusal:
            await job.quiet(seconds)
        return type(refusal.value).__name__

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "ValueError"


async def test_a_kind_without_a_stale_threshold_is_never_stale_and_may_still_be_quiet(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.quiet(1.0)

    await start(scripted(process, stale_threshold=None, backoff=AT_ONCE))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["stale_after"] is None


async def test_a_row_in_nobodys_hand_is_released_and_run(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """As after a claim whose answer was lost."""
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {}, delay=3600.0)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'processing', worker_id = %s, fencing_token = 1, attempts = 1, "
        "max_attempts = 5, max_stalls = 3, claimed_at = clock_timestamp() - interval '1 minute', "
        "last_activity_at = clock_timestamp(), stale_after = interval '1 hour' WHERE id = %s",
        running.worker.id,
        job.id,
    )
    met = await gate.met()
    assert (met.id, met.fencing_token, met.attempt, met.cleared) == (job.id, 2, 1, True)
    assert met.clear_reason == "claimed, but the claim's answer was lost"
    [told] = await running.events.told("job.released")
    assert told["reason"] == "orphaned claim"
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_locked_row_is_not_lost_and_silences_no_other(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    running.worker._database._statement_timeout = 2.0  # for so long it waits for the lock
    locked, free = await client.enqueue_many(KIND, [{}] * 2)
    for _ in range(2):
        await gate.met()
    async with rows.connection.transaction():
        await rows.query("SELECT 1 FROM jsworker.jobs WHERE id = %s FOR UPDATE", locked.id)
        before = (await rows.job(free.id))["last_activity_at"]

        async def renewed() -> None:
            found = await rows.job(free.id)
            assert found["last_activity_at"] > before + timedelta(seconds=2 * settings.heartbeat_interval)

        await eventually(renewed)
    gate.open()
    for job in (locked, free):
        assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1
    assert not running.events.of("job.lost") + running.events.of("heartbeat.failed")


async def test_a_worker_whose_row_was_deleted_registers_again(
    rows: Rows, start: StartWorker, settings: Settings
) -> None:
    running = await start(scripted(Gate().process))
    await rows.query("DELETE FROM jsworker.workers")

    async def is_back() -> None:
        found = await rows.query("SELECT id, state, kinds, concurrency FROM jsworker.workers")
        me = running.worker.id
        concurrency = settings.concurrency
        assert found == [{"id": me, "state": "running", "kinds": [KIND], "concurrency": concurrency}]

    await eventually(is_back)


async def test_a_login_that_is_refused_for_a_moment_is_no_error_of_a_job_that_reports(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.update_progress(stage="one")
        await job.save_checkpoint({"page": 1})

    def refused_at_first(write: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        tries = count()

        async def call(*arguments: Any, **rest: Any) -> None:
            if not next(tries):
                raise DatabaseRefused("PostgreSQL refused the login")
            await write(*arguments, **rest)

        return call

    for name in ("update_progress", "save_checkpoint"):
        monkeypatch.setattr(heartbeat, name, refused_at_first(getattr(heartbeat, name)))
    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["checkpoint"], row["stage"]) == (0, {"page": 1}, None)


async def test_a_neighbour_whose_own_phase_is_just_being_ended_gets_patience_all_the_same(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """What is known of its row is out of date as long as its end is on its way to PostgreSQL."""

    async def be_quiet(job: Job[Any]) -> None:
        await job.quiet(3600.0)
        await quiet_gate.process(job)

    before_gate, quiet_gate = Gate(), Gate()
    running = await start(scripted(before_gate.process, kind="before"), scripted(be_quiet, kind="quiet"))
    before = await client.enqueue("before", {})
    await before_gate.met()
    run = running.worker._context.in_flight.runs[before.id]
    await run.thresholds_lock.acquire()
    run.quiet_seconds = 5000.0
    quiet = await client.enqueue("quiet", {})
    hour = timedelta(seconds=3600)

    async def announced() -> None:
        assert ((await rows.job(quiet.id))["stale_after"] or timedelta()) > hour

    await eventually(announced)
    run.quiet_seconds = 0.0
    run.thresholds_lock.release()
    await quiet_gate.met()
    assert (await rows.job(before.id))["stale_after"] > hour
    before_gate.open()
    quiet_gate.open()
