"""Stopping: running jobs may finish, the rest goes to others at once, nothing is left behind."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.client import publishing
from jsworker.core.errors import DatabaseUnavailable, Fail, Retry
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import claim as claims
from jsworker.worker.maintenance import relay
from jsworker.worker.maintenance.relay import Relay
from jsworker.worker.worker import Worker
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker, new_worker

MakeSettings = Callable[..., Settings]


def now() -> float:
    return asyncio.get_running_loop().time()


async def state_of(running: Running, rows: Rows) -> str:
    return str(await rows.value("SELECT state FROM jsworker.workers WHERE id = %s", running.worker.id))


async def test_a_drain_is_in_the_registry_before_the_next_heartbeat(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    """Whoever finds its jobs, if it is killed a moment later, must know that it was told to stop."""
    gate = Gate()
    seldom = make_settings(
        heartbeat_interval=200.0, crash_threshold=600.0, stale_threshold=700.0, ack_wait=1000.0
    )
    running = await start(scripted(gate.process), with_settings=seldom)
    await client.enqueue(KIND, {"n": 1})
    await gate.met()
    closing = asyncio.create_task(running.worker.close())

    async def told() -> None:
        assert await state_of(running, rows) == "draining"

    await eventually(told)
    gate.open()
    await closing


async def test_a_drain_lets_running_jobs_finish_and_renews_them_to_the_end(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    """However long it lasts: a drain must not look like a death."""
    gate = Gate()
    patient = settings.model_copy(update={"shutdown_timeout": 90.0})
    running = await start(scripted(gate.process), with_settings=patient)
    job = await client.enqueue(KIND, {"n": 1})
    met = await gate.met()
    assert not met.should_stop
    assert await state_of(running, rows) == "running"
    closing = asyncio.create_task(running.worker.close())
    other = await start(scripted(gate.process))

    async def told() -> None:
        assert met.should_stop
        assert await state_of(running, rows) == "draining"

    await eventually(told)
    await rows.is_renewed(job.id, threshold=settings.stale_threshold)
    await rounds_pass(count_rounds(other.worker._components.scans), 3)
    gate.open()
    assert await closing == 0
    row = await rows.job(job.id)
    assert (row["status"], row["fencing_token"], row["result"]) == ("completed", 1, {"n": 1})
    names = [name for name in running.events.names() if name != "reconcile.completed"]
    assert names[-3:] == ["worker.draining", "job.completed", "worker.stopped"]
    assert running.events.of("worker.draining") == [{"worker_id": running.worker.id, "in_hand": 1}]
    assert running.events.of("worker.stopped") == [{"worker_id": running.worker.id, "left": 0}]
    assert await state_of(running, rows) == "stopped"
    assert not other.events.of("stale.detected")
    await other.stream_is_empty()


async def test_what_the_relay_has_published_is_marked_at_the_latest_as_the_worker_ends(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at once: a mark would lock rows as their messages arrive, and no claim waits for a lock."""
    unmarked = "SELECT count(*) FROM jsworker.jobs WHERE needs_publish"
    monkeypatch.setattr(relay, "MARK_SECONDS", 3600.0)
    running = await start(scripted(echo))
    await client.enqueue_many("nobody", [{}] * 3)

    async def marked() -> None:
        assert await rows.value(unmarked) == 0

    await eventually(marked)  # by the client, which would mark them a second time otherwise
    await rows.query("UPDATE jsworker.jobs SET needs_publish = true, publish_after = clock_timestamp()")

    async def published() -> None:
        assert running.worker._components.publisher._marks.is_busy

    await eventually(published)
    assert await rows.value(unmarked) == 3
    await running.worker.close()
    assert await rows.value(unmarked) == 0


async def test_the_heartbeat_stops_last(client: JobClient, rows: Rows, start: StartWorker) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    stop = running.worker._components.beats.stop
    seen: list[Any] = []

    async def stop_and_look(*, within: float = 0.0) -> None:
        if not seen:
            seen.extend([(await rows.job(job.id))["status"], len(running.worker._context.in_flight.runs)])
        await stop(within=within)

    running.worker._components.beats.stop = stop_and_look  # type: ignore[method-assign]  # to look at that moment
    await running.worker.close(force=True)
    assert seen == ["queued", 0]


