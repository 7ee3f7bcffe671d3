"""Somebody else's open transaction holds the lock of one row: that job waits, and nobody else does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest
from psycopg.sql import SQL, Identifier
from sqlalchemy.engine import make_url

from jsworker import JobClient, Limit, Retry
from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.claim import Taken
from jsworker.worker.pipeline import settling
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.intake import Consumer
from jsworker.worker.supervision import DeadOwner
from tests.support.polling import eventually
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

HELD_SECONDS = 2.5
"""Longer than a statement may take: whoever waits for the lock takes the database for silent."""

pytestmark = pytest.mark.hurried


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    return make_settings(
        heartbeat_interval=2.5,
        statement_timeout=2.0,
        crash_threshold=None,
        stale_threshold=60.0,
        ack_wait=90.0,
    )


@pytest.fixture
def holder(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection


@pytest.fixture(autouse=True)
async def lock_timeout(request: pytest.FixtureRequest, rows: Rows, database_url: str) -> AsyncIterator[None]:
    """An administrator's own limit, where a test asks for it: PostgreSQL ends what waits for a lock."""
    name = Identifier(make_url(database_url).database or "")
    seconds = getattr(request, "param", None)
    if seconds is not None:
        await rows.connection.execute(
            SQL("ALTER DATABASE {} SET lock_timeout = {}").format(name, f"{seconds}s")
        )
    yield
    await rows.connection.execute(SQL("ALTER DATABASE {} RESET lock_timeout").format(name))


with_and_without_lock_timeout = pytest.mark.parametrize("lock_timeout", [None, 1], indirect=True)


def lock(holder: psycopg.Connection[Any], *job_ids: Any) -> None:
    rows = holder.execute("SELECT FROM jsworker.jobs WHERE id = ANY(%s) FOR UPDATE", [list(job_ids)])
    assert rows.rowcount == len(job_ids)


def lock_key(holder: psycopg.Connection[Any], kind: str, key: str) -> None:
    rows = holder.execute("SELECT FROM jsworker.limits WHERE (kind, key) = (%s, %s) FOR UPDATE", [kind, key])
    assert rows.rowcount == 1


def never_silent(running: Running) -> bool:
    return not [event for event in running.events.of("worker.degraded") if event["what"] == "postgresql"]


async def test_a_queued_job_behind_a_lock_keeps_its_message_and_keeps_nobody_waiting(
    client: JobClient, rows: Rows, start: StartWorker, holder: psycopg.Connection[Any]
) -> None:
    locked, *others = [(await client.enqueue("scripted", {"n": n})).id for n in range(20)]
    lock(holder, locked)
    running = await start(scripted(echo))
    await running.events.told("job.completed", times=len(others))
    await asyncio.sleep(HELD_SECONDS)
    later = await client.enqueue("scripted", {})
    await rows.becomes(later.id, "completed")
    assert (await rows.job(locked))["status"] == "queued"
    assert never_silent(running)
    holder.rollback()
    row = await rows.becomes(locked, "completed")
    assert (row["fencing_token"], row["attempts"], row["dispatch"]) == (1, 1, 1)
    assert running.events.of("job.skipped") == []
    await running.stream_is_empty()


