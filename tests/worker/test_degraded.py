"""One server or both go away: work goes on as far as it can, and is back at full speed at once."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from jsworker.stream.jetstream import Stream
from jsworker.worker.pipeline.in_flight import Phase
from tests.stream.nats_server import NatsServer
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import Gate, Scripted, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

LOAD = "load"
TIMES: dict[str, Any] = {
    "statement_timeout": 1.0,
    "heartbeat_interval": 1.2,
    "crash_threshold": None,
    "stale_threshold": 60.0,
    "ack_wait": 120.0,
}
"""For outages that the test makes: a database that a busy machine slows down is not taken for silent."""

pytestmark = [pytest.mark.hurried, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server that the test may stop."""
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
def settings(make_settings: Callable[..., Settings], nats_server: NatsServer) -> Settings:
    return make_settings(nats_url=nats_server.url, **TIMES)


@pytest.fixture
async def through_proxy(database_url: str, settings: Settings) -> AsyncIterator[tuple[Proxy, Settings]]:
    """A proxy before the database, and settings that lead through it."""
    async with proxied(database_url) as (proxy, url):
        yield proxy, settings.model_copy(update={"database_url": url})


class Load:
    """Jobs that take the payload's ``seconds``, and how often each was run at each token."""

    def __init__(self) -> None:
        self.runs: Counter[tuple[UUID, int]] = Counter()

    def processor(self) -> Scripted:
        return scripted(self.process, kind=LOAD)

    async def process(self, job: Job[Any]) -> None:
        self.runs[job.id, job.fencing_token] += 1
        await asyncio.sleep(job.payload["seconds"])


async def all_completed(rows: Rows) -> None:
    async def check() -> None:
        counts = await rows.query("SELECT status, count(*) FROM jsworker.jobs GROUP BY status")
        assert [row["status"] for row in counts] == ["completed"], counts

    await eventually(check)


async def stream_is_empty(running: Running) -> None:
    """Wait until no message is left; one that was on its way in an outage comes again after ``ack_wait``."""

    async def empty() -> None:
        stream: Stream = running.worker._stream
        assert stream.connected
        assert (await stream.state()).messages == 0

    await eventually(empty, seconds=1.5 * TIMES["ack_wait"])


def what(running: Running, name: str) -> set[str]:
    return {event["what"] for event in running.events.of(name)}


@pytest.mark.usefixtures("patient")
async def test_without_nats_work_goes_on_and_is_answered_for_later(
    client: JobClient, nats_server: NatsServer, start: StartWorker, rows: Rows, database: Database
) -> None:
    gate, load = Gate(), Load()
    # The database is there, so nothing need be quick; a heartbeat hands back what was claimed ahead before.
    settings = client._settings.model_copy(update=TIMES | {"concurrency": 4, "heartbeat_interval": 20.0})
    running = await start(scripted(gate.process), load.processor(), with_settings=settings)
    at_work = await client.enqueue_many("scripted", [{"n": number} for number in range(2)])
    for _ in range(2):
        await gate.met()
    await nats_server.stop()
    await eventually(lambda: misses(running, "nats"))  # a consumer may be told of before
    ids = {(await client.enqueue(LOAD, {"seconds": 0.01})).id for _ in range(10)}
    stored = [NewJob(new_job_id(), '{"seconds": 0.01}') for _ in range(10)]
    for new in stored:
        await enqueue.enqueue(database, LOAD, new, publish_after=0.0)
    ids |= {new.id for new in stored}
    gate.open()
    await all_completed(rows)  # without NATS
    assert not running.worker._stream.connected
    for job in at_work:
        assert (await rows.job(job.id))["fencing_token"] == 1
    last = await client.enqueue(LOAD, {"seconds": 0.0})
    await nats_server.start()

    await rows.becomes(last.id, "completed")
    await stream_is_empty(running)
    assert load.runs == {(job_id, 1): 1 for job_id in {*ids, last.id}}
    assert gate.waiting == 0
    assert await rows.query("SELECT * FROM jsworker.job_events") == []
    counts = await rows.query("SELECT DISTINCT attempts, stalls, errors FROM jsworker.jobs")
    assert counts == [{"attempts": 1, "stalls": 0, "errors": 0}]
    assert "nats" in what(running, "worker.restored")
    await running.worker.close()


