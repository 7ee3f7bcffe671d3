"""PostgreSQL or NATS goes away under load and comes back: no job is lost, none is run twice at one token."""

import asyncio
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import nats
import psycopg
import pytest
from sqlalchemy import text

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.stream.api import NotThere
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import decode
from jsworker.worker.pipeline.in_flight import Phase
from tests.conftest import FAST
from tests.support.fleet import fleet_of
from tests.support.leaks import nothing_left
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.support.servers import TestServers, new_servers_folder, start_migrated_servers
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows, open_rows
from tests.worker.running import Running, StartWorker

HANDED_BACK = {
    "claimed, but the claim's answer was lost",
    "the owner could not renew its heartbeat in time and stopped the run",
}
"""Why a worker that lives gives a job back, at no cost but time."""

pytestmark = pytest.mark.hurried


@pytest.fixture(scope="module")
def servers() -> Iterator[TestServers]:
    """Servers of this module's own, for it stops them."""
    running = start_migrated_servers(new_servers_folder())
    yield running
    running.stop()


@pytest.fixture(autouse=True)
async def _nothing_left(database_url: str, servers: TestServers) -> AsyncIterator[None]:
    async with nothing_left(database_url):
        yield
        for server in (servers.postgres, servers.nats):
            await asyncio.to_thread(server.start)  # in case that a test has failed in between


@pytest.fixture
async def through_proxy(
    database_url: str, make_settings: Callable[..., Settings]
) -> AsyncIterator[tuple[Proxy, Settings]]:
    """A proxy before the database, and settings that lead through it."""
    async with proxied(database_url) as (proxy, url):
        yield proxy, make_settings(database_url=url)


class Load(JobProcessor):
    """Works for the payload's ``seconds`` and notes each run, and jobs that ran twice at the same time."""

    def __init__(self) -> None:
        self.runs: Counter[tuple[UUID, int]] = Counter()
        self.beside: set[UUID] = set()
        self._running: set[UUID] = set()

    async def process(self, job: Job[dict[str, Any]]) -> None:
        self.runs[job.id, job.fencing_token] += 1
        if job.id in self._running:
            self.beside.add(job.id)
        self._running.add(job.id)
        try:
            await asyncio.sleep(job.payload["seconds"])
        finally:
            self._running.discard(job.id)


async def all_published(rows: Rows) -> None:
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0


async def all_completed(rows: Rows, jobs: int) -> None:
    async def check() -> None:
        counts = await rows.query("SELECT status, count(*) FROM jsworker.jobs GROUP BY status")
        assert counts == [{"status": "completed", "count": jobs}]

    await eventually(check, seconds=60)


async def each_was_accepted_once(load: Load, running: Running, rows: Rows, ids: Collection[UUID]) -> None:
    """Every job has one owner at a time and one accepted end, and nothing counts against it.

    A claim that a busy machine answers too late, or a heartbeat, costs time and a token, and no more.
    """
    assert {job_id for job_id, _ in load.runs} == set(ids)
    assert set(load.runs.values()) == {1}  # none twice at one token
    assert load.beside == set()
    ended = [event["job_id"] for event in running.events.of("job.completed")]
    assert sorted(ended) == sorted(map(str, ids))
    ends = await rows.query("SELECT id, fencing_token FROM jsworker.jobs")
    assert {(row["id"], row["fencing_token"]) for row in ends} <= load.runs.keys()
    counts = await rows.query("SELECT DISTINCT attempts, stalls, errors FROM jsworker.jobs")
    assert counts == [{"attempts": 1, "stalls": 0, "errors": 0}]
    told = await rows.query("SELECT event, detail->>'reason' AS reason FROM jsworker.job_events")
    assert {row["event"] for row in told} <= {"fenced", "released", "claimed"}
    assert {row["reason"] for row in told if row["event"] == "released"} <= HANDED_BACK


# --- PostgreSQL ---


