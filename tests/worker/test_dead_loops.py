"""A worker that lost one of its loops would look alive and lose jobs: it stops and hands back what it has."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.events import Event
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.settling import Settler
from jsworker.worker.worker import Worker, WorkerDied
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker, new_worker
from tests.worker.tied import RecordedSupervision

MakeSettings = Callable[..., Settings]

TIME_TO_HAND_BACK: dict[str, Any] = {"statement_timeout": 5.0, "heartbeat_interval": 6.0}
"""Runs that are stopped at the end have two statement time-outs, in which a busy database answers."""


async def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a bug")


def break_beats(worker: Worker) -> None:
    worker._components.beats._step = broken
    worker._components.beats.wake()


def break_probes(worker: Worker) -> None:
    worker._components.probes._step = broken


def break_scans(worker: Worker) -> None:
    worker._components.scans._step = broken


def break_relay(worker: Worker) -> None:
    worker._components.relay._step = broken
    worker._components.relay.wake()


def break_pull(worker: Worker) -> None:
    worker._components.pipeline.pullers[0]._step = broken  # type: ignore[method-assign]  # the bug
    worker._components.pipeline.pullers[0].wake()


def break_a_lane(worker: Worker) -> None:
    worker._components._open_lane(KIND, 0)
    worker._components.pipeline.pullers[-1]._step = broken  # type: ignore[method-assign]  # the bug
    worker._components.pipeline.pullers[-1].wake()


def break_claims(worker: Worker) -> None:
    worker._components.pipeline.consumers[0]._batches._write = broken


@pytest.mark.parametrize(
    ("break_loop", "name"),
    [
        (break_beats, "heartbeat"),
        (break_probes, "probe"),
        (break_scans, "scan"),
        (break_relay, "relay"),
        (break_pull, "pull loop"),
        (break_a_lane, "pull loop"),
    ],
)
async def test_the_worker_stops_and_hands_its_jobs_back(
    client: JobClient,
    rows: Rows,
    make_settings: MakeSettings,
    break_loop: Callable[[Worker], None],
    name: str,
) -> None:
    gate = Gate()
    settings = make_settings(shutdown_timeout=0.2, **TIME_TO_HAND_BACK)
    running = new_worker(scripted(gate.process), settings=settings)
    working = asyncio.create_task(running.worker.run())
    job = await client.enqueue(KIND, {})
    await gate.met()
    break_loop(running.worker)
    with pytest.raises(WorkerDied, match=f"^{name} ended in ZeroDivisionError: a bug$") as death:
        await asyncio.wait_for(working, 60.0)
    assert isinstance(death.value.__cause__, ZeroDivisionError)
    row = await rows.job(job.id)
    assert (row["status"], row["attempts"], row["cleared"]) == ("queued", 0, True)
    degraded = [event for event in running.events.of("worker.degraded") if event["what"] == name]
    assert degraded == [{"what": name, "reason": "ZeroDivisionError: a bug"}]
    assert running.events.names()[-1] == "worker.stopped"


async def test_a_drain_after_an_error_is_not_taken_for_one_that_was_asked_for(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    """If the process is killed before its end, its jobs get a stall: one of them may be the cause."""
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=make_settings(shutdown_timeout=120.0))
    running.may_die = True
    await client.enqueue(KIND, {})
    await gate.met()
    break_relay(running.worker)
    await running.events.told("worker.draining")
    of_worker = "SELECT {} FROM jsworker.workers WHERE id = %s"
    seen = await rows.value(of_worker.format("last_seen_at"), running.worker.id)
    for _ in range(2):  # the first heartbeat may have begun before

        async def has_beaten(before: object = seen) -> None:
            assert await rows.value(of_worker.format("last_seen_at"), running.worker.id) > before

        await eventually(has_beaten)
        seen = await rows.value(of_worker.format("last_seen_at"), running.worker.id)
    assert await rows.value(of_worker.format("state"), running.worker.id) == "running"
    gate.open()
    await running.events.told("worker.stopped")


async def test_messages_whose_claim_died_go_back_to_the_stream(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    settings = make_settings(ack_wait=600.0)
    running = await start(scripted(echo), with_settings=settings)
    running.may_die = True
    break_claims(running.worker)
    job = await client.enqueue(KIND, {})
    await running.events.told("worker.stopped")
    other = await start(scripted(echo), with_settings=settings)
    await rows.becomes(job.id, "completed")
    await other.stream_is_empty()


async def test_without_heartbeats_nothing_is_waited_for(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    """The job would go stale in the middle of the drain."""
    gate = Gate()
    # Nor does the fence end the run: it would within a minute.
    late_fence = {"stale_threshold": 600.0, "ack_wait": 900.0}
    settings = make_settings(shutdown_timeout=120.0, **late_fence, **TIME_TO_HAND_BACK)
    running = await start(scripted(gate.process), with_settings=settings)
    running.may_die = True
    job = await client.enqueue(KIND, {})
    await gate.met()
    break_beats(running.worker)
    await running.events.told("worker.stopped")
    assert (await rows.job(job.id))["status"] == "queued"


async def test_inside_an_application_the_worker_ends_by_itself_and_tells_at_the_end(
    client: JobClient, rows: Rows, make_settings: MakeSettings
) -> None:
    gate = Gate()
    settings = make_settings(shutdown_timeout=0.2, **TIME_TO_HAND_BACK)
    running = new_worker(scripted(gate.process), settings=settings)
    job = await client.enqueue(KIND, {})

    async def application() -> None:
        async with running.worker:
            await gate.met()
            break_scans(running.worker)
            await running.events.told("worker.stopped")
            assert (await rows.job(job.id))["status"] == "queued"

    with pytest.raises(WorkerDied, match=r"^scan ended in ZeroDivisionError: a bug$"):
        await application()


async def test_an_error_of_the_applications_own_is_not_replaced(
    client: JobClient, make_settings: MakeSettings
) -> None:
    running = new_worker(scripted(echo), settings=make_settings(shutdown_timeout=0.2))

    async def application() -> None:
        async with running.worker:
            break_scans(running.worker)
            await running.events.told("worker.stopped")
            raise KeyError

    with pytest.raises(KeyError):
        await application()


async def test_outcomes_that_cannot_be_written_for_a_bug_stop_the_worker(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    running.may_die = True
    job = await client.enqueue(KIND, {})
    await gate.met()
    running.worker._components.pipeline.settler.completions._write = broken
    gate.open()
    await running.events.told("worker.stopped")
    assert str(running.worker._error) == "completions ended in ZeroDivisionError: a bug"
    assert (await rows.job(job.id))["status"] == "processing"  # for the stale rule


async def test_a_listener_that_raises_stops_nobody(
    client: JobClient, rows: Rows, start: StartWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    def listen(event: Event) -> None:
        raise ZeroDivisionError(event.name)

    async def process(job: Job[Any]) -> str:
        return "fine"

    running = await start(scripted(process))
    running.worker.on("*", listen)
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "fine"
    await running.events.told("job.completed")
    await running.worker.close()
    assert " of event job.completed raised " in capsys.readouterr().err


async def test_a_job_whose_settling_ends_the_worker_stays_noted_as_begun(
    client: JobClient, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settler, "settle", broken)
    supervision = RecordedSupervision()
    worker = Worker([scripted(failing)], make_settings(shutdown_timeout=0.2), supervision=supervision)
    running = Running(worker)
    worker.on("*", running.events)
    await worker.start()
    job = await client.enqueue(KIND, {})
    await running.events.told("worker.degraded")
    assert supervision.begun == [job.id]
    with pytest.raises(AssertionError, match="ended in ZeroDivisionError"):
        await running.end()


async def test_a_run_whose_settling_is_cancelled_before_it_begins_ends_the_worker(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    """Otherwise it would be renewed for ever, in nobody's hand."""

    def clean_up() -> None:
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__name__", "") == "_settle":
                task.cancel()

    async def process(job: Job[Any]) -> None:
        asyncio.get_running_loop().call_soon(clean_up)  # before the first step of tasks that start later
        raise ValueError("as always")

    running = await start(scripted(process), with_settings=make_settings(shutdown_timeout=0.2))
    running.may_die = True
    job = await client.enqueue(KIND, {})
    [degraded] = await running.events.told("worker.degraded")
    reason = f"CancelledError: the run of job {job.id} was cancelled"
    assert degraded == {"what": "executor", "reason": reason}
    assert (await running.events.told("worker.stopped"))[-1]["left"] == 1


async def failing(_: Job[Any]) -> None:
    raise ValueError("as always")