@pytest.mark.usefixtures("patient")
async def test_without_nats_messages_that_cannot_come_keep_no_turns(
    client: JobClient, nats_server: NatsServer, start: StartWorker, rows: Rows
) -> None:
    gate = Gate()
    await client.enqueue_many("scripted", [{}] * 3, priority="high")
    settings = client._settings.model_copy(update=TIMES | {"concurrency": 1})
    running = await start(scripted(gate.process, priority="high"), with_settings=settings)
    pipeline = running.worker._components.pipeline
    pipeline.slots._mean_seconds["scripted"] = 100.0  # nothing is claimed ahead
    await gate.met()
    [high] = [each for each in pipeline.consumers if each.priority == 0]

    async def it_has_more() -> None:  # the first job may have come from the table, before its message
        assert high.has_more

    await eventually(it_has_more)
    await nats_server.stop()
    await eventually(lambda: misses(running, "nats"))
    await client.enqueue_many("scripted", [{}] * 40)
    gate.open()
    await all_completed(rows)  # without NATS
    assert not running.worker._stream.connected
    await running.worker.close()


async def handed_on(rows: Rows, job_id: UUID) -> list[str]:
    """Return what the timeline tells but for skips: of a message that came again, on a busy machine.

    Who claims more than it has slots for hands some back, unbegun; the first claim is told by the row.
    """
    return [event for event in await rows.told(job_id) if event != "skipped"]