@pytest.mark.hurried(False)
async def test_postgres_stops_under_load(
    client: JobClient,
    servers: TestServers,
    settings: Settings,
    start: StartWorker,
    through_proxy: tuple[Proxy, Settings],
) -> None:
    proxy, own = through_proxy
    load = Load()
    ids = {job.id for job in await client.enqueue_many("load", [{"seconds": 0.05}] * 300)}
    before = await open_rows(settings)
    await eventually(lambda: all_published(before))
    await before.connection.close()
    running = await start(load, with_settings=own)
    await running.events.told("job.completed", times=60)
    await asyncio.to_thread(stop_at_once, servers)
    proxy.cut()  # until the test has looked around, also when PostgreSQL is back

    await eventually(lambda: only_outcomes_are_left(running))
    kept = [run.id for run in running.worker._context.in_flight.runs.values()]
    stored = await jobs_with_messages(running.worker._stream)
    await eventually(lambda: nothing_is_asked_for(running))
    await asyncio.to_thread(servers.postgres.start)
    rows = await open_rows(settings)
    ended = {
        row["id"] for row in await rows.query("SELECT id FROM jsworker.jobs WHERE finished_at IS NOT NULL")
    }
    assert 60 <= len(ended) < 300
    assert kept
    # Whatever was acknowledged had been committed, and outcomes that were not committed are kept.
    assert ids - stored <= ended
    proxy.restore()

    await all_completed(rows, 300)
    await running.stream_is_empty()
    assert {job_id for job_id, _ in load.runs} == ids
    assert load.runs.total() == 300  # each once, those whose outcomes waited among them
    assert {load.runs[job_id, 1] for job_id in kept} == {1}
    for name in ("worker.degraded", "worker.restored"):
        assert "postgresql" in [event["what"] for event in running.events.of(name)]
    counts = await rows.query("SELECT DISTINCT attempts, stalls, errors FROM jsworker.jobs")
    assert counts == [{"attempts": 1, "stalls": 0, "errors": 0}]
    assert await rows.query("SELECT * FROM jsworker.job_events WHERE event IN ('reset', 'rejected')") == []
    await rows.connection.close()


def stop_at_once(servers: TestServers) -> None:
    os.kill(servers.postgres.pid, signal.SIGQUIT)
    servers.postgres.stop()


async def only_outcomes_are_left(running: Running) -> None:
    in_flight = running.worker._context.in_flight
    assert not in_flight.claiming
    assert all(run.phase is Phase.SETTLING for run in in_flight.runs.values())


async def nothing_is_asked_for(running: Running) -> None:
    consumer = await running.worker._stream.consumer_state("load")
    assert consumer.num_waiting == 0


async def jobs_with_messages(stream: Stream) -> set[UUID]:
    """Return the jobs that the messages in the stream name."""
    state = await stream.state()
    found = [await stream.get(seq) for seq in range(state.first_seq, state.last_seq + 1)]
    return {
        decode(message.data or b"", subject_kind="load").job_id for message in found if message is not None
    }


