"""The idle poll: jobs whose message went to somebody who never answers are claimed from the table."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import nats
import pytest
from nats.js import JetStreamContext
from sqlalchemy import text

from jsworker import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import republish
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.worker.pipeline.intake import Consumer
from tests.conftest import FAST
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker, new_worker

SCAN = FAST["scan_interval"]
SLOTS = 4


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """Nothing is delivered again in a test's time."""
    return make_settings(ack_wait=120.0)


@pytest.fixture
async def swallow(
    client: JobClient, settings: Settings, js: JetStreamContext, rows: Rows
) -> Callable[[int], Any]:
    """Enqueue jobs whose messages are delivered to somebody who never answers."""
    first = new_worker(scripted(echo), settings=settings)  # makes the consumer
    await first.worker.start()
    await first.end()

    async def enqueue_and_pull(count: int) -> list[UUID]:
        ids = [(await client.enqueue(KIND, {"n": number})).id for number in range(count)]
        pull = await js.pull_subscribe_bind(consumer=KIND, stream=settings.stream)
        pulled = 0
        while pulled < count:
            try:
                pulled += len(await pull.fetch(count - pulled, timeout=30))
            except nats.errors.TimeoutError:
                raise AssertionError(f"{pulled} of {count} messages came") from None
        await pull.unsubscribe()
        return ids

    return enqueue_and_pull


