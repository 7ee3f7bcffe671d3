"""Several workers on one stream: each job is run once, whatever JetStream delivers and whoever stops."""

import asyncio
import signal
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from nats.js.client import JetStreamContext

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.stream.message import WireMessage, encode, message_id, subject_of
from jsworker.worker.worker import Worker
from tests.support.fleet import PATIENT, Fleet
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def publish_copies(
    js: JetStreamContext, settings: Settings, kind: str, ids: Iterable[UUID], name: str
) -> None:
    """Publish each job's message once more; its ``name`` makes it another message to JetStream."""
    async with asyncio.TaskGroup() as publishing:
        for job_id in ids:
            copy = js.publish(
                subject_of(settings.subject_prefix, kind),
                encode(WireMessage(job_id, kind, 1)),
                headers={"Nats-Msg-Id": f"{message_id(job_id, 1)}:{name}"},
            )
            publishing.create_task(copy)


async def stream_took(js: JetStreamContext, settings: Settings, messages: int) -> None:
    async def check() -> None:
        assert (await js.stream_info(settings.stream)).state.last_seq >= messages

    await eventually(check, seconds=60)


async def stream_holds(js: JetStreamContext, settings: Settings, messages: int) -> None:
    async def check() -> None:
        assert (await js.stream_info(settings.stream)).state.messages == messages

    await eventually(check, seconds=60)


async def all_ended(rows: Rows, seconds: float = 60) -> None:
    async def check() -> None:
        live = await rows.query(
            "SELECT status, count(*) FROM jsworker.jobs WHERE finished_at IS NULL GROUP BY 1"
        )
        assert not live, live

    await eventually(check, seconds=seconds)


async def test_thousand_jobs_with_three_messages_each_run_once_on_four_processes(
    client: JobClient,
    settings: Settings,
    fleet: Fleet,
    js: JetStreamContext,
    rows: Rows,
) -> None:
    # However busy the machine is, nothing is handed back unbegun, and no job taken from the table.
    workers = await fleet.started(4, **PATIENT, scan_interval=10.0)
    ids = [job.id for job in await client.enqueue_many("timed", [{"seconds": 0.05}] * 1000)]
    await stream_took(js, settings, 1000)
    await publish_copies(js, settings, "timed", ids, "second")
    await publish_copies(js, settings, "timed", ids, "third")
    await all_ended(rows)
    await stream_holds(js, settings, 0)
    assert (await js.stream_info(settings.stream)).state.last_seq == 3000

    assert fleet.runs() == {(str(job_id), 1): 1 for job_id in ids}
    assert sum(len(worker.lines("finish")) for worker in workers) == 1000
    assert all(worker.runs() for worker in workers)
    assert any(worker.lines("job.skipped") for worker in workers)
    ends = await rows.query("SELECT DISTINCT status, attempts, fencing_token, dispatch FROM jsworker.jobs")
    assert ends == [{"status": "completed", "attempts": 1, "fencing_token": 1, "dispatch": 1}]
    assert await rows.query("SELECT * FROM jsworker.job_events WHERE event <> 'skipped'") == []
    assert await rows.query("SELECT * FROM jsworker.dead_messages") == []
    for worker in workers:
        worker.send(signal.SIGTERM)
    assert [await worker.ends() for worker in workers] == [0, 0, 0, 0]


class Recorded(JobProcessor):
    """Records its runs in a list that several workers share."""

    kind = "recorded"

    def __init__(self, runs: list[tuple[UUID, int]]) -> None:
        self.runs = runs

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.runs.append((job.id, job.fencing_token))


async def test_of_two_workers_with_the_same_messages_one_gets_each_job(
    client: JobClient,
    make_settings: Callable[..., Settings],
    js: JetStreamContext,
    database_url: str,
    rows: Rows,
) -> None:
    settings = make_settings(**PATIENT, concurrency=8)
    ids = [job.id for job in await client.enqueue_many("recorded", [{}] * 8)]
    await stream_holds(js, settings, 8)
    runs: list[tuple[UUID, int]] = []
    first, second = (Worker([Recorded(runs)], settings) for _ in range(2))
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs FOR NO KEY UPDATE")
        async with first:
            # Every message is in the first worker's hands, every copy in the second's: neither can claim yet.
            await were_delivered(js, settings, 8)
            await publish_copies(js, settings, "recorded", ids, "copy")
            async with second:
                await were_delivered(js, settings, 16)
                holder.rollback()
                await all_ended(rows)
                await stream_holds(js, settings, 0)

    assert sorted(runs) == sorted((job_id, 1) for job_id in ids)
    assert await rows.query("SELECT * FROM jsworker.job_events WHERE event <> 'skipped'") == []


