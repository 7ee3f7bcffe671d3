"""A worker dies, freezes or misses an answer: its jobs run again in time, and never twice at one token."""

import json
import math
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import nats
import psycopg
import pytest
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.reset import look_for_late
from jsworker.stream.message import WireMessage, consumer_of, encode, message_id, subject_of
from jsworker.worker.pipeline import intake
from jsworker.worker.pipeline.in_flight import Claiming
from tests.conftest import UNHURRIED
from tests.support.fleet import PATIENT, Fleet
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

CLAIM = b"status='processing', worker_id="
"""Part of the CLAIM statement and of no other."""

TIMES: dict[str, Any] = {
    "heartbeat_interval": 1.0,
    "statement_timeout": 0.9,
    "crash_threshold": None,
    "stale_threshold": 8.0,
    "ack_wait": 60.0,
}
"""So slow that no busy machine silences an owner that lives; rows of dead ones are aged by the test."""

pytestmark = [pytest.mark.hurried, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(**TIMES)


async def age(rows: Rows) -> None:
    """Make running jobs look as if their owners had been silent for longer than their threshold.

    No stall counts that an outage of the database may have caused: it must have been up for as long.
    """

    async def is_up_for_long() -> None:
        up = "SELECT clock_timestamp() - pg_postmaster_start_time() > make_interval(secs => %s)"
        assert await rows.value(up, TIMES["stale_threshold"])

    await eventually(is_up_for_long)
    await rows.query(
        "UPDATE jsworker.jobs SET last_activity_at = clock_timestamp() - 2 * stale_after "
        "WHERE status = 'processing'"
    )


@pytest.fixture
def no_prepared_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy knows statements by their words, which a prepared one sends only once."""
    no_row = "SELECT WHERE %s IS NULL"  # as from a pooler
    monkeypatch.setattr("jsworker.ownership.pool.BEGIN_SESSION_THAT_KEEPS_PLANS", no_row)


@pytest.fixture
async def through_proxy(
    database_url: str,
    make_settings: Callable[..., Settings],
    no_prepared_statements: None,
) -> AsyncIterator[tuple[Proxy, Settings]]:
    """A proxy before the database, and settings that lead through it."""
    async with proxied(database_url) as (proxy, url):
        yield proxy, make_settings(**TIMES | {"database_url": url})


class Heard:
    """What was published about jobs."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def hear(self, message: Msg) -> None:
        self.messages.append(json.loads(message.data))

    async def times(self, count: int) -> list[dict[str, Any]]:
        async def check() -> list[dict[str, Any]]:
            assert len(self.messages) >= count
            return self.messages

        return await eventually(check)


@pytest.fixture
async def heard(settings: Settings) -> AsyncIterator[Heard]:
    connection = await nats.connect(settings.nats_url)
    messages = Heard()
    await connection.subscribe(subject_of(settings.subject_prefix, "*"), cb=messages.hear)
    await connection.flush()
    yield messages
    await connection.close()


class Rescued(JobProcessor):
    """Notes each run, and returns at once."""

    kind = "held"

    def __init__(self) -> None:
        self.runs: list[tuple[UUID, int, bool, str | None]] = []

    async def process(self, job: Job[dict[str, Any]]) -> str:
        self.runs.append((job.id, job.fencing_token, job.cleared, job.clear_reason))
        return "rescued"


# --- killed ---


async def test_the_jobs_of_a_killed_worker_run_again_after_the_stale_threshold(
    client: JobClient, fleet: Fleet, start: StartWorker, rows: Rows, heard: Heard, *, js: JetStreamContext
) -> None:
    [victim] = await fleet.started(1, concurrency=3)
    ids = {job.id for job in await client.enqueue_many("held", [{}] * 3)}
    await victim.tells("start", times=3)
    rescued = Rescued()
    rescuer = await start(rescued)
    scans = count_rounds(rescuer.worker._components.scans)
    victim.kill()
    await rounds_pass(scans, 2)
    assert rescued.runs == []
    await age(rows)  # of all at once, so that one scan finds all of them

    await rescuer.events.told("job.completed", times=3)
    [dead] = victim.lines("worker.started")
    reason = f"worker {dead['worker_id']} stopped responding"
    assert {run[0] for run in rescued.runs} == ids
    assert [run[1:] for run in rescued.runs] == [(2, True, reason)] * 3
    assert [event["jobs"] for event in rescuer.events.of("stale.recovered")] == [3]
    for job_id in ids:
        row = await rows.job(job_id)
        counts = (row["status"], row["attempts"], row["stalls"], row["errors"], row["dispatch"])
        assert counts == ("completed", 2, 1, 0, 2)
        # On a busy machine the first message may outlive its ack_wait, and be skipped.
        timeline = [entry for entry in await rows.timeline(job_id) if entry["event"] != "skipped"]
        assert [entry["event"] for entry in timeline] == ["reset", "claimed"]
        taken_back, claimed = timeline
        assert taken_back["worker_id"] == rescuer.worker.id
        assert (taken_back["detail"]["counted"], taken_back["detail"]["owner"]) == (True, dead["worker_id"])
        assert (claimed["detail"]["cleared"], claimed["detail"]["clear_reason"]) == (True, reason)
    *firsts, one, two, three = await heard.times(6)
    assert [message["cleared"] for message in firsts] == [False] * 3
    assert {one["job_id"], two["job_id"], three["job_id"]} == {str(job_id) for job_id in ids}
    for message in (one, two, three):
        assert (message["cleared"], message["clear_reason"], message["dispatch"]) == (True, reason, 2)
    # The dead one's messages come again after its ack_wait, which is a minute.
    consumer = (await js.consumer_info(rescuer.worker._stream.name, consumer_of("held"))).config
    await js.add_consumer(rescuer.worker._stream.name, replace(consumer, ack_wait=1.0))
    await rescuer.stream_is_empty()


async def test_a_stalled_job_is_failed_put_off_or_cancelled_as_its_row_says(
    client: JobClient, fleet: Fleet, start: StartWorker, rows: Rows
) -> None:
    [victim] = await fleet.started(1, concurrency=4)
    last = await client.enqueue("endless", {}, max_stalls=1)
    second = await client.enqueue("endless", {}, max_stalls=3)
    unwanted = await client.enqueue("endless", {}, max_stalls=1)
    await victim.tells("start", times=3)
    await rows.query("UPDATE jsworker.jobs SET stalls = 1, attempts = 2 WHERE id = %s", second.id)
    rescuer = await start(Rescued())
    victim.kill()
    await client.cancel(unwanted.id)
    await age(rows)

    failed = await rows.becomes(last.id, "failed")
    assert (failed["failure_reason"], failed["stalls"], failed["attempts"]) == ("stalled", 1, 1)
    assert failed["clear_reason"].endswith("stopped responding")
    put_off = await rows.becomes(second.id, "scheduled")
    assert (put_off["stalls"], put_off["cleared"], put_off["needs_publish"]) == (2, True, False)
    wait = (
        "SELECT extract(epoch FROM j.run_at - e.at)::float8 FROM jsworker.jobs AS j"
        " JOIN jsworker.job_events AS e ON e.job_id = j.id AND e.event = 'reset' WHERE j.id = %s"
    )
    assert 1 < await rows.value(wait, second.id) <= 6
    cancelled = await rows.becomes(unwanted.id, "cancelled")
    assert (cancelled["stalls"], cancelled["finished_at"] is not None) == (1, True)
    [told] = await rescuer.events.told("job.failed")
    assert (told["job_id"], told["error"]) == (str(last.id), "stalled too often")


# --- frozen ---


async def test_a_frozen_worker_that_wakes_late_finishes_nothing_and_is_told(
    client: JobClient, fleet: Fleet, start: StartWorker, rows: Rows, settings: Settings
) -> None:
    [frozen] = await fleet.started(1, concurrency=2)
    finishing = await client.enqueue("held", {"seconds": settings.stale_threshold})
    waiting = await client.enqueue("held", {})
    await frozen.tells("start", times=2)
    frozen.send(signal.SIGSTOP)
    frozen_at = time.monotonic()
    await age(rows)
    gate = Gate()
    rescuer = await start(scripted(gate.process, kind="held"))
    await rescuer.events.told("job.started", times=2)

    async def has_come_to_its_end() -> None:
        assert time.monotonic() > frozen_at + settings.stale_threshold

    await eventually(has_come_to_its_end)
    frozen.send(signal.SIGCONT)

    lost = await frozen.tells("lost", times=2)
    assert {(line["job"], line["token"]) for line in lost} == {(str(finishing.id), 1), (str(waiting.id), 1)}
    # Its fence saw how long it had been frozen before either job could come to its end.
    assert frozen.lines("finish") == []
    for job in (finishing, waiting):
        told = [event for event in await rows.timeline(job.id) if event["event"] in {"fenced", "rejected"}]
        assert [(each["event"], each["fencing_token"]) for each in told] == [("fenced", 1), ("rejected", 1)]
        assert told[1]["detail"] == {"write": "release"}
    for job in (finishing, waiting):
        row = await rows.job(job.id)
        owner = (row["status"], row["worker_id"], row["fencing_token"])
        assert owner == ("processing", rescuer.worker.id, 2)
    gate.open()
    for job in (finishing, waiting):
        assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 2
    # It works on: what it lost holds no slot.
    await rescuer.worker.close()
    again = await client.enqueue_many("timed", [{"seconds": 0.01}] * 2)
    await frozen.tells("finish", times=2)
    for job in again:
        await rows.becomes(job.id, "completed")
    frozen.send(signal.SIGTERM)
    assert await frozen.ends() == 0


# --- who may take back ---


async def add_silent_job(
    rows: Rows, *, stale_after: float, silent_for: float, worker_id: str = "gone", kind: str = "elsewhere"
) -> UUID:
    """Insert a running job, by default of a worker that does not exist."""
    job_id = uuid4()
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, worker_id, fencing_token, attempts,"
        " max_attempts, max_stalls, dispatch, queued_at, claimed_at, stale_after, last_activity_at)"
        " VALUES (%s, %s, '{}', 'processing', %s, 1, 1, 5, 3, 1, clock_timestamp(),"
        " clock_timestamp() - interval '1 minute', make_interval(secs => %s),"
        " clock_timestamp() - make_interval(secs => %s))",
        job_id,
        kind,
        worker_id,
        stale_after,
        silent_for,
    )
    return job_id