class Taken:
    """The claims that a worker began without a message."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claims: list[tuple[float, UUID]] = []
        [consumer] = running.worker._components.pipeline.consumers
        take = consumer.take

        def note(job_id: UUID) -> None:
            self.claims.append((boottime(), job_id))
            take(job_id)

        monkeypatch.setattr(consumer, "take", note)


def stop_pulling(*consumers: Consumer) -> None:
    """Let these get no messages."""
    for consumer in consumers:
        consumer.puller = cast("Any", SimpleNamespace(is_pulling=False, is_dry=False))


async def test_a_job_whose_message_nobody_answers_is_claimed_after_two_scans(
    swallow: Callable[[int], Any], start: StartWorker, rows: Rows
) -> None:
    ids = await swallow(3)
    running = await start(scripted(echo))
    for job_id in ids:
        row = await rows.becomes(job_id, "completed")
        assert (row["fencing_token"], row["dispatch"], row["result"]["n"]) == (1, 1, ids.index(job_id))
        assert await rows.told(job_id) == []  # a claim like any other
        waited = (row["claimed_at"] - row["queued_at"]).total_seconds()
        assert waited >= 2 * SCAN
    assert running.events.of("message.republished") == []


async def test_a_kind_whose_consumer_does_not_work_is_taken_at_once_and_others_after_two_scans(
    start: StartWorker, rows: Rows, settings: Settings
) -> None:
    rarely = settings.model_copy(update={"scan_interval": 20.0})
    running = await start(scripted(echo), scripted(echo, kind="other"), with_settings=rarely)
    stop_pulling(running.worker._components.pipeline.of_kind[KIND])
    await rows.query(
        "INSERT INTO jsworker.jobs "
        "(id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at) "
        "SELECT gen_random_uuid(), kind, '{}', 'queued', 1, true, now() + interval '1 hour', now() "
        "FROM unnest(%s::text[]) AS kind",
        [KIND, "other"],
    )

    async def is_taken() -> None:
        done = await rows.query("SELECT kind FROM jsworker.jobs WHERE status = 'completed'")
        assert [row["kind"] for row in done] == [KIND]

    await eventually(is_taken, seconds=35.0)


OTHERS = ["other", "third"]
PATIENT = {"statement_timeout": 5.0, "heartbeat_interval": 6.0}
"""On a busy machine no search counts as slow."""


async def insert(rows: Rows, kind: str) -> None:
    """Queue a job whose message its producer may still publish."""
    await rows.query(
        "INSERT INTO jsworker.jobs "
        "(id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at) "
        "VALUES (gen_random_uuid(), %s, '{}', 'queued', 1, true, now() + interval '1 hour', now())",
        kind,
    )


async def all_completed(rows: Rows, count: int) -> None:
    async def check() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'") == count

    await eventually(check)


async def test_only_kinds_that_have_queued_jobs_are_searched(
    start: StartWorker, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = [scripted(echo, kind=kind) for kind in (KIND, *OTHERS)]
    running = await start(*processors, with_settings=settings.model_copy(update=PATIENT))
    searched: list[str] = []
    waiting = republish.waiting

    async def noted(*arguments: Any, kind: str, **rest: Any) -> list[UUID]:
        searched.append(kind)
        return await waiting(*arguments, kind=kind, **rest)

    stop_pulling(*running.worker._components.pipeline.consumers)
    passes = count_rounds(running.worker._components.table)
    await rounds_pass(passes, 1)
    monkeypatch.setattr(republish, "waiting", noted)
    await insert(rows, KIND)
    await all_completed(rows, 1)
    await rounds_pass(passes, 3)
    assert {*searched} == {KIND}
    await insert(rows, "third")
    await all_completed(rows, 2)
    assert {*searched} == {KIND, "third"}
    # A search that was reported as slow is made again, though there is nothing to find.
    [slow] = [line for line in running.worker._components.poll._lines if line.consumer.name == "other"]
    slow.search._grow(DatabaseUnavailable("it did not answer"))
    await running.events.told("worker.restored")
    assert not slow.search.is_slow


async def test_all_kinds_are_searched_if_it_takes_long_to_find_those_with_queued_jobs(
    start: StartWorker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(echo), scripted(echo, kind="other"))
    monkeypatch.setattr(republish, "QUEUED_KINDS", text("SELECT 'no' AS kind FROM pg_sleep(600)"))
    stop_pulling(*running.worker._components.pipeline.consumers)
    for kind in (KIND, "other"):
        await insert(rows, kind)
    await all_completed(rows, 2)

    async def is_told() -> None:
        told = [event["what"] for event in running.events.of("worker.degraded")]
        assert "looking for kinds with waiting jobs" in told

    await eventually(is_told)


async def test_the_report_of_a_refused_search_ends_though_no_job_of_its_kind_is_queued(
    start: StartWorker, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = settings.model_copy(update=PATIENT)
    running = await start(scripted(echo), scripted(echo, kind="other"), with_settings=patient)
    waiting = republish.waiting

    async def refuse(*arguments: Any, kind: str, **rest: Any) -> list[UUID]:
        if kind == "other":
            raise RowRefused("P0001", None)
        return await waiting(*arguments, kind=kind, **rest)

    stop_pulling(*running.worker._components.pipeline.consumers)
    monkeypatch.setattr(republish, "waiting", refuse)
    await insert(rows, "other")
    await running.events.told("worker.degraded")
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'cancelled', needs_publish = false, publish_after = NULL, "
        "finished_at = now()"
    )
    monkeypatch.setattr(republish, "waiting", waiting)
    await running.events.told("worker.restored")
    [told] = running.events.of("worker.restored")
    assert told["what"] == "looking for waiting jobs of other"


BUSY: dict[str, Any] = {"concurrency": SLOTS, "scan_interval": 20.0}
"""For a worker to which messages come all the time: no pause of a busy machine is as long as a scan."""


class Order:
    """The jobs that were run, in this order; each keeps its slot for a while."""

    def __init__(self) -> None:
        self.ran: list[UUID] = []

    async def process(self, job: Job[Any]) -> None:
        self.ran.append(job.id)
        await asyncio.sleep(0.05)  # the work itself


async def begins(order: Order, count: int) -> None:
    async def enough() -> None:
        assert len(order.ran) >= count

    await eventually(enough)


async def enqueue_behind(client: JobClient, rows: Rows, count: int) -> list[UUID]:
    """Enqueue jobs whose messages are in the stream, as old as all others."""
    ids = [job.id for job in await client.enqueue_many(KIND, [{}] * count)]
    await client.publish_pending()

    async def all_are_marked() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0

    await eventually(all_are_marked)
    await rows.query("UPDATE jsworker.jobs SET queued_at = clock_timestamp() - interval '1 minute'")
    return ids


async def test_half_of_the_slots_of_a_busy_worker_are_for_such_jobs(
    client: JobClient, swallow: Callable[[int], Any], start: StartWorker, rows: Rows, settings: Settings
) -> None:
    forgotten = set(await swallow(40))
    behind = await enqueue_behind(client, rows, 400)
    order = Order()
    running = await start(scripted(order.process), with_settings=settings.model_copy(update=BUSY))
    poll = running.worker._components.poll
    await begins(order, 1)
    await poll.step()
    await poll.step()  # what was delivered before the first look was so a scan ago in this one

    async def all_have_run() -> None:
        assert {*order.ran} == {*forgotten, *behind}

    await eventually(all_have_run, seconds=60)
    assert len(order.ran) == len(forgotten) + len(behind)
    places = [place for place, job_id in enumerate(order.ran) if job_id in forgotten]
    # Neither after the others, which are as old and whose messages come all the time, nor instead of them.
    assert places[-1] < 0.75 * len(order.ran)
    assert places[-1] - places[0] > 1.5 * len(forgotten)


async def test_a_busy_worker_takes_such_jobs_one_after_the_other_until_none_is_left(
    client: JobClient,
    swallow: Callable[[int], Any],
    start: StartWorker,
    rows: Rows,
    make_settings: Callable[..., Settings],
) -> None:
    """Not as many as one scan finds: its own scans are rare here, and the next one comes too late."""
    rarely = make_settings(
        concurrency=4,
        scan_interval=120.0,
        stale_threshold=240.0,
        crash_threshold=None,
        ack_wait=600.0,
        heartbeat_interval=15.0,
        statement_timeout=10.0,  # on a busy machine, too, no search is given up
    )
    forgotten = await swallow(100)
    behind = await enqueue_behind(client, rows, 100)
    await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 hour'")
    order = Order()
    running = await start(scripted(order.process), with_settings=rarely)
    await rows.becomes(behind[0], "completed")
    poll = running.worker._components.poll
    await poll.step()  # what was delivered before it was so a scan ago in the next

    async def all_are_taken() -> None:
        assert all([(await rows.job(job_id))["status"] == "completed" for job_id in forgotten])

    for _ in range(3):  # one finds 24 at most; on a busy machine searches rest for up to half a minute
        await poll.step()
        with suppress(AssertionError):
            await eventually(all_are_taken, seconds=40.0)
            break
    await all_are_taken()


async def test_a_deep_backlog_is_left_to_its_messages(
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await start(scripted(echo, kind="other"))  # makes the stream
    ids = await enqueue_behind(client, rows, 200)
    order = Order()
    running = await start(scripted(order.process), with_settings=settings.model_copy(update=BUSY))
    taken = Taken(running, monkeypatch)
    poll = running.worker._components.poll
    [line] = poll._lines
    for count in range(20, len(ids), 20):
        await begins(order, count)
        await poll.step()

        async def all_delivered_are_claimed() -> None:  # as they are within a scan
            waiting = "SELECT count(*) FROM jsworker.jobs WHERE status = 'queued' AND stream_seq <= %s"
            assert await rows.value(waiting, line._delivered) == 0

        await eventually(all_delivered_are_claimed)
    await begins(order, len(ids))
    assert sorted(order.ran) == sorted(ids)
    # In turn: of those that begin together, one a slot, any may be first. What was claimed ahead, and then
    # handed back because this process stood still for a second, is behind the others.
    released = await rows.query("SELECT job_id FROM jsworker.job_events WHERE event = 'released'")
    behind = {row["job_id"] for row in released}
    ran = [job_id for job_id in order.ran if job_id not in behind]
    in_turn = [job_id for job_id in ids if job_id not in behind]
    assert all(abs(ran.index(job_id) - place) < SLOTS for place, job_id in enumerate(in_turn))
    assert taken.claims == []


async def test_rows_that_postgresql_refuses_are_not_tried_again_and_again(
    swallow: Callable[[int], Any],
    start: StartWorker,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *refused, last = await swallow(31)
    constraint = f"CHECK (NOT (status = 'processing' AND id <= '{refused[-1]}'))"
    await rows.query(f"ALTER TABLE jsworker.jobs ADD CONSTRAINT test_refused {constraint}")
    running = await start(scripted(echo), with_settings=settings.model_copy(update={"concurrency": 1}))
    taken = Taken(running, monkeypatch)
    scans = count_rounds(running.worker._components.repairs)
    await rows.becomes(last, "completed")  # they stand before it
    await rounds_pass(scans, 4)
    tries = [job_id for _, job_id in taken.claims if job_id in refused]
    assert len(refused) <= len(tries) <= (len(scans) + 2) * len(refused)


async def test_hundreds_of_rows_that_are_set_aside_keep_no_later_one_from_its_turn(
    swallow: Callable[[int], Any], start: StartWorker, rows: Rows, database: Database, settings: Settings
) -> None:
    """More than a scan puts off: the search itself must step past them."""
    *refused, last = await swallow(501)
    constraint = f"CHECK (NOT (status = 'processing' AND id <= '{refused[-1]}'))"
    await rows.query(f"ALTER TABLE jsworker.jobs ADD CONSTRAINT test_refused {constraint}")
    error = RowRefused("23514", "test_refused")
    await RefusedRows(database, worker_id=None).note("claim", [(job_id, error) for job_id in refused])
    await start(scripted(echo), with_settings=settings.model_copy(update={"concurrency": 1}))
    await rows.becomes(last, "completed")


async def test_a_worker_without_free_slots_takes_nothing(
    swallow: Callable[[int], Any],
    start: StartWorker,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [forgotten] = await swallow(1)
    # However long the start takes: the other job comes first.
    await rows.query("UPDATE jsworker.jobs SET queued_at = clock_timestamp() + interval '1 hour'")
    gate = Gate()
    running = await start(
        scripted(gate.process), with_settings=settings.model_copy(update={"concurrency": 1})
    )
    taken = Taken(running, monkeypatch)
    async with JobClient(settings) as client:
        own = await client.enqueue(KIND, {})
    assert (await gate.met()).id == own.id
    await rows.query("UPDATE jsworker.jobs SET queued_at = clock_timestamp() - interval '1 minute'")
    await rounds_pass(count_rounds(running.worker._components.repairs), 4)
    assert taken.claims == []
    gate.open()
    await rows.becomes(forgotten, "completed")
    assert [job_id for _, job_id in taken.claims] == [forgotten]