async def test_outcomes_outlive_an_outage_that_running_jobs_do_not(
    client: JobClient, rows: Rows, start: StartWorker, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, settings = through_proxy
    gate, closed = Gate(), Gate()
    finishing = await client.enqueue("finishing", {"n": 1})
    working = await client.enqueue("working", {})
    processors = scripted(gate.process, kind="finishing"), scripted(closed.process, kind="working")
    running = await start(*processors, with_settings=settings)
    first = await gate.met()
    held = await closed.met()
    told, told_of_working = await rows.told(finishing.id), await rows.told(working.id)
    proxy.cut()
    gate.open()

    async def both_are_stale() -> None:
        for job in (finishing, working):
            assert await rows.silence(job.id) > settings.stale_threshold + settings.scan_interval

    await eventually(both_are_stale)
    assert {run.phase for run in running.worker._context.in_flight.runs.values()} == {Phase.SETTLING}
    proxy.restore()

    completed = await rows.becomes(finishing.id, "completed")
    assert (completed["fencing_token"], completed["result"]) == (first.fencing_token, {"n": 1})
    assert (completed["stalls"], await rows.told(finishing.id)) == (0, told)
    again = await closed.met()
    assert (again.fencing_token > held.fencing_token, again.cleared) == (True, True)
    assert "could not renew its heartbeat in time" in str(again.clear_reason)
    closed.open()
    ended = await rows.becomes(working.id, "completed")
    assert (ended["attempts"], ended["stalls"]) == (1, 0)
    assert await rows.told(working.id) == [*told_of_working, "fenced", "released", "claimed"]
    await running.stream_is_empty()


@pytest.mark.hurried(False)
async def test_an_outage_within_a_run_costs_no_attempt(
    client: JobClient, rows: Rows, start: StartWorker, through_proxy: tuple[Proxy, Settings]
) -> None:
    """Progress is dropped meanwhile, a checkpoint waits until it is stored."""
    proxy, settings = through_proxy
    reached: list[str] = []

    async def process(job: Job[Any]) -> str:
        await job.update_progress(stage="before", progress=0.1)
        proxy.cut()
        await job.update_progress(stage="during", progress=0.2)
        reached.append("progress")
        await job.save_checkpoint({"n": 1})
        reached.append("checkpoint")
        await job.update_progress(progress=0.3)
        return "done"

    running = await start(scripted(process, max_attempts=1), with_settings=settings)
    job = await client.enqueue("scripted", {})

    async def waits_for_the_database() -> None:
        assert reached == ["progress"]
        assert running.events.of("worker.degraded")

    await eventually(waits_for_the_database)
    proxy.restore()
    row = await rows.becomes(job.id, "completed")
    assert reached == ["progress", "checkpoint"]
    assert (row["stage"], row["progress"], row["checkpoint"]) == ("before", 0.3, {"n": 1})
    assert (row["errors"], row["fencing_token"]) == (0, 1)


async def test_a_locked_row_holds_up_nobody_but_its_own_job(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    database_url: str,
) -> None:
    # Scans are rare, else a job may be claimed from the table and its message answered at once.
    settings = make_settings(stale_threshold=20.0, ack_wait=60.0, scan_interval=5.0)
    gate = Gate()
    running = await start(scripted(gate.process), scripted(echo, kind="echo"), with_settings=settings)
    locked, *others = [job.id for job in await client.enqueue_many("scripted", [{}] * 4)]
    for _ in range(4):
        await gate.met()
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR NO KEY UPDATE", [locked])
        await eventually(lambda: only_this_one_is_silent(rows, locked, others))
        gate.open()
        await running.events.told("job.completed", times=3)
        assert {event["job_id"] for event in running.events.of("job.completed")} == set(map(str, others))
        later = await client.enqueue("echo", {})
        await running.events.told("job.completed", times=4)
        await eventually(lambda: messages_left(running, 1))
        assert (await rows.job(locked))["status"] == "processing"
        holder.rollback()

    row = await rows.becomes(locked, "completed")
    assert (row["fencing_token"], row["attempts"]) == (1, 1)
    for job_id in (locked, *others, later.id):
        assert await rows.told(job_id) == []
    assert not {"job.lost", "job.released"} & set(running.events.names())
    await running.stream_is_empty()


async def only_this_one_is_silent(rows: Rows, locked: UUID, others: list[UUID]) -> None:
    assert await rows.silence(locked) > 5 * FAST["heartbeat_interval"]
    for job_id in others:
        assert await rows.silence(job_id) < 4 * FAST["heartbeat_interval"]


async def messages_left(running: Running, count: int) -> None:
    assert (await running.worker._stream.state()).messages == count


async def test_a_run_whose_row_stays_locked_is_stopped_before_others_may_take_its_job(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    database_url: str,
) -> None:
    settings = make_settings(heartbeat_interval=0.6, crash_threshold=1.8, stale_threshold=4.0, ack_wait=30.0)
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=settings)
    job = await client.enqueue("scripted", {})
    await gate.met()
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR NO KEY UPDATE", [job.id])
        await eventually(lambda: only_outcomes_are_left(running))
        assert await rows.silence(job.id) < settings.stale_threshold
        holder.rollback()

    again = await gate.met()
    assert (again.fencing_token, again.cleared) == (2, True)
    gate.open()
    await rows.becomes(job.id, "completed")
    assert await rows.told(job.id) == ["fenced", "released", "claimed"]