async def test_a_late_row_that_moves_is_left_alone(start: StartWorker, rows: Rows) -> None:
    alive = await add_silent_job(rows, stale_after=30, silent_for=60)  # to be watched for a third of it
    dead = [await add_silent_job(rows, stale_after=0.3, silent_for=10) for _ in range(2)]
    await start(Rescued())

    async def one_is_taken_back(job_id: UUID) -> None:
        # Later than its threshold at every sighting, and yet alive: as after a jump of the database's clock.
        await rows.query(
            "UPDATE jsworker.jobs SET last_activity_at = clock_timestamp() - interval '1 min' WHERE id = %s",
            alive,
        )
        assert (await rows.job(job_id))["status"] == "queued"

    for job_id in dead:
        await eventually(lambda job_id=job_id: one_is_taken_back(job_id))  # type: ignore[misc] # bound now
    row = await rows.job(alive)
    assert (row["status"], row["fencing_token"], row["stalls"]) == ("processing", 1, 0)
    await rows.query("UPDATE jsworker.jobs SET stale_after = interval '3 s' WHERE id = %s", alive)
    await rows.becomes(alive, "queued")  # once it stands still


async def test_all_jobs_of_a_large_worker_are_watched_at_once(start: StartWorker, rows: Rows) -> None:
    """Those watched only once others are taken back would be taken back a third of a threshold later."""
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, worker_id, fencing_token, attempts,"
        " dispatch, queued_at, claimed_at, stale_after, last_activity_at)"
        " SELECT gen_random_uuid(), 'elsewhere', '{}', 'processing', 'gone', 1, 1, 1, at, at, '1 hour', at"
        " FROM generate_series(1, 12000), (SELECT clock_timestamp() - interval '1 minute' AS at) AS late"
    )
    running = await start(Rescued())

    async def all_are_watched() -> None:
        assert len(running.worker._components.late._seen) == 12_000

    await eventually(all_are_watched)


