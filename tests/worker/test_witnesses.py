"""Rule 3: jobs of an owner whom nobody finds on NATS are taken back long before they are stale; no others."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import pytest
from nats.aio.msg import Msg

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.embedded.resources import free_port
from jsworker.ownership.database import Database
from jsworker.stream.jetstream import Stream
from jsworker.stream.liveness import Answer
from jsworker.worker.presence import Presence
from jsworker.worker.recovery import sweeper
from tests.conftest import FAST
from tests.stream.nats_server import HOST, NatsServer
from tests.support.contexts import make_context
from tests.support.fleet import Fleet, WorkerProcess
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.lives import Lives, ended_pid
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

STALE_SECONDS = 60.0
CRASH_SECONDS = 4.5
TIMES: dict[str, Any] = {
    "heartbeat_interval": 1.5,
    "statement_timeout": 1.4,
    "crash_threshold": CRASH_SECONDS,
    "stale_threshold": STALE_SECONDS,
    "ack_wait": 90.0,
}
"""So slow that no owner that lives stops its own run, on a busy machine, before others may take it."""


pytestmark = [pytest.mark.hurried, pytest.mark.usefixtures("patient", "nothing_is_left")]


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(**TIMES)


async def job_of(worker: WorkerProcess, place: int) -> UUID:
    return UUID((await worker.tells("start", times=place + 1))[place]["job"])


async def test_only_an_owner_whose_connection_is_gone_is_taken_for_crashed(
    client: JobClient, fleet: Fleet, start: StartWorker, rows: Rows
) -> None:
    trusting = fleet.start(concurrency=1, crash_threshold="none")
    killed, frozen = await fleet.started(2, concurrency=1)
    await trusting.tells("worker.started")
    await client.enqueue_many("held", [{}] * 3)
    jobs = [await job_of(worker, 0) for worker in (killed, frozen, trusting)]

    async def all_answer() -> None:
        assert await rows.value("SELECT bool_and(answers) FROM jsworker.workers")

    await eventually(all_answer)
    rescuer = await start(scripted(echo, kind="held"))
    frozen.send(signal.SIGSTOP)
    killed.kill()
    trusting.kill()

    await rows.becomes(jobs[0], "completed")

    async def the_others_are_silent_for_as_long() -> None:
        for job_id in jobs[1:]:
            assert await rows.silence(job_id) > CRASH_SECONDS

    await eventually(the_others_are_silent_for_as_long)
    await rounds_pass(count_rounds(rescuer.worker._components.scans), 3)
    for job_id in jobs[1:]:
        assert (await rows.job(job_id))["status"] == "processing"
    await rows.query(
        "UPDATE jsworker.jobs SET stale_after = interval '1 s',"
        " last_activity_at = clock_timestamp() - interval '1 minute' WHERE status = 'processing'"
    )
    for job_id in jobs[1:]:
        await rows.becomes(job_id, "completed")
    silences: dict[str, float] = {}
    for worker, job_id, cause in zip(
        (killed, frozen, trusting), jobs, ("crashed", "stale", "stale"), strict=True
    ):
        reset, claimed = await rows.timeline(job_id)
        [owner] = worker.lines("worker.started")
        assert (reset["event"], claimed["event"]) == ("reset", "claimed")
        assert (reset["detail"]["cause"], reset["detail"]["owner"]) == (cause, owner["worker_id"])
        assert (reset["worker_id"], reset["fencing_token"]) == (rescuer.worker.id, 1)
        silences[cause] = await rows.value(
            "SELECT extract(epoch FROM e.at - w.last_seen_at)::float8 FROM jsworker.job_events AS e"
            " JOIN jsworker.workers AS w ON w.id = e.detail ->> 'owner'"
            " WHERE e.job_id = %s AND e.event = 'reset'",
            job_id,
        )
    print(f"taken back after seconds of silence: {silences}")  # noqa: T201 -- a measurement for -rP
    assert silences["crashed"] >= CRASH_SECONDS - 0.1  # the worker's row is written after its jobs'
    causes = [event["cause"] for event in rescuer.events.of("stale.recovered")]
    assert sorted(causes) == ["crashed", "stale", "stale"]


async def test_an_owner_whom_nobody_finds_keeps_its_jobs_as_long_as_its_heart_beats(
    start: StartWorker, rows: Rows, make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    gate = Gate()
    beyond = NatsServer(tmp_path)  # the far side of a partition
    await beyond.start()
    try:
        own = make_settings(**TIMES, nats_url=beyond.url)
        owner = await start(scripted(gate.process), with_settings=own)
        asker = await start(scripted(echo, kind="held"))
        async with JobClient(own) as client:
            job = await client.enqueue("scripted", {})
        await gate.met()
        await eventually(lambda: finds_nobody(asker.worker._components.presence, owner.worker.id))
        scans = count_rounds(asker.worker._components.scans)
        began = await rows.value("SELECT clock_timestamp()")

        async def longer_than_the_threshold() -> None:
            passed = (await rows.value("SELECT clock_timestamp()") - began).total_seconds()
            assert passed > CRASH_SECONDS

        await rounds_pass(scans, 4)
        await eventually(longer_than_the_threshold)
        await eventually(lambda: finds_nobody(asker.worker._components.presence, owner.worker.id))
        row = await rows.job(job.id)
        assert (row["status"], row["worker_id"]) == ("processing", owner.worker.id)
        assert owner.worker._components.presence.answers
        gate.open()
        assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1
        assert await rows.told(job.id) == []
        await owner.worker.close(force=True)
    finally:
        await beyond.stop()


async def test_the_silence_of_an_owner_that_never_answered_proves_nothing(
    database: Database, start: StartWorker, rows: Rows, settings: Settings
) -> None:
    lives = Lives(database, rows, settings)
    # Another host, so that only silence speaks.
    elsewhere: dict[str, Any] = {
        "hostname": "elsewhere",
        "boot_id": "another",
        "pid": ended_pid(),
        "job": False,
    }
    await lives.add("answered", answers=True, **elsewhere)
    await lives.add("never-answered", answers=False, **elsewhere)
    silent: dict[str, Any] = {"silent_for": 10.0, "crash_after": 0.9}
    held = {name: await lives.hold(name, **silent) for name in ("answered", "never-answered", "unregistered")}
    no_threshold = await lives.hold("answered", silent_for=10.0)
    running = await start(scripted(echo))
    scans = count_rounds(running.worker._components.scans)

    await rows.becomes(held["answered"], "queued")
    assert (await rows.timeline(held["answered"]))[0]["detail"]["cause"] == "crashed"
    await rounds_pass(scans, 3)
    for job_id in (held["never-answered"], held["unregistered"], no_threshold):
        assert (await rows.job(job_id))["status"] == "processing"


async def test_who_answers_for_a_dead_owner_holds_its_jobs_up_for_a_while_only(
    database: Database, start: StartWorker, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "BELIEVED_SECONDS", 4 * FAST["scan_interval"])
    lives = Lives(database, rows, settings)
    await lives.add("dead", answers=True, job=False, hostname="elsewhere", boot_id="another", pid=ended_pid())
    job = await lives.hold("dead", silent_for=10.0, stale_after=None, crash_after=0.9)
    forger = await nats.connect(settings.nats_url)
    asked: list[Msg] = []

    async def answer(message: Msg) -> None:
        asked.append(message)
        await message.respond(b"alive")

    try:
        await forger.subscribe("jsworker.worker.dead", cb=answer)
        await start(scripted(echo))
        await rows.becomes(job, "queued")
        assert len(asked) >= 2
        [reset] = await rows.timeline(job)
        assert reset["detail"]["cause"] == "crashed"
        assert reset["detail"]["reason"].endswith("no answer stands for its heartbeats any more")
    finally:
        await forger.close()


async def no_stacks(_: bytes) -> bytes:
    return b""


async def test_who_has_just_connected_knows_nothing_yet(
    settings: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    interval, passed = 60.0, 0.0
    monkeypatch.setattr("jsworker.worker.presence.boottime", lambda: boottime() + passed)
    async with proxied(settings.nats_url) as (proxy, url):
        own = settings.model_copy(update={"nats_url": url, "heartbeat_interval": interval})
        context = make_context(database, settings=own, worker_id="asking")
        stream, presence = context.stream, Presence(context, no_stacks)
        await stream.connect()
        try:
            assert await presence.ask("nobody") is Answer.UNKNOWN  # nothing is proven yet
            for _ in range(2):
                await eventually(lambda: reaches_itself(presence))
                assert presence.answers
                assert await presence.ask("asking") is Answer.UNKNOWN
                passed += 2 * interval
                await eventually(lambda: finds_nobody(presence))
                await eventually(lambda: finds_itself(presence))
                lost = asyncio.Event()
                stream.connection.lost_callbacks.append(lost.set)
                proxy.break_connections()
                await lost.wait()
                assert not presence.reachable()
                assert await presence.ask("nobody") is Answer.UNKNOWN
                await eventually(lambda: is_back(stream))  # sooner than the next step has a look
            await eventually(lambda: reaches_itself(presence))
        finally:
            await stream.close()


@pytest.mark.parametrize("is_cut_off", [True, False], ids=["cut off", "an only server"])
async def test_who_is_cut_off_from_database_and_cluster_is_gone_and_knows_nothing(
    settings: Settings, database: Database, tmp_path: Path, *, is_cut_off: bool
) -> None:
    """A server without its cluster still hands a worker's requests to itself on."""
    routes = f'listen: "{HOST}:{free_port()}", routes: ["nats://{HOST}:1"]'
    server = NatsServer(tmp_path, extra=f"server_name: one\ncluster {{ name: zones, {routes} }}")
    if is_cut_off:
        await server.start()
    url = server.url if is_cut_off else settings.nats_url
    own = settings.model_copy(update={"nats_url": url, "heartbeat_interval": 10.0})
    context = make_context(database, settings=own, worker_id="asking")
    presence = Presence(context, no_stacks)
    await context.stream.connection.connect(10.0)  # does not wait for JetStream
    try:
        await eventually(lambda: reaches_itself(presence))
        assert await presence.is_with_quorum() is not is_cut_off
        context.health.failed(DatabaseUnavailable("cut off"))
        assert presence.reachable()  # the stream's leader was not asked yet
        await presence.step()
        assert presence.reachable() is not is_cut_off
        context.health.answered()
        assert presence.reachable()
    finally:
        await context.stream.close()
        await server.stop()


async def reaches_itself(presence: Presence) -> None:
    await presence.step()
    assert presence.reachable()


async def finds_nobody(presence: Presence, worker_id: str = "nobody") -> None:
    await presence.step()
    assert await presence.ask(worker_id) is Answer.NO_RESPONDERS


async def finds_itself(presence: Presence) -> None:
    assert await presence.ask("asking") is Answer.ALIVE


async def is_back(stream: Stream) -> None:
    assert stream.connected