@pytest.mark.hurried(False)
async def test_transactions_that_take_every_connection_silence_no_heartbeat(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    gate = Gate()

    async def hoard(job: Job[Any]) -> None:
        async with job.transaction(result="had") as session:
            await session.execute(text("SELECT 1"))
            await gate.process(job)

    # A run has one transaction, and there are as many connections for them as job slots.
    running = await start(scripted(hoard, kind="hoard"), with_settings=make_settings(concurrency=3))
    hoarders = [await client.enqueue("hoard", {}) for _ in range(3)]
    for _ in hoarders:
        await gate.met()
    began = await rows.value("SELECT clock_timestamp()")

    async def all_beat() -> None:
        for job in hoarders:
            row = await rows.job(job.id)
            assert row["status"] == "processing"
            assert (row["last_activity_at"] - began).total_seconds() > settings_seconds

    settings_seconds = 3 * FAST["heartbeat_interval"]
    await eventually(all_beat)
    assert "heartbeat.failed" not in running.events.names()
    gate.open()
    for job in hoarders:
        assert (await rows.becomes(job.id, "completed"))["result"] == "had"


async def test_a_silent_database_does_not_hold_up_the_end_for_every_unreadable_message(
    start: StartWorker, make_settings: Callable[..., Settings], database_url: str
) -> None:
    async with proxied(database_url) as (proxy, url):
        settings = make_settings(database_url=url, concurrency=100)
        running = await start(scripted(echo, kind="load"), with_settings=settings)
        proxy.black_hole()
        connection = await nats.connect(settings.nats_url)
        for _ in range(100):
            await connection.jetstream().publish(f"{settings.subject_prefix}.load", b"no JSON")
        await connection.close()
        await running.events.told("worker.degraded")
        clock = asyncio.get_running_loop().time
        began = clock()
        await running.worker.close(force=True)
        assert clock() - began < 100 * settings.statement_timeout / 2
        assert not running.events.of("message.dead")


# --- NATS ---


async def test_nats_is_killed_and_started_again_under_load(
    client: JobClient, servers: TestServers, start: StartWorker, rows: Rows
) -> None:
    load = Load()
    ids = [job.id for job in await client.enqueue_many("load", [{"seconds": 0.05}] * 200)]
    running = await start(load)
    await running.events.told("job.completed", times=40)
    await asyncio.to_thread(servers.nats.kill)
    for _ in range(20):
        ids.append((await client.enqueue("load", {"seconds": 0.01})).id)  # noqa: PERF401 -- one after the other
    await eventually(lambda: nats_is_missed(running))
    # What runs goes on and ends in the database.
    await eventually(lambda: nothing_runs(running))
    await asyncio.to_thread(servers.nats.start)

    await all_completed(rows, 220)
    # An answer that the server took with it is given once more when the message comes again.
    await running.stream_is_empty(seconds=3 * FAST["ack_wait"])
    await each_was_accepted_once(load, running, rows, ids)
    await eventually(lambda: nats_is_back(running))


async def nats_is_back(running: Running) -> None:
    assert "nats" in [event["what"] for event in running.events.of("worker.restored")]


async def nats_is_missed(running: Running) -> None:
    assert "nats" in [event["what"] for event in running.events.of("worker.degraded")]


async def nothing_runs(running: Running) -> None:
    assert not running.worker._context.in_flight.runs


async def test_a_try_that_was_given_up_undoes_no_later_checkpoint(
    client: JobClient, start: StartWorker, rows: Rows, make_settings: Callable[..., Settings]
) -> None:
    begun, go_on, saved = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def process(job: Job[Any]) -> None:
        await job.save_checkpoint(0)
        begun.set()
        await go_on.wait()
        await job.save_checkpoint(1)
        await job.save_checkpoint(2)
        saved.set()
        await gate.process(job)

    gate = Gate()
    unfenced = make_settings(crash_threshold=None, stale_threshold=60.0, ack_wait=90.0)
    running = await start(scripted(process), with_settings=unfenced)
    job = await client.enqueue("scripted", {})
    await begun.wait()
    idle = running.worker._context.database.pools_by_name()["statements"]._idle
    pids = [connection.info.backend_pid for connection, _ in idle]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        go_on.set()
        await saved.wait()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    async def late_try_was_executed() -> None:
        # A connection that is kept has got its answer; a backend whose connection was closed ends after it.
        given_up = set(pids) - {connection.info.backend_pid for connection, _ in idle}
        there = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)"
        assert await rows.value(there, list(given_up)) == 0

    await eventually(late_try_was_executed)
    assert (await rows.job(job.id))["checkpoint"] == 2
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_a_worker_ends_in_time_while_nats_is_away(
    client: JobClient, servers: TestServers, start: StartWorker, rows: Rows
) -> None:
    running = await start(scripted(Gate().process))
    job = await client.enqueue("scripted", {})
    await rows.becomes(job.id, "processing")
    await asyncio.to_thread(servers.nats.kill)
    await eventually(lambda: nats_is_missed(running))
    clock = asyncio.get_running_loop().time
    began = clock()
    assert await running.worker.close(force=True) == 0
    assert clock() - began < 10
    row = await rows.becomes(job.id, "queued")
    assert (row["needs_publish"], row["attempts"]) == (True, 0)


async def test_a_worker_of_many_kinds_ends_in_time_while_nats_is_frozen(
    client: JobClient, servers: TestServers, start: StartWorker, rows: Rows
) -> None:
    others = [scripted(echo, kind=kind) for kind in ("one", "two", "three")]
    running = await start(scripted(Gate().process), *others)
    job = await client.enqueue("scripted", {})
    await rows.becomes(job.id, "processing")
    os.kill(servers.nats.pid, signal.SIGSTOP)
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        assert await running.worker.close(force=True) == 0
        assert clock() - began < 14
        assert (await rows.job(job.id))["status"] == "queued"
    finally:
        os.kill(servers.nats.pid, signal.SIGCONT)