async def test_a_claim_takes_a_job_straight_from_an_owner_that_is_proven_stale(
    settings: Settings, start: StartWorker, rows: Rows, database: Database
) -> None:
    job_id = await add_silent_job(rows, stale_after=0.3, silent_for=10, kind="held")
    rescued = Rescued()
    running = await start(rescued)
    await running.worker._components.scans.stop()  # the test proves it
    lateness = await look_for_late(database, heartbeat_interval=0.1, limit=10)
    running.worker._components.late.proven = {row.id: row for row in lateness.suspects}
    await publish(settings, [WireMessage(job_id, "held", 1)])
    await rows.becomes(job_id, "completed")
    assert rescued.runs == [(job_id, 2, True, "worker gone stopped responding")]
    [stalled] = running.events.of("job.stalled")
    assert (stalled["job_id"], stalled["owner"], stalled["cause"]) == (str(job_id), "gone", "stale")
    assert (stalled["fencing_token"], stalled["counted"], stalled["stalls"]) == (1, True, 1)
    assert running.worker._components.late.proven == {}
    [told] = [row for row in await rows.timeline(job_id) if row["event"] == "claimed"]
    assert told["detail"]["cause"] == "stale"


async def test_a_worker_whose_own_heartbeats_fail_takes_nothing_back(
    client: JobClient, start: StartWorker, rows: Rows, database_url: str, settings: Settings
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue("scripted", {})
    await gate.met()
    scans = count_rounds(running.worker._components.scans)
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.workers FOR UPDATE")
        [degraded] = await running.events.told("worker.degraded")
        assert degraded["what"] == "this worker's row of jsworker.workers"
        silent = await add_silent_job(rows, stale_after=0.3, silent_for=10)
        await rounds_pass(scans, 8)  # two would do to take it back
        assert (await rows.job(silent))["status"] == "processing"
        # Its own jobs are renewed all the same: it is only the worker's row that cannot be written.
        await rows.is_renewed(job.id, threshold=settings.stale_threshold / 2, times=1)
        holder.rollback()
    await rows.becomes(silent, "queued")
    gate.open()
    assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1


async def test_a_worker_that_was_frozen_watches_anew_before_it_takes_anything_back(
    start: StartWorker, rows: Rows, make_settings: Callable[..., Settings], database_url: str
) -> None:
    settings = make_settings()  # quick ones: the freeze is a gap between heartbeats
    running = await start(Rescued(), with_settings=settings)
    silent = await add_silent_job(rows, stale_after=4.5, silent_for=3.6)
    late = running.worker._components.late

    async def watched() -> None:
        assert silent in late._seen

    await eventually(watched)
    with psycopg.connect(database_url, autocommit=True) as connection:
        time.sleep(1.2)  # noqa: ASYNC251 -- the freeze: this thread is the worker's, too
        [woken_at] = connection.execute("SELECT clock_timestamp()").fetchone() or ()
    await rows.becomes(silent, "queued")
    seconds = await rows.value(
        "SELECT extract(epoch FROM at - %s)::float8 FROM jsworker.job_events WHERE job_id = %s",
        woken_at,
        silent,
    )
    assert seconds >= 2 * settings.heartbeat_interval


# --- a claim whose answer is lost ---


@pytest.mark.parametrize("hang", [False, True], ids=["broken", "silent"])
async def test_a_claim_whose_answer_is_lost_is_read_back_and_run_once(
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    through_proxy: tuple[Proxy, Settings],
    hang: bool,  # noqa: FBT001 -- a parameter of the test
) -> None:
    proxy, settings = through_proxy
    rescued = Rescued()
    # What nobody has read back after twice that time is released, and run again.
    patient = {"statement_timeout": 1.5, "heartbeat_interval": 2.0, "crash_threshold": None}
    settings = settings.model_copy(update=patient | {"stale_threshold": 60.0, "ack_wait": 90.0})
    running = await start(rescued, with_settings=settings)
    lost = proxy.lose_next_answer(CLAIM, hang=hang)
    job = await client.enqueue("held", {})

    await rows.becomes(job.id, "completed")
    assert lost.done()
    assert rescued.runs == [(job.id, 1, False, None)]
    assert await rows.told(job.id) == []
    assert (await rows.job(job.id))["dispatch"] == 1
    await running.stream_is_empty()
    # The database did not answer, and for that long nothing was pulled.
    [degraded, *_] = running.events.of("worker.degraded")
    assert degraded["what"] == "postgresql"
    await running.events.told("worker.restored")


async def test_a_claim_in_nobodys_hand_is_released_and_run_at_the_next_token(
    client: JobClient, start: StartWorker, rows: Rows, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, settings = through_proxy
    rescued = Rescued()
    running = await start(rescued, with_settings=settings)
    lost = proxy.lose_next_answer(CLAIM, hang=True, then=proxy.black_hole)
    job = await client.enqueue("held", {})
    await lost
    # Neither the claim nor what asks for its fate is answered: the claim is given up.
    await eventually(lambda: nothing_is_being_claimed(running.worker._context.in_flight.claiming))
    assert (await rows.job(job.id))["worker_id"] == running.worker.id
    proxy.restore()

    await rows.becomes(job.id, "completed")
    reason = "claimed, but the claim's answer was lost"
    assert rescued.runs == [(job.id, 2, True, reason)]
    assert await rows.told(job.id) == ["released", "claimed"]
    row = await rows.job(job.id)
    assert (row["attempts"], row["stalls"], row["errors"]) == (1, 0, 0)
    [released] = running.events.of("job.released")
    assert (released["job_id"], released["fencing_token"]) == (str(job.id), 1)
    await running.stream_is_empty()


async def test_a_claim_that_is_being_released_is_not_read_back_into_the_hand(
    client: JobClient, start: StartWorker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    rescued = Rescued()
    running = await start(rescued)
    in_flight, claim, late = running.worker._context.in_flight, claims.claim, list[tuple[UUID, int]]()

    async def answered_too_late(*arguments: Any, **named: Any) -> Any:
        taken = await claim(*arguments, **named)
        if late or not taken.claimed:
            return taken
        late.extend((row.id, row.fencing_token) for row in taken.claimed)
        in_flight.releasing.update(late)
        raise DatabaseUnavailable("no answer")

    monkeypatch.setattr(claims, "claim", answered_too_late)
    job = await client.enqueue("held", {})
    await rows.becomes(job.id, "processing")
    await eventually(lambda: nothing_is_being_claimed(in_flight.claiming))
    assert late == [(job.id, 1)]
    assert rescued.runs == []
    in_flight.releasing.clear()

    await rows.becomes(job.id, "completed")
    assert [token for _, token, *_ in rescued.runs] == [2]


@pytest.mark.usefixtures("no_prepared_statements")
async def test_a_claim_read_back_counts_as_renewed_when_it_was_sent(
    client: JobClient, start: StartWorker, make_settings: Callable[..., Settings], database_url: str
) -> None:
    gate = Gate()
    async with proxied(database_url) as (proxy, url):
        running = await start(
            scripted(gate.process), with_settings=make_settings(database_url=url, **PATIENT)
        )
        answered_at: list[float] = []
        proxy.lose_next_answer(CLAIM, then=lambda: answered_at.append(boottime()))
        job = await client.enqueue("scripted", {})
        await gate.met()
        # The owner must stop in time, counted from the row's sign of life and not from when it was told.
        assert running.worker._context.in_flight.runs[job.id].beaten_at <= answered_at[0]
        gate.open()
        await running.events.told("job.completed")
        await running.worker.close()


@pytest.mark.usefixtures("patient")
async def test_a_locked_row_in_nobodys_hand_silences_no_heartbeat(
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    make_settings: Callable[..., Settings],
    database_url: str,
) -> None:
    gate = Gate()
    settings = make_settings(**UNHURRIED)
    running = await start(scripted(gate.process), with_settings=settings)
    job = await client.enqueue("scripted", {})
    await gate.met()
    heartbeat = running.worker._components.heartbeat
    heartbeat._look_at = math.inf  # a look would release the row before it is locked
    stray = await add_silent_job(rows, stale_after=600, silent_for=0, worker_id=running.worker.id)
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [stray])
        heartbeat.look_for_orphaned_claims()

        async def is_being_released() -> None:
            assert (stray, 1) in running.worker._context.in_flight.releasing

        await eventually(is_being_released)
        await rows.is_renewed(job.id, threshold=settings.stale_threshold)
        assert running.events.of("worker.degraded") == []
        holder.rollback()
    await rows.becomes(stray, "queued")
    assert await rows.told(stray) == ["released"]
    gate.open()
    assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1


async def nothing_is_being_claimed(claiming: dict[UUID, Any]) -> None:
    assert not claiming


# --- one claim at a time ---


async def test_copies_of_a_message_wait_for_the_claim_under_way(
    client: JobClient,
    make_settings: Callable[..., Settings],
    start: StartWorker,
    *,
    rows: Rows,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        intake, "_LOCKED_TRIES", 1_000_000
    )  # the claim is under way for as long as the lock lasts
    settings = make_settings(**PATIENT)
    gate = Gate()
    job = await client.enqueue("scripted", {})
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs FOR NO KEY UPDATE")
        running = await start(scripted(gate.process), with_settings=settings)
        claiming = running.worker._context.in_flight.claiming
        await eventually(lambda: deliveries_of(claiming, job.id, 1))
        await publish(settings, [WireMessage(job.id, "scripted", 1)] * 3)
        await eventually(lambda: deliveries_of(claiming, job.id, 4))
        holder.rollback()
    first = await gate.met()
    # Copies that come while it runs start nothing either, and are not kept.
    await publish(settings, [WireMessage(job.id, "scripted", 1)] * 3)

    async def only_the_run_s_own_message_is_left() -> None:
        state = await running.worker._stream.state()
        assert (state.last_seq, state.messages) == (7, 1)

    await eventually(only_the_run_s_own_message_is_left)
    gate.open()
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert (first.fencing_token, gate.waiting) == (1, 0)
    assert await rows.told(job.id) == []


async def test_a_newer_copy_of_a_running_job_is_kept(
    client: JobClient, settings: Settings, start: StartWorker, rows: Rows
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue("scripted", {})
    await gate.met()
    await publish(settings, [WireMessage(job.id, "scripted", 2)])

    async def handed_back() -> None:
        state = await running.worker._stream.state()
        pending = (await running.worker._stream.consumer_state("scripted")).num_pending
        assert (state.last_seq, state.messages) == (2, 2)
        assert running.worker._context.in_flight.runs.keys() == {job.id}
        assert pending == 0

    await eventually(handed_back)
    gate.open()
    await rows.becomes(job.id, "completed")
    assert gate.waiting == 0


async def deliveries_of(claiming: dict[UUID, Claiming], job_id: UUID, count: int) -> None:
    assert job_id in claiming
    assert len(claiming[job_id].deliveries) == count


async def publish(settings: Settings, messages: list[WireMessage]) -> None:
    """Publish messages, each under an id of its own."""
    connection = await nats.connect(settings.nats_url)
    jetstream = connection.jetstream()
    for message in messages:
        await jetstream.publish(
            subject_of(settings.subject_prefix, message.kind),
            encode(message),
            headers={"Nats-Msg-Id": f"{message_id(message.job_id, message.dispatch)}:{uuid4()}"},
        )
    await connection.close()