async def test_after_two_thresholds_without_a_database_nobody_has_stalled(
    client: JobClient, start: StartWorker, rows: Rows, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, settings = through_proxy
    load = Load()
    # Three owners: whoever is back first must not take the others for dead.
    workers = [
        await start(load.processor(), with_settings=settings.model_copy(update={"concurrency": 2}))
        for _ in range(3)
    ]
    long = [job.id for job in await client.enqueue_many(LOAD, [{"seconds": 3600}] * 6)]

    async def all_run() -> None:
        assert {(job_id, 1) for job_id in long} == set(load.runs)

    await eventually(all_run)
    waiting = [job.id for job in await client.enqueue_many(LOAD, [{"seconds": 0.0}] * 6)]
    owners = await rows.query("SELECT DISTINCT worker_id FROM jsworker.jobs WHERE status = 'processing'")
    assert len(owners) == 3

    async def all_are_published() -> None:
        assert (await workers[0].worker._stream.state()).messages == len(long) + len(waiting)

    await eventually(all_are_published)  # else a relay that is cut off may keep some of them for itself
    proxy.black_hole()
    for each in workers:
        await each.events.told("heartbeat.failed")
        for run in each.worker._context.in_flight.runs.values():
            run.beaten_at -= 2 * settings.stale_threshold

    async def runs_are_stopped() -> None:
        for each in workers:
            assert all(run.phase is Phase.SETTLING for run in each.worker._context.in_flight.runs.values())

    await eventually(runs_are_stopped)
    await rows.query(
        "UPDATE jsworker.jobs SET last_activity_at = last_activity_at - make_interval(secs => %s)",
        2 * settings.stale_threshold,
    )
    # Nothing was answered for that was not committed.
    assert (await workers[0].worker._stream.state()).messages == len(long) + len(waiting)
    assert load.runs.total() == len(long)
    await rows.query("UPDATE jsworker.jobs SET payload = '{\"seconds\": 0.01}'")
    proxy.restore()

    await all_completed(rows)
    await stream_is_empty(workers[0])
    assert await rows.query("SELECT * FROM jsworker.job_events WHERE event IN ('reset', 'rejected')") == []
    counts = await rows.query("SELECT DISTINCT attempts, stalls, errors FROM jsworker.jobs")
    assert counts == [{"attempts": 1, "stalls": 0, "errors": 0}]
    for job_id in long:
        first, *rest = await handed_on(rows, job_id)
        assert first == "fenced"
        assert rest == ["released", "claimed"] * max(1, len(rest) // 2)
    for job_id in waiting:
        told = await handed_on(rows, job_id)
        assert told == ["released", "claimed"] * (len(told) // 2)
    assert set(load.runs.values()) == {1}
    for each in workers:
        assert "postgresql" in what(each, "worker.degraded") & what(each, "worker.restored")
        assert each.events.of("job.stalled") == []
        await each.worker.close()


async def test_who_is_back_first_takes_nothing_from_those_who_follow(
    client: JobClient, start: StartWorker, rows: Rows, settings: Settings, database_url: str
) -> None:
    gate = Gate()
    async with proxied(database_url) as (early, early_url), proxied(database_url) as (late, late_url):
        first = await start(
            scripted(gate.process, kind="other"),
            with_settings=settings.model_copy(update={"database_url": early_url}),
        )
        follower = await start(
            scripted(gate.process), with_settings=settings.model_copy(update={"database_url": late_url})
        )
        job = await client.enqueue("scripted", {})
        await gate.met()
        for proxy in (early, late):
            proxy.black_hole()
        for each in (first, follower):
            await each.events.told("heartbeat.failed")
        await rows.query("UPDATE jsworker.jobs SET last_activity_at = last_activity_at - interval '1 hour'")
        early.restore()
        await first.events.told("worker.restored")

        async def looks_again() -> None:
            assert job.id in first.worker._components.late._seen

        await eventually(looks_again)
        await rounds_pass(count_rounds(first.worker._components.scans), 2)
        assert (await rows.job(job.id))["status"] == "processing"
        late.restore()

        async def beats_again() -> None:
            assert await rows.silence(job.id) < settings.stale_threshold

        await eventually(beats_again)
        gate.open()
        assert (await rows.becomes(job.id, "completed"))["fencing_token"] == 1
        assert await rows.told(job.id) == []
        for each in (first, follower):
            await each.worker.close()


async def test_failed_heartbeats_of_each_outage_are_counted(
    start: StartWorker, through_proxy: tuple[Proxy, Settings]
) -> None:
    proxy, settings = through_proxy
    running = await start(scripted(Load().process), with_settings=settings)
    for _ in range(2):
        failed = len(running.events.of("heartbeat.failed"))
        proxy.cut()
        await running.events.told("heartbeat.failed", times=failed + 2)
        proxy.restore()
        answered_at = running.worker._components.heartbeat.answered_at

        async def is_answered(before: float = answered_at) -> None:
            assert running.worker._components.heartbeat.answered_at > before

        await eventually(is_answered)
    counts = [event["in_a_row"] for event in running.events.of("heartbeat.failed")]
    assert counts[:2] == [1, 2]
    assert counts[2:].count(1) >= 1
    assert all(later in {1, count + 1} for count, later in pairwise(counts))


async def test_with_both_back_work_goes_on_at_once(
    client: JobClient,
    nats_server: NatsServer,
    start: StartWorker,
    rows: Rows,
    through_proxy: tuple[Proxy, Settings],
) -> None:
    proxy, settings = through_proxy
    load = Load()
    running = await start(load.processor(), with_settings=settings.model_copy(update={"concurrency": 2}))
    before = [job.id for job in await client.enqueue_many(LOAD, [{"seconds": 0.1}] * 60)]
    await running.events.told("job.completed", times=6)
    proxy.cut()
    await eventually(lambda: misses(running, "postgresql"))
    # An answer that is still on its way when the server stops is asked for again: after ack_wait, a minute.
    assert await running.worker._stream.flush()
    await nats_server.stop()
    await eventually(lambda: misses(running, "postgresql", "nats"))

    async def stands_still() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'") < len(before)
        assert all(run.phase is Phase.SETTLING for run in running.worker._context.in_flight.runs.values())
        assert not running.worker._context.in_flight.claiming

    await eventually(stands_still)
    last = await client.enqueue(LOAD, {"seconds": 0.0})
    finished = set(load.runs)
    await nats_server.start()
    proxy.restore()

    async def a_new_job_is_completed() -> None:
        done = await rows.query("SELECT id FROM jsworker.jobs WHERE status = 'completed'")
        assert {row["id"] for row in done} - {job_id for job_id, _ in finished}

    await eventually(a_new_job_is_completed)
    await all_completed(rows)
    await stream_is_empty(running)
    assert {job_id for job_id, _ in load.runs} == {*before, last.id}
    assert set(load.runs.values()) == {1}
    stalls = "SELECT sum(stalls) FROM jsworker.jobs"
    assert await rows.value(stalls) == 0
    await running.worker.close()


async def misses(running: Running, *servers: str) -> None:
    assert {*servers} <= what(running, "worker.degraded")


async def test_a_worker_that_may_not_ask_for_messages_says_so(
    start: StartWorker, settings: Settings, nats_server: NatsServer
) -> None:
    permissions = 'permissions: { publish: { deny: "$JS.API.CONSUMER.MSG.NEXT.>" } }'
    user = f"{{ user: worker, password: secret, {permissions} }}"
    nats_server.configure(f"authorization {{ users: [{user}] }}\nno_auth_user: worker")
    await nats_server.restart()
    running = await start(scripted(Gate().process, kind=LOAD), with_settings=settings)

    async def named() -> None:
        status = running.worker.status()
        assert status is not None
        assert not status.readiness.pulling
        subject = f"$js.api.consumer.msg.next.{settings.stream.lower()}.{LOAD}"
        denial = f'permissions violation for publish to "{subject}"'
        assert status.readiness.problems == [f"not pulled: {LOAD} ({denial})"]

    await eventually(named)