async def test_a_worker_ends_in_time_while_postgres_is_away(
    client: JobClient, start: StartWorker, rows: Rows, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, settings = through_proxy
    running = await start(scripted(Gate().process), with_settings=settings)
    job = await client.enqueue("scripted", {})
    await running.events.told("job.started")
    proxy.black_hole()
    clock = asyncio.get_running_loop().time
    began = clock()
    assert await running.worker.close(force=True) == 1
    assert clock() - began < 10
    assert (await rows.job(job.id))["worker_id"] == running.worker.id  # left to the stale rule


async def test_a_deleted_consumer_is_made_again_under_load(
    client: JobClient, settings: Settings, start: StartWorker, rows: Rows
) -> None:
    load = Load()
    jobs = await client.enqueue_many("load", [{"seconds": 0.02}] * 200)
    running = await start(load)
    await running.events.told("job.completed", times=40)
    connection = await nats.connect(settings.nats_url)
    await connection.jetstream().delete_consumer(settings.stream, "load")
    await connection.close()

    await all_completed(rows, 200)
    await running.stream_is_empty()
    await each_was_accepted_once(load, running, rows, [job.id for job in jobs])


async def test_jobs_of_the_outbox_outlive_the_stream(
    client: JobClient, settings: Settings, start: StartWorker, rows: Rows, database: Database
) -> None:
    load = Load()
    running = await start(load)
    first = await client.enqueue("load", {"seconds": 0})
    await rows.becomes(first.id, "completed")
    await running.stream_is_empty()
    made = (await running.worker._stream.state()).created
    waiting = [NewJob(new_job_id(), '{"seconds": 0}') for _ in range(50)]
    for job in waiting:  # due for the relay a moment later
        await enqueue.enqueue(database, "load", job, publish_after=1.0)
    connection = await nats.connect(settings.nats_url)
    await connection.jetstream().delete_stream(settings.stream)
    await connection.close()
    late = await client.enqueue_many("load", [{"seconds": 0}] * 50)

    await all_completed(rows, 101)

    async def is_made_again() -> None:  # all jobs may have come from the table before
        try:
            created = (await running.worker._stream.state()).created
        except NotThere:
            created = made
        assert created > made

    await eventually(is_made_again)
    await running.stream_is_empty()
    ids = {first.id} | {job.id for job in waiting} | {job.id for job in late}
    assert load.runs.total() == 101
    assert {job_id for job_id, _ in load.runs} == ids
    assert ("created", None) in [
        (event["setting"], event["was"]) for event in running.events.of("stream.changed")
    ]


async def test_a_client_without_nats_leaves_its_jobs_to_the_relay_at_once(
    make_settings: Callable[..., Settings], rows: Rows
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        own = make_settings(nats_url=f"nats://127.0.0.1:{nobody.getsockname()[1]}", statement_timeout=10.0)
        async with JobClient(own) as client:
            assert "no server listens there" in str(client.unpublished_because)
            job = await client.enqueue("load", {})
    due = "SELECT needs_publish AND publish_after <= clock_timestamp() FROM jsworker.jobs WHERE id = %s"
    assert await rows.value(due, job.id)


# --- missing at the start ---


async def test_a_server_that_is_missing_at_the_start_is_told_in_one_line_within_10_seconds(
    settings: Settings, tmp_path: Path, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, silent = through_proxy
    proxy.black_hole()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, so that nobody else listens there
        port = nobody.getsockname()[1]
        with fleet_of(settings, tmp_path) as fleet:
            without_nats = fleet.start(nats_url=f"nats://127.0.0.1:{port}")
            without_postgres = fleet.start(database_url=f"postgresql://postgres@127.0.0.1:{port}/none")
            without_answer = fleet.start(database_url=silent.database_url)
            assert await without_postgres.ends(seconds=120) == 1
            assert await without_answer.ends(seconds=120) == 1
            assert await without_nats.ends(seconds=120) == 1
    assert without_postgres.errors.strip().count("\n") == 0
    assert f"PostgreSQL at 127.0.0.1:{port}/none is not available" in without_postgres.errors
    assert without_nats.errors == (
        f"NATS at 127.0.0.1:{port} refused the connection: no server listens there\n"
    )
    assert without_answer.errors.startswith(f"PostgreSQL at 127.0.0.1:{proxy.port}/")
    assert without_answer.errors.endswith(" did not answer within 0.25 s\n")