async def were_delivered(js: JetStreamContext, settings: Settings, deliveries: int) -> None:
    async def check() -> None:
        info = await js.consumer_info(settings.stream, "recorded")
        assert info.delivered is not None
        assert info.delivered.consumer_seq >= deliveries

    await eventually(check, seconds=60)


async def test_a_job_cancelled_right_before_sigterm_is_cancelled_and_not_queued_again(
    client: JobClient,
    fleet: Fleet,
    rows: Rows,
) -> None:
    # The next heartbeat is far away: the worker hands the job back without knowing of the cancellation.
    [worker] = await fleet.started(1, **PATIENT)
    job = await client.enqueue("endless", {})
    await worker.tells("start")
    assert (await client.cancel(job.id)).requested == [job.id]
    worker.send(signal.SIGTERM)
    await worker.tells("sigterm")
    worker.send(signal.SIGTERM)

    assert await worker.ends() == 0
    row = await client.get(job.id)
    assert (row.status, row.attempts, row.errors) == ("cancelled", 0, 0)
    assert worker.lines("job.cancelled")
    assert [event.event for event in await client.timeline(job.id)] == ["cancel_requested", "cancelled"]
    assert await rows.query("SELECT * FROM jsworker.jobs WHERE needs_publish") == []


async def test_sigterm_under_load_ends_one_worker_with_0_and_the_others_do_the_rest(
    client: JobClient,
    settings: Settings,
    fleet: Fleet,
    js: JetStreamContext,
    rows: Rows,
) -> None:
    leaver, *_ = await fleet.started(3, **PATIENT)
    ids = [job.id for job in await client.enqueue_many("timed", [{"seconds": 0.1}] * 600)]
    await leaver.tells("start", times=20)
    leaver.send(signal.SIGTERM)

    assert await leaver.ends() == 0
    assert [line["left"] for line in leaver.lines("worker.stopped")] == [0]
    assert len(leaver.lines("finish")) == len(leaver.lines("start")) < 300
    await all_ended(rows)
    await stream_holds(js, settings, 0)
    # Each job began once, at whatever token: what the leaver handed back had not begun.
    assert sorted(job for job, _ in fleet.runs().elements()) == sorted(str(job_id) for job_id in ids)
    ends = await rows.query("SELECT DISTINCT status, attempts, stalls, errors FROM jsworker.jobs")
    assert ends == [{"status": "completed", "attempts": 1, "stalls": 0, "errors": 0}]
    # Skipped: on a busy machine some wait so long that they are claimed from the table before their message.
    assert {row["event"] for row in await rows.query("SELECT event FROM jsworker.job_events")} <= {
        "released",
        "claimed",
        "skipped",
    }


async def test_a_second_sigterm_hands_a_running_job_back_at_once(
    client: JobClient,
    fleet: Fleet,
) -> None:
    [stubborn] = await fleet.started(1, **PATIENT, shutdown_timeout=600.0)
    job = await client.enqueue("held", {})
    await stubborn.tells("start")
    stubborn.send(signal.SIGTERM)
    await stubborn.tells("worker.draining")
    assert stubborn.running
    stubborn.send(signal.SIGTERM)

    assert await stubborn.ends() == 0
    [successor] = await fleet.started(1)
    [finish] = await successor.tells("finish")
    assert (finish["job"], finish["token"], finish["reason"]) == (str(job.id), 2, "the worker was stopped")
    row = await client.get(job.id)
    assert (row.attempts, row.stalls) == (1, 0)
    assert [event.event for event in await client.timeline(job.id)] == ["released", "claimed"]


async def test_jobs_claimed_ahead_of_runs_that_take_long_go_back_and_are_not_claimed_again(
    client: JobClient, start: StartWorker, rows: Rows
) -> None:
    gate = Gate()
    running = await start(scripted(echo, kind="quick"), scripted(gate.process, kind="slow"))
    # As far as the worker has seen, a job of this kind ends at once: it claims many ahead.
    running.worker._components.pipeline.slots._mean_seconds["slow"] = 0.001
    # The first heartbeat that hands some back ends that: all are claimed before.
    beats, all_are_claimed = running.worker._components.beats, asyncio.Event()
    beat = beats._step

    async def beat_later() -> None:
        await all_are_claimed.wait()
        await beat()

    beats._step = beat_later
    await client.enqueue_many("slow", [{}] * 60)
    await running.events.told("job.claimed", times=60)
    all_are_claimed.set()
    await running.events.told("job.released", times=50)
    await rounds_pass(count_rounds(beats), 6)
    assert len(running.events.of("job.released")) == 50
    running_now = await rows.query("SELECT id FROM jsworker.jobs WHERE status = 'processing'")
    assert len(running_now) == gate.waiting == 10

    gate.open()
    await all_ended(rows)
    assert gate.waiting == 60
    await running.stream_is_empty()