async def test_the_claim_of_a_row_that_is_never_unlocked_waits_for_its_turn(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a row that many producers debounce: tries that do not wait would nearly always find it locked."""
    claim = claims.claim

    async def unlocked_while_it_waits(*arguments: Any, **rest: Any) -> Taken:
        if rest.get("waits"):
            asyncio.get_running_loop().call_later(0.03, holder.rollback)
        return await claim(*arguments, **rest)

    monkeypatch.setattr(claims, "claim", unlocked_while_it_waits)
    job = await client.enqueue("scripted", {})
    lock(holder, job.id)
    running = await start(scripted(echo))
    row = await rows.becomes(job.id, "completed")
    assert (row["fencing_token"], row["attempts"], row["dispatch"]) == (1, 1, 1)
    assert never_silent(running)
    assert not running.worker._context.in_flight.is_awaiting_lock


@with_and_without_lock_timeout
async def test_a_key_whose_row_is_locked_waits_alone(
    client: JobClient, rows: Rows, start: StartWorker, holder: psycopg.Connection[Any]
) -> None:
    running = await start(scripted(echo, kind="limited", limit=Limit(2)), scripted(echo))
    lock_key(holder, "limited", "")
    waiting = [job.id for job in await client.enqueue_many("limited", [{}] * 5)]
    await asyncio.sleep(2 * HELD_SECONDS)
    later = await client.enqueue("scripted", {})
    await rows.becomes(later.id, "completed")
    assert never_silent(running)
    assert {(await rows.job(job_id))["status"] for job_id in waiting} == {"queued"}
    holder.rollback()
    for job_id in waiting:
        await rows.becomes(job_id, "completed")


@with_and_without_lock_timeout
async def test_a_job_pauses_its_key_as_soon_as_that_is_unlocked(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "_LATE_SECONDS", 0.0)
    gate = Gate()

    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        raise Retry(3600, "429", pause="key")

    running = await start(scripted(process, limit=Limit(1)))
    job = await client.enqueue("scripted", {})
    await gate.met()
    lock_key(holder, "scripted", "")
    gate.open()
    [complaint] = await running.events.told("worker.degraded")
    assert complaint["what"] == "outcomes"
    assert complaint["reason"].startswith(f"the outcome of job {job.id} could not be written for 0 s: ")
    assert (await rows.job(job.id))["status"] == "processing"  # its key is paused before its slot falls free
    holder.rollback()
    await running.events.told("worker.restored")

    async def is_told() -> None:  # the next look tells of the kind, too
        told = [event["job_id"] for event in running.events.of("limit.paused") if "job_id" in event]
        assert told == [str(job.id)]

    await eventually(is_told)
    await rows.becomes(job.id, "scheduled")
    [limit] = await client.limits.list()
    assert (limit["paused_by"], limit["reason"]) == (running.worker.id, f"job {job.id}: 429")
    assert never_silent(running)


@pytest.mark.parametrize("from_the_table", [False, True])
async def test_hundreds_of_locked_rows_leave_room_to_the_other_jobs_of_their_kind(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    settings: Settings,
    *,
    from_the_table: bool,
) -> None:
    locked = [job.id for job in await client.enqueue_many("scripted", [{}] * 300)]
    for job_id in locked:
        await eventually(partial(marked, rows, job_id))
    if from_the_table:  # as if their messages were lost: the idle poll finds them
        await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 hour'")
    lock(holder, *locked)
    running = await start(scripted(echo), with_settings=settings.model_copy(update={"concurrency": 10}))
    healthy = [job.id for job in await client.enqueue_many("scripted", [{}] * 100)]
    for job_id in healthy:
        await rows.becomes(job_id, "completed", seconds=180.0)
    assert never_silent(running)
    assert (await rows.job(locked[0]))["status"] == "queued"
    holder.rollback()
    for job_id in locked:
        assert (await rows.becomes(job_id, "completed", seconds=120.0))["fencing_token"] == 1


async def test_a_row_that_was_locked_for_a_moment_is_claimed_without_its_message_coming_again(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    make_settings: Callable[..., Settings],
    *,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As relays lock rows that they mark: jobs must not wait for their messages because of that."""
    calm = make_settings(
        heartbeat_interval=25.0,
        statement_timeout=20.0,
        crash_threshold=None,
        stale_threshold=600.0,
        scan_interval=300.0,
        ack_wait=1300.0,
    )
    claim, put_off = Consumer.claim, Consumer._put_off
    claims, waiting = 0, []

    async def counted(consumer: Consumer, ids: Sequence[UUID]) -> list[Run]:
        nonlocal claims
        answer = await claim(consumer, ids)
        claims += 1
        if claims == 2:
            holder.rollback()
        return answer

    def noted(consumer: Consumer, ids: Iterable[UUID], *seconds: float) -> None:
        given = list(ids)
        waiting.extend(given)
        put_off(consumer, given, *seconds)

    monkeypatch.setattr(Consumer, "claim", counted)
    monkeypatch.setattr(Consumer, "_put_off", noted)
    job = await client.enqueue("scripted", {})
    await eventually(lambda: marked(rows, job.id))
    lock(holder, job.id)
    await start(scripted(echo), with_settings=calm)
    await rows.becomes(job.id, "completed", seconds=60.0)
    assert claims == 3
    assert waiting == []


async def test_a_message_is_not_acknowledged_while_its_row_is_locked(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    make_settings: Callable[..., Settings],
) -> None:
    """Without sweeps, which would find the row: the message is its only way to a worker."""
    rarely = make_settings(
        heartbeat_interval=2.5,
        statement_timeout=2.0,
        crash_threshold=None,
        stale_threshold=600.0,
        scan_interval=300.0,
        ack_wait=1300.0,
    )
    job = await client.enqueue("scripted", {})
    await eventually(lambda: marked(rows, job.id))
    lock(holder, job.id)
    running = await start(scripted(echo), with_settings=rarely)
    await asyncio.sleep(1.0)
    assert (await running.worker._stream.state()).messages == 1
    holder.rollback()
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


@pytest.fixture
def calm(make_settings: Callable[..., Settings]) -> Settings:
    """No heartbeat but the first, and no sweep."""
    return make_settings(
        heartbeat_interval=250.0,
        statement_timeout=2.0,
        crash_threshold=None,
        stale_threshold=6000.0,
        scan_interval=3000.0,
        ack_wait=13000.0,
    )


LOCKS_OF_WORKERS = [
    "SELECT FROM jsworker.workers FOR UPDATE",
    "LOCK TABLE jsworker.workers IN SHARE MODE",  # as CREATE INDEX does
]


async def registered(rows: Rows) -> None:
    """Wait until the only worker has its row."""

    async def is_there() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.workers") == 1

    await eventually(is_there)


@with_and_without_lock_timeout
@pytest.mark.parametrize("statement", LOCKS_OF_WORKERS, ids=["row", "table"])
async def test_a_worker_whose_own_row_is_locked_complains_and_goes_on(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    statement: LiteralString,
) -> None:
    running = await start(scripted(echo))
    await registered(rows)
    holder.execute(statement)
    [complaint] = await running.events.told("worker.degraded")
    assert complaint["what"] == "this worker's row of jsworker.workers"
    await rows.becomes((await client.enqueue("scripted", {})).id, "completed")
    await asyncio.sleep(2 * HELD_SECONDS)
    assert never_silent(running)
    assert running.events.of("heartbeat.failed") == []
    seen = await rows.value("SELECT last_seen_at FROM jsworker.workers")
    holder.rollback()
    [restored] = await running.events.told("worker.restored")
    assert restored["what"] == complaint["what"]
    assert await rows.value("SELECT last_seen_at FROM jsworker.workers") > seen


async def test_a_probe_finds_a_database_that_answers_while_the_workers_own_row_is_locked(
    start: StartWorker, holder: psycopg.Connection[Any], calm: Settings
) -> None:
    running = await start(scripted(echo), with_settings=calm)
    health, heartbeat = running.worker._context.health, running.worker._components.heartbeat

    async def is_heard() -> None:
        assert heartbeat.answered_for() > 0

    await eventually(is_heard)  # the first heartbeat, the only one, has ended
    holder.execute(LOCKS_OF_WORKERS[0])
    health.failed(DatabaseUnavailable("away"))

    async def is_up() -> None:
        assert health.up

    await eventually(is_up)
    holder.rollback()


@with_and_without_lock_timeout
async def test_the_row_of_a_dead_owner_is_marked_as_soon_as_it_is_unlocked(
    rows: Rows, start: StartWorker, holder: psycopg.Connection[Any], calm: Settings
) -> None:
    running = await start(scripted(echo), with_settings=calm)
    await registered(rows)
    await rows.query(
        'INSERT INTO jsworker.workers SELECT (jsonb_populate_record(w, \'{"id": "gone"}\')).*'
        " FROM jsworker.workers AS w"
    )
    holder.execute("SELECT FROM jsworker.workers WHERE id = 'gone' FOR UPDATE")
    running.worker._components.dead_owners.begin(DeadOwner("gone", "it has ended", boottime()))
    await asyncio.sleep(2 * HELD_SECONDS)
    assert never_silent(running)
    holder.rollback()

    async def is_marked() -> None:
        assert await rows.value("SELECT state FROM jsworker.workers WHERE id = 'gone'") == "stopped"

    await eventually(is_marked)


async def marked(rows: Rows, job_id: Any) -> None:
    assert not (await rows.job(job_id))["needs_publish"]


async def test_large_results_do_not_wait_behind_outcomes_whose_rows_are_locked(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    settings: Settings,
) -> None:
    gate = Gate()
    running = await start(
        scripted(gate.process), with_settings=settings.model_copy(update={"concurrency": 40})
    )
    locked = [job.id for job in await client.enqueue_many("scripted", [{}] * 30)]  # twenty seconds of waiting
    for _ in locked:
        await gate.met()
    lock(holder, *locked)
    gate.open()
    await asyncio.sleep(HELD_SECONDS)  # all of them wait for their lock alone
    large = await client.enqueue("scripted", {"text": "x" * 100_000})
    await rows.becomes(large.id, "completed")
    assert never_silent(running)
    assert (await rows.job(locked[0]))["status"] == "processing"
    holder.rollback()
    for job_id in locked:
        await rows.becomes(job_id, "completed")


@with_and_without_lock_timeout
async def test_outcomes_behind_locks_keep_nobody_waiting_and_are_reported(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    holder: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "_LATE_SECONDS", 0.0)
    gate = Gate()
    running = await start(scripted(gate.process))
    jobs = [job.id for job in await client.enqueue_many("scripted", [{}] * 8)]
    for _ in jobs:
        await gate.met()
    locked, others = jobs[:5], jobs[5:]
    lock(holder, *locked)
    gate.open()
    await running.events.told("job.completed", times=len(others))
    complaint = (await running.events.told("worker.degraded"))[0]
    assert complaint["what"] == "outcomes"
    assert any(f"the outcome of job {job_id} could not" in complaint["reason"] for job_id in locked)
    later = await client.enqueue("scripted", {})
    await rows.becomes(later.id, "completed")
    assert never_silent(running)
    assert running.events.of("worker.restored") == []
    holder.rollback()
    await running.events.told("worker.restored")
    for job_id in locked:
        row = await rows.becomes(job_id, "completed")
        assert (row["fencing_token"], row["attempts"]) == (1, 1)
    assert not {"job.lost", "job.released", "job.fenced"} & set(running.events.names())


@with_and_without_lock_timeout
async def test_a_job_whose_row_is_locked_reports_without_an_error(
    client: JobClient, rows: Rows, start: StartWorker, holder: psycopg.Connection[Any]
) -> None:
    gate = Gate()

    async def process(job: Job[Any]) -> None:
        await gate.process(job)
        await job.update_progress("behind the lock")
        await job.save_checkpoint({"at": 1})

    running = await start(scripted(process))
    job = await client.enqueue("scripted", {})
    await gate.met()
    lock(holder, job.id)
    gate.open()
    await asyncio.sleep(2 * HELD_SECONDS)
    assert never_silent(running)
    holder.rollback()
    row = await rows.becomes(job.id, "completed")
    assert (row["attempts"], row["last_error"]) == (1, None)


async def test_a_locked_member_of_a_cancelled_workflow_keeps_only_its_own_workflow_waiting(
    client: JobClient, rows: Rows, start: StartWorker, holder: psycopg.Connection[Any]
) -> None:
    async with client.workflow("cancelled") as cancelled:
        cancelled.batch("elsewhere", [{}] * 3)
    async with client.workflow("left") as left:  # by a worker that died before it had looked after the batch
        left.job("other", {})
        left.job("scripted", {}, after="other", on_failure="run")
    found = await rows.query("SELECT id FROM jsworker.jobs WHERE kind = 'elsewhere' ORDER BY id")
    members = [row["id"] for row in found]
    lock(holder, members[0])
    await rows.query(
        "UPDATE jsworker.workflows SET cancelled_at = now(), revision = revision + 1 WHERE name = 'cancelled'"
    )
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now(), needs_publish = false"
        " WHERE kind = 'other'"
    )
    running = await start(scripted(echo))
    for job_id in members[1:]:
        await rows.becomes(job_id, "cancelled")
    await left.result(timeout=60)
    await asyncio.sleep(2 * HELD_SECONDS)
    assert never_silent(running)
    assert (await rows.job(members[0]))["status"] == "queued"
    holder.rollback()
    await rows.becomes(members[0], "cancelled")

    async def ended() -> None:
        assert (await client.workflows.get(cancelled.id))["status"] == "cancelled"

    await eventually(ended)