async def test_a_job_that_does_not_end_in_time_is_cancelled_and_runs_elsewhere(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        return {"cleared": job.cleared, "why": job.clear_reason, "attempt": job.attempt, "sp": job.checkpoint}

    async def endless(job: Job[Any]) -> None:
        await job.save_checkpoint("half")
        await gate.process(job)

    gate = Gate()
    running = await start(scripted(endless), with_settings=make_settings(shutdown_timeout=0.3))
    job = await client.enqueue(KIND, {})
    await gate.met()
    began = now()
    closing = asyncio.create_task(running.worker.close())
    await running.events.told("worker.draining")
    other = await start(scripted(process))
    assert await asyncio.wait_for(closing, 60.0) == 0
    assert now() - began >= 0.3
    row = await rows.becomes(job.id, "completed")
    why = "the worker was stopped"
    assert row["result"] == {"cleared": True, "why": why, "attempt": 1, "sp": "half"}
    assert (row["attempts"], row["errors"], row["stalls"], row["fencing_token"]) == (1, 0, 0, 2)
    assert await rows.told(job.id) == ["released", "claimed"]
    [released] = running.events.of("job.released")
    assert (released["job_id"], released["reason"]) == (str(job.id), why)
    await other.stream_is_empty()


async def test_jobs_claimed_ahead_are_handed_back_at_once(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    gate = Gate()
    # For so long a job that was claimed ahead waits for a slot, before it is handed back for want of one.
    patient = make_settings(concurrency=1, shutdown_timeout=90.0, heartbeat_interval=15.0)
    running = await start(scripted(gate.process), with_settings=patient)
    running.expects_short_runs(KIND)
    holder = await client.enqueue(KIND, {})
    await gate.met()
    waiting = await client.enqueue(KIND, {})
    await rows.becomes(waiting.id, "processing")
    other = await start(scripted(echo))
    closing = asyncio.create_task(running.worker.close())
    row = await rows.becomes(waiting.id, "completed")
    assert not closing.done()
    assert (row["attempts"], row["fencing_token"]) == (1, 2)
    [detail] = [told["detail"] for told in await rows.timeline(waiting.id) if told["event"] == "released"]
    assert detail["reason"] == "the worker was stopped before the job began"
    gate.open()
    assert await closing == 0
    await rows.becomes(holder.id, "completed")
    await other.stream_is_empty()


async def test_messages_that_come_while_it_stops_go_to_others_at_once(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """Else they would wait out ack_wait."""
    gate = Gate()
    running = await start(scripted(gate.process))
    await client.enqueue(KIND, {})
    await gate.met()
    closing = asyncio.create_task(running.worker.close())
    enqueued = [await client.enqueue(KIND, {"n": 0})]
    other = await start(scripted(echo))
    enqueued += [await client.enqueue(KIND, {"n": n}) for n in range(1, 10)]
    for job in enqueued:
        await rows.becomes(job.id, "completed")
    assert running.events.names().count("job.started") == 1
    gate.open()
    assert await closing == 0
    await other.stream_is_empty()


async def test_claims_on_their_way_are_decided_before_the_worker_ends(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, decide, asked = claims.claim, asyncio.Event(), asyncio.Event()

    async def slow_claim(*arguments: Any, **named: Any) -> Any:
        asked.set()
        await decide.wait()
        return await claim(*arguments, **named)

    monkeypatch.setattr(claims, "claim", slow_claim)
    running = await start(scripted(echo))
    job = await client.enqueue(KIND, {})
    await asked.wait()
    closing = asyncio.create_task(running.worker.close())
    await running.events.told("worker.draining")
    decide.set()
    assert await closing == 0
    row = await rows.job(job.id)
    assert (row["status"], row["attempts"], row["fencing_token"]) == ("queued", 0, 1)
    assert (row["cleared"], row["needs_publish"]) == (True, False)  # and told to the others
    assert "job.started" not in running.events.names(job.id)


async def test_force_hands_running_jobs_back_without_waiting(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=make_settings(shutdown_timeout=600.0))
    jobs = await client.enqueue_many(KIND, [{}] * 5)
    for _ in jobs:
        await gate.met()
    assert await asyncio.wait_for(running.worker.close(force=True), 60.0) == 0
    for job in jobs:
        row = await rows.job(job.id)
        assert (row["status"], row["attempts"], row["cleared"]) == ("queued", 0, True)


async def fill_outbox(client: JobClient, rows: Rows, jobs: int) -> None:
    """Have so many jobs wait for a long time to be published."""
    await client.enqueue_many("elsewhere", [{}] * jobs, delay=3600.0)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'queued', dispatch = dispatch + 1, needs_publish = true, "
        "publish_after = clock_timestamp() - interval '1 minute', queued_at = clock_timestamp() "
        "WHERE kind = 'elsewhere'"
    )


LEFT_IN_OUTBOX = "SELECT count(*) FROM jsworker.jobs WHERE kind = 'elsewhere' AND needs_publish"


@pytest.mark.parametrize("force", [True, False])
async def test_the_end_of_a_worker_does_not_wait_for_the_whole_outbox(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker, *, force: bool
) -> None:
    """Whoever waits for the end kills it in time; what it has handed back itself is published."""
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=make_settings(shutdown_timeout=60.0))
    await running.worker._components.relay.stop()
    await fill_outbox(client, rows, 3000)  # before the job begins: a busy database may fence a run
    job = await client.enqueue(KIND, {})
    await gate.met()
    if not force:
        gate.open()
    assert await running.worker.close(force=force) == 0
    row = await rows.job(job.id)
    assert (row["status"], row["needs_publish"]) == ("queued" if force else "completed", False)
    assert await rows.value(LEFT_IN_OUTBOX) >= 2000


async def test_what_is_published_and_buried_at_the_end_shares_one_time_out(
    start: StartWorker, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent kills who takes longer."""
    seconds = 3.0
    running = await start(scripted(echo))
    components = running.worker._components

    async def hang() -> None:
        await asyncio.Event().wait()

    hanging = asyncio.Event()

    async def hang_in_a_round() -> None:
        hanging.set()
        await hang()

    monkeypatch.setattr(components.relay, "_step", hang_in_a_round)
    monkeypatch.setattr(components.publisher, "publish_latest", hang)
    monkeypatch.setattr(components.pipeline.dead_letters._letters, "flush", hang)
    components.relay.wake()
    await asyncio.wait_for(hanging.wait(), 30.0)
    hurried = settings.model_copy(update={"statement_timeout": seconds})
    components._context = replace(components._context, settings=hurried)
    began = now()
    assert await running.worker.close(force=True) == 0
    assert seconds * 0.9 < now() - began < 6 * seconds


async def test_a_round_of_the_relay_ends_with_the_batches_under_way(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def publish_and_end(*arguments: Any, **named: Any) -> Any:
        relay.end()
        return await publish_traced(*arguments, **named)

    monkeypatch.setattr("jsworker.worker.maintenance.relay._BATCH", 10)
    monkeypatch.setattr(publishing, "_FEW", 0)
    publish_traced = publishing.publish_traced
    monkeypatch.setattr(publishing, "publish_traced", publish_and_end)
    assert client.publisher.stream is not None
    relay = Relay(make_context(client.database, stream=client.publisher.stream))
    await fill_outbox(client, rows, 100)
    await relay.step()
    assert await rows.value(LEFT_IN_OUTBOX) == 90
    await relay.step()
    assert await rows.value(LEFT_IN_OUTBOX) == 90


async def test_a_second_word_ends_a_drain_that_lasts_too_long(
    client: JobClient, rows: Rows, make_settings: MakeSettings
) -> None:
    gate = Gate()
    running = new_worker(scripted(gate.process), settings=make_settings(shutdown_timeout=600.0))
    working = asyncio.create_task(running.worker.run())
    job = await client.enqueue(KIND, {})
    await gate.met()
    running.worker.stop()
    running.worker.stop()
    await running.events.told("worker.draining")
    closing = asyncio.create_task(running.worker.close())
    running.worker.stop(force=True)
    await asyncio.wait_for(working, 60.0)
    assert await closing == 0
    assert await running.worker.close() == 0
    assert await running.worker.close(force=True) == 0
    assert (await rows.job(job.id))["status"] == "queued"
    assert running.events.names().count("worker.draining") == 1
    assert running.events.names().count("worker.stopped") == 1


async def test_stop_alone_is_enough_inside_an_application(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    running.worker.stop()
    await running.events.told("worker.stopped")
    job = await client.enqueue(KIND, {})
    assert await running.worker.close() == 0
    assert (await rows.job(job.id))["status"] == "queued"


async def test_a_body_that_raises_hands_the_jobs_back(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    gate = Gate()
    running = new_worker(scripted(gate.process), settings=settings)
    job = await client.enqueue(KIND, {})

    async def application() -> None:
        async with running.worker:
            await gate.met()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await application()
    assert (await rows.job(job.id))["status"] == "queued"
    assert running.events.names()[-1] == "worker.stopped"


async def test_a_cancelled_run_call_hands_the_jobs_back(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    """This is what Ctrl-C does to a coroutine under ``asyncio.run``."""
    gate = Gate()
    running = new_worker(scripted(gate.process), settings=settings)
    working = asyncio.create_task(running.worker.run())
    job = await client.enqueue(KIND, {})
    await gate.met()
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    assert (await rows.job(job.id))["status"] == "queued"


async def test_a_closed_worker_leaves_no_task_and_no_connection(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    connections = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    await client.get((await client.enqueue("unknown-to-the-worker", {}, delay=60.0)).id)
    before, connected = asyncio.all_tasks(), await rows.value(connections)
    running = new_worker(scripted(echo), settings=settings)
    async with running.worker:
        jobs = await client.enqueue_many(KIND, [{}] * 50)
        for job in jobs:
            await rows.becomes(job.id, "completed")
        assert await rows.value(connections) > connected

    async def gone() -> None:
        assert {task for task in asyncio.all_tasks() if not task.done()} <= before
        assert await rows.value(connections) <= connected + 1  # the client's own pool may have grown

    await eventually(gone)


async def test_a_worker_starts_once(client: JobClient, start: StartWorker) -> None:
    running = await start(scripted(echo))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a worker starts once; make a new one"):
            await running.worker.start()
        await running.worker.close()


@pytest.mark.parametrize("in_a_step", [False, True])
@pytest.mark.parametrize("seconds", [0.1, 60.0])
async def test_the_end_of_the_event_loop_waits_for_no_thread(
    client: JobClient, rows: Rows, settings: Settings, *, in_a_step: bool, seconds: float
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def block(job: Job[Any]) -> None:
        while seconds < 1.0 and not job.should_stop:
            time.sleep(0.01)
        began.set()
        go_on.wait(120.0)

    async def process(job: Job[Any]) -> None:
        await job.step("block", block, job)

    async def application() -> None:
        await Worker([scripted(process if in_a_step else block, timeout=seconds)], settings).start()
        assert await asyncio.to_thread(began.wait, 60.0)

    job = await client.enqueue(KIND, {})
    working = asyncio.create_task(asyncio.to_thread(asyncio.run, application()))
    try:
        await asyncio.wait_for(asyncio.shield(working), 30.0)
    finally:
        go_on.set()
        await working
    row = await rows.job(job.id)
    assert (row["status"], row["attempts"]) == ("processing", 1)  # others take it back


class SlowSetup(JobProcessor):
    kind = KIND

    def __init__(self) -> None:
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()
        self.torn_down = False

    async def setup(self) -> None:
        self.entered.set()
        await self.go_on.wait()

    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError

    async def teardown(self) -> None:
        self.torn_down = True


async def test_a_worker_that_is_closed_while_it_starts_ends_as_soon_as_it_has_started(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    processor = SlowSetup()
    running = new_worker(processor, settings=settings)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(running.worker.start())
    await processor.entered.wait()
    closing = asyncio.create_task(running.worker.close())
    processor.go_on.set()
    await starting
    assert await closing == 0
    assert processor.torn_down
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before
    names = [name for name in running.events.names() if name.startswith("worker.")]
    assert names == ["worker.started", "worker.draining", "worker.stopped"]


async def test_a_forced_stop_ends_a_start_whose_setup_does_not_return(
    client: JobClient, settings: Settings
) -> None:
    processor = SlowSetup()
    running = new_worker(processor, settings=settings)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(running.worker.run())
    await processor.entered.wait()
    async with asyncio.timeout(60.0):
        assert await running.worker.close(force=True) == 0
        await starting
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before
    assert "worker.started" not in running.events.names()


@pytest.mark.parametrize("force", [False, True])
async def test_a_stop_ends_the_waiting_for_a_server(make_settings: MakeSettings, *, force: bool) -> None:
    settings = make_settings(database_url="postgresql://nobody@127.0.0.1:1/nothing")
    worker = Worker([scripted(echo)], settings, connect_seconds=None)
    before = asyncio.all_tasks()
    working = asyncio.create_task(worker.run())
    await asyncio.sleep(0)  # it has begun
    worker.stop(force=force)
    async with asyncio.timeout(60.0):
        await working
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before


async def test_a_start_that_is_cancelled_leaves_nothing_behind(client: JobClient, settings: Settings) -> None:
    processor = SlowSetup()
    running = new_worker(processor, settings=settings)
    before = asyncio.all_tasks()
    starting = asyncio.create_task(running.worker.start())
    await processor.entered.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before
    assert await running.worker.close() == 0


async def test_a_start_without_a_database_ends_in_one_line(
    make_settings: MakeSettings,
) -> None:
    settings = make_settings(database_url="postgresql://nobody@127.0.0.1:1/nothing")
    running = Running(Worker([scripted(echo)], settings, connect_seconds=0.3))
    before = asyncio.all_tasks()
    with pytest.raises(DatabaseUnavailable, match=r"127\.0\.0\.1:1/nothing") as refusal:
        await running.worker.run()
    assert "\n" not in str(refusal.value)
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before
    assert await running.worker.close() == 0


async def test_a_thread_that_never_ends_keeps_its_job_and_nobody_from_stopping(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    met, go_on = threading.Event(), threading.Event()

    def process(job: Job[Any]) -> str:
        met.set()
        go_on.wait(120.0)
        return "much too late"

    running = await start(scripted(process), with_settings=make_settings(shutdown_timeout=0.2))
    job = await client.enqueue(KIND, {})
    await asyncio.to_thread(met.wait, 60.0)
    assert await running.worker.close() == 1
    row = await rows.job(job.id)
    assert (row["status"], row["worker_id"], row["fencing_token"]) == ("processing", running.worker.id, 1)
    assert running.events.of("worker.stopped") == [{"worker_id": running.worker.id, "left": 1}]
    threads = threading.active_count()
    go_on.set()

    async def ended() -> None:
        assert threading.active_count() < threads

    await eventually(ended)
    assert await rows.job(job.id) == row  # nobody writes for a worker that has gone


async def test_a_coroutine_that_swallows_every_cancellation_keeps_nobody_from_stopping(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    swallowed = 0
    met, go_on = asyncio.Event(), asyncio.Event()

    async def process(job: Job[Any]) -> None:
        nonlocal swallowed
        met.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                swallowed += 1

    running = await start(scripted(process), with_settings=make_settings(shutdown_timeout=0.1))
    job = await client.enqueue(KIND, {})
    await met.wait()
    assert await asyncio.wait_for(running.worker.close(), 60.0) == 1
    assert swallowed == 3  # told to stop, told again, and given up
    [told] = running.events.of("job.stop_ignored")
    assert (told["job_id"], told["stop"]) == (str(job.id), "shutdown")
    row = await rows.job(job.id)
    assert row["worker_id"] == running.worker.id
    [task] = running.worker._components.pipeline._tasks
    go_on.set()
    await asyncio.wait_for(task, 60.0)
    assert await rows.job(job.id) == row  # nobody writes for a worker that has gone


async def stopped_with(
    error: BaseException, client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> tuple[dict[str, Any], list[str]]:
    """Stop a worker whose processor answers its cancellation with another error."""

    async def process(job: Job[Any]) -> None:
        try:
            await gate.process(job)
        except asyncio.CancelledError:
            raise error from None

    gate = Gate()
    running = await start(scripted(process, backoff=LATER), with_settings=settings)
    job = await client.enqueue(KIND, {})
    await gate.met()
    assert await running.worker.close(force=True) == 0
    return await rows.job(job.id), running.events.names(job.id)


async def test_an_error_that_a_stop_provokes_is_not_held_against_the_job(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    """Many libraries turn a cancellation into an error of theirs; a deployment must not use up attempts."""
    row, names = await stopped_with(ConnectionError("aborted"), client, rows, start, settings)
    assert (row["status"], row["attempts"], row["errors"]) == ("queued", 0, 0)
    assert names[-1] == "job.released"


async def test_a_permanent_error_is_one_even_while_stopping(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    row, _ = await stopped_with(Fail("it never will"), client, rows, start, settings)
    assert (row["status"], row["failure_reason"]) == ("failed", "permanent")


@pytest.mark.parametrize(("after", "status"), [(None, "queued"), (0, "queued"), (60.0, "scheduled")])
async def test_a_processor_that_sees_the_drain_may_hand_its_job_on_with_retry(
    client: JobClient, rows: Rows, start: StartWorker, after: float | None, status: str
) -> None:
    async def process(job: Job[Any]) -> None:
        met.set()
        while not job.should_stop:  # noqa: ASYNC110 -- what a processor has to do
            await asyncio.sleep(0.005)
        await job.save_checkpoint("so far")
        raise Retry(after=after)

    met = asyncio.Event()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await met.wait()
    assert await running.worker.close() == 0
    row = await rows.job(job.id)
    counted = int(status == "scheduled")  # only who asks for a wait has failed
    assert (row["status"], row["errors"], row["checkpoint"]) == (status, counted, "so far")
