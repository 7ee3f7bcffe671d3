"""A row that PostgreSQL refuses to write, for its content, a foreign key or a trigger, stops nobody else."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString
from uuid import UUID, uuid4

import psycopg
import pytest
from nats.js import JetStreamContext
from psycopg.sql import SQL, Identifier
from sqlalchemy import make_url

from jsworker import JobClient, Limit
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import admission, heartbeat, publish
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions.heartbeat import Held
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.telemetry.worker_status import Fleet
from jsworker.worker.maintenance import retention
from jsworker.worker.pipeline.in_flight import StopReason
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.lives import Lives, ended_pid
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

MakeSettings = Callable[..., Settings]

ELSEWHERE = "elsewhere"
"""A kind that no worker of these tests processes."""
GOOD = 5

HOSTILE: LiteralString = "OLD.payload ? 'hostile'"
PROMOTE: LiteralString = "OLD.status = 'scheduled' AND NEW.status = 'queued'"
PUBLISH: LiteralString = "OLD.needs_publish AND NEW.needs_publish AND NEW.publish_after > OLD.publish_after"
MARK: LiteralString = "OLD.needs_publish AND NOT NEW.needs_publish AND NEW.status = 'queued'"
CLAIM: LiteralString = "NEW.status = 'processing' AND OLD.status = 'queued'"
RENEW: LiteralString = "NEW.status = 'processing' AND OLD.status = 'processing'"
END: LiteralString = "NEW.status IN ('completed', 'failed')"
COMPLETE: LiteralString = "NEW.status = 'completed'"
TAKE_BACK: LiteralString = "OLD.status = 'processing' AND NEW.status <> 'processing'"
REPUBLISH: LiteralString = "OLD.status = 'queued' AND NEW.status = 'queued' AND NEW.dispatch > OLD.dispatch"

MISSING_TABLE: LiteralString = "PERFORM 1 FROM no_such_table"
DENIED: LiteralString = "RAISE EXCEPTION 'secret words' USING ERRCODE = 'insufficient_privilege'"
OVERFLOW: LiteralString = "PERFORM 9223372036854775807 + 1"
RAISED: LiteralString = "RAISE EXCEPTION 'secret words'"
SERVER_DOWN: LiteralString = "RAISE EXCEPTION 'secret words' USING ERRCODE = 'admin_shutdown'"


@dataclass
class Refusing:
    """A trigger of somebody's on ``jobs``, which counts how often it refuses."""

    rows: Rows

    async def begin(self, when: LiteralString, how: LiteralString = RAISED) -> None:
        await self.rows.query("CREATE SEQUENCE refusals")
        body: LiteralString = f"BEGIN PERFORM nextval('refusals'); {how}; RETURN NEW; END"
        await self.rows.query(
            f"CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ {body} $$"
        )
        await self.rows.query(
            "CREATE TRIGGER theirs BEFORE UPDATE ON jsworker.jobs FOR EACH ROW "
            f"WHEN ({HOSTILE} AND ({when})) EXECUTE FUNCTION refuse()"
        )

    async def end(self) -> None:
        await self.rows.query("DROP TRIGGER theirs ON jsworker.jobs")
        await self.rows.query("UPDATE jsworker.refused_rows SET retry_at = clock_timestamp()")

    async def times(self) -> int:
        """Return how often it has refused."""
        return int(
            await self.rows.value("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM refusals")
        )


@pytest.fixture(autouse=True)
async def _marks_last(rows: Rows) -> None:
    """No row is tried again because a busy machine takes the minute for which it is set aside."""
    await rows.query(
        "CREATE FUNCTION last() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN NEW.retry_at := NEW.retry_at + interval '1 hour'; RETURN NEW; END $$"
    )
    await rows.query(
        "CREATE TRIGGER last BEFORE INSERT ON jsworker.refused_rows FOR EACH ROW EXECUTE FUNCTION last()"
    )


@pytest.fixture
def refusing(rows: Rows) -> Refusing:
    return Refusing(rows)


async def insert(
    rows: Rows, payload: str, *, kind: str = KIND, status: str = "queued", needs_publish: bool = True
) -> UUID:
    """Insert a job that is due; older than those that were inserted before, so first in every order."""
    job_id = uuid4()
    await rows.query(
        "INSERT INTO jsworker.jobs"
        " (id, kind, payload, status, dispatch, queued_at, run_at, needs_publish, publish_after)"
        " SELECT %s, %s, jsonb_build_object(%s::text, true), %s, CASE WHEN %s = 'queued' THEN 1 ELSE 0 END,"
        " old, old, %s, old FROM ("
        "SELECT least(min(publish_after), clock_timestamp()) - interval '1 minute'"
        " FROM jsworker.jobs) AS o(old)",
        job_id,
        kind,
        payload,
        status,
        status,
        needs_publish and status == "queued",
    )
    return job_id


async def insert_all(rows: Rows, **columns: Any) -> tuple[UUID, list[UUID]]:
    """Insert a hostile row in the middle of good ones."""
    some = [await insert(rows, "good", **columns) for _ in range(GOOD // 2)]
    hostile = await insert(rows, "hostile", **columns)
    return hostile, [*some, *[await insert(rows, "good", **columns) for _ in range(GOOD - GOOD // 2)]]


async def mark_of(rows: Rows, job_id: UUID) -> dict[str, Any]:
    [row] = await rows.query("SELECT * FROM jsworker.refused_rows WHERE job_id = %s", job_id)
    return row


async def marks_are_gone(rows: Rows) -> None:
    async def gone() -> None:
        assert await rows.query("SELECT * FROM jsworker.refused_rows") == []

    await eventually(gone)


def nothing_degraded(running: Running) -> None:
    """Check that no search failed; on a busy machine the event loop itself may stand still."""
    assert {event["what"] for event in running.events.of("worker.degraded")} <= {"event loop"}


async def told_once(running: Running, job_id: UUID, attempted: str, sqlstate: str = "P0001") -> None:
    """Check that the row was named once, with everything that helps to find the reason, and no more."""
    told = await running.events.told("row.refused")
    facts = {
        "job_id": str(job_id),
        "attempted": attempted,
        "sqlstate": sqlstate,
        "constraint": None,
        "jobs": 1,
    }
    assert [{**event, "kind": None} for event in told] == [{**facts, "kind": None}]
    nothing_degraded(running)


@pytest.mark.parametrize(
    "case",
    [
        (PROMOTE, OVERFLOW, "promote", "22003"),
        (PROMOTE, RAISED, "promote", "P0001"),
        (PROMOTE, MISSING_TABLE, "promote", "42P01"),
        (PROMOTE, DENIED, "promote", "42501"),
        (PROMOTE, SERVER_DOWN, "promote", "57P01"),
        (CLAIM, RAISED, "claim", "P0001"),
    ],
    ids=lambda case: f"{case[2]}-{case[3]}",
)
async def test_a_row_that_cannot_be_taken_is_named_once_set_aside_and_stepped_past(
    rows: Rows,
    start: StartWorker,
    refusing: Refusing,
    case: tuple[LiteralString, LiteralString, str, str],
) -> None:
    when, how, attempted, sqlstate = case
    await refusing.begin(when, how)
    hostile, good = await insert_all(rows, status="scheduled" if attempted == "promote" else "queued")
    before = await rows.job(hostile)
    running = await start(scripted(echo))
    for job_id in good:
        await rows.becomes(job_id, "completed")
    await told_once(running, hostile, attempted, sqlstate)
    mark = await mark_of(rows, hostile)
    assert (mark["kind"], mark["attempted"], mark["sqlstate"]) == (KIND, attempted, sqlstate)

    times = await refusing.times()
    components = running.worker._components
    await rounds_pass(count_rounds(components.looks), 5)
    await rounds_pass(count_rounds(components.repairs), 2)
    later = [await insert(rows, "good") for _ in range(3)]
    for job_id in later:
        await rows.becomes(job_id, "completed")
    if attempted == "claim":  # as when another message of it comes
        consumer = components.pipeline.consumers[0]
        consumer.take(hostile)
        await consumer.flush()
        assert hostile not in running.worker._context.in_flight
    assert await refusing.times() == times
    assert (await rows.job(hostile))["fencing_token"] == before["fencing_token"]
    await told_once(running, hostile, attempted, sqlstate)

    await refusing.end()
    if attempted == "claim":  # its message comes back a minute later; the idle poll is sooner
        await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '10 minutes'")
    await rows.becomes(hostile, "completed")
    await marks_are_gone(rows)


async def test_a_new_worker_knows_what_others_have_set_aside(
    rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(PROMOTE)
    hostile, _ = await insert_all(rows, status="scheduled")
    first = await start(scripted(echo))
    await told_once(first, hostile, "promote")
    second = await start(scripted(echo))
    await rounds_pass(count_rounds(second.worker._components.looks), 3)
    assert second.events.of("row.refused") == []
    assert (await mark_of(rows, hostile))["tries"] == 1


@pytest.mark.parametrize("attempted", ["publish", "mark"])
async def test_a_row_that_cannot_be_published_or_marked_holds_up_no_other(
    rows: Rows,
    start: StartWorker,
    refusing: Refusing,
    js: JetStreamContext,
    attempted: str,
) -> None:
    await refusing.begin(PUBLISH if attempted == "publish" else MARK)
    hostile, good = await insert_all(rows, kind=ELSEWHERE)
    running = await start(scripted(echo))
    await told_once(running, hostile, attempted)

    async def others_are_marked() -> None:
        assert not any([(await rows.job(job_id))["needs_publish"] for job_id in good])

    await eventually(others_are_marked)
    times = await refusing.times()
    await rows.query(
        "UPDATE jsworker.jobs SET publish_after = clock_timestamp() - interval '1 hour' WHERE needs_publish"
    )
    await rounds_pass(count_rounds(running.worker._components.looks), 5)
    assert await refusing.times() == times
    assert (await rows.job(hostile))["needs_publish"]
    messages = GOOD + (attempted == "mark")
    assert (await js.stream_info(running.worker._stream.name)).state.messages == messages
    await refusing.end()
    await marks_are_gone(rows)


async def test_thousands_of_refused_rows_before_the_others_are_stepped_past(
    rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(PROMOTE)
    good = [await insert(rows, "good", status="scheduled") for _ in range(GOOD)]
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)"
        " SELECT gen_random_uuid(), %s, '{\"hostile\": true}', 'scheduled', now() - interval '1 day'"
        " FROM generate_series(1, 2500)",
        KIND,
    )
    running = await start(scripted(echo))
    # So many refusals make a search slow: were it to rest, the good ones would wait for an hour.
    running.worker._components.publisher._promoting._longest_rest = 3600.0
    for job_id in good:
        await rows.becomes(job_id, "completed", seconds=200)
    assert await rows.value("SELECT count(*) FROM jsworker.refused_rows") == 2500
    told = running.events.of("row.refused")
    assert sum(event["jobs"] for event in told) == 2500
    assert len(told) <= 5


async def test_a_row_that_is_written_after_all_loses_its_mark_at_once(
    database: Database, rows: Rows, refusing: Refusing
) -> None:
    known = RefusedRows(database, worker_id=None)
    await refusing.begin(PUBLISH)
    hostile = await insert(rows, "hostile", kind=ELSEWHERE)
    assert await publish.take_outgoing(database, limit=10, refused_rows=known) == []
    assert (await mark_of(rows, hostile))["attempted"] == "publish"
    await refusing.end()
    [taken] = await publish.take_outgoing(database, limit=10, refused_rows=known)
    assert taken.id == hostile
    assert (await rows.job(hostile))["needs_publish"]  # so that no tidying takes the mark
    assert await rows.query("SELECT * FROM jsworker.refused_rows") == []


async def test_a_row_whose_message_is_gone_and_cannot_be_sent_again(
    rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    hostile, good = await insert_all(rows, kind=ELSEWHERE, needs_publish=False)
    await refusing.begin(REPUBLISH)
    running = await start(scripted(echo))

    async def dispatched_again() -> None:
        assert {(await rows.job(job_id))["dispatch"] for job_id in good} == {2}

    await eventually(dispatched_again)
    await told_once(running, hostile, "republish")
    times = await refusing.times()
    await rounds_pass(count_rounds(running.worker._components.repairs), 3)
    assert await refusing.times() == times
    assert (await rows.job(hostile))["dispatch"] == 1


async def test_a_heartbeat_that_is_refused_silences_no_other(
    client: JobClient, rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(RENEW)
    gate = Gate()
    running = await start(scripted(gate.process))
    hostile = await client.enqueue(KIND, {"hostile": True})
    good = await client.enqueue(KIND, {})
    for _ in range(2):
        await gate.met()
    await told_once(running, hostile.id, "heartbeat")
    claimed, unheard = await rows.job(good.id), await rows.job(hostile.id)

    async def is_renewed() -> None:
        assert (await rows.job(good.id))["last_activity_at"] > claimed["last_activity_at"]

    await eventually(is_renewed)
    assert await rows.job(hostile.id) == unheard
    await refusing.end()

    async def is_renewed_again() -> None:
        assert (await rows.job(hostile.id))["last_activity_at"] > unheard["last_activity_at"]

    await eventually(is_renewed_again)
    gate.open()
    for job in (hostile, good):
        await rows.becomes(job.id, "completed")
    await marks_are_gone(rows)


async def test_heartbeats_that_are_refused_keep_no_other_from_waiting_for_its_lock(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    refusing: Refusing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[UUID] = []
    beat_alone = heartbeat.heartbeat_alone

    async def noted(*arguments: Any, held: Held, **rest: Any) -> bool:
        asked.append(held[0])
        return await beat_alone(*arguments, held=held, **rest)

    monkeypatch.setattr(heartbeat, "heartbeat_alone", noted)
    await refusing.begin(RENEW)
    gate = Gate()
    await start(scripted(gate.process))
    hostile = [(await client.enqueue(KIND, {"hostile": True})).id for _ in range(4)]
    good = await client.enqueue(KIND, {})
    for _ in range(5):
        await gate.met()

    async def are_asked(*job_ids: UUID) -> None:
        assert set(job_ids) <= set(asked)

    await eventually(lambda: are_asked(*hostile))
    with psycopg.connect(rows.connection.info.dsn) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [good.id])
        await eventually(lambda: are_asked(good.id))
        holder.rollback()
    asked.clear()
    await eventually(lambda: are_asked(*hostile))
    gate.open()
    await rows.becomes(good.id, "completed")


async def test_a_refused_completion_fails_the_job_and_says_why(
    client: JobClient, rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(COMPLETE)
    running = await start(scripted(echo))
    good = [await client.enqueue(KIND, {}) for _ in range(GOOD)]
    hostile = await client.enqueue(KIND, {"hostile": True})
    row = await rows.becomes(hostile.id, "failed")
    assert row["failure_reason"] == "result"
    assert row["last_error"] == "cannot be completed: PostgreSQL refused a row: SQLSTATE P0001"
    for job in good:
        await rows.becomes(job.id, "completed")
    [failed] = await running.events.told("job.failed")
    assert (failed["job_id"], failed["error"]) == (str(hostile.id), row["last_error"])
    assert running.events.of("row.refused") == []
    nothing_degraded(running)


async def test_a_row_that_takes_no_outcome_at_all_is_left_in_peace(
    client: JobClient, rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(TAKE_BACK)
    running = await start(scripted(echo))
    hostile = await client.enqueue(KIND, {"hostile": True})
    good = await client.enqueue(KIND, {})
    await rows.becomes(good.id, "completed")
    await told_once(running, hostile.id, "fail")
    [lost] = await running.events.told("job.lost")
    assert lost["job_id"] == str(hostile.id)

    # It is an orphaned claim now, but has run: it is not handed back, and the search for stale rows tries it.
    # Its mark is not due yet, so its failure is left alone.
    await rows.query(
        "UPDATE jsworker.jobs SET claimed_at = claimed_at - interval '1 hour', "
        "stale_after = interval '1 second', last_activity_at = last_activity_at - interval '1 hour' "
        "WHERE id = %s",
        hostile.id,
    )
    running.worker._components.heartbeat.look_for_orphaned_claims()

    async def all_tried() -> None:
        tried = [event["attempted"] for event in running.events.of("row.refused")]
        assert tried == ["fail", "reset"]

    await eventually(all_tried)
    times = await refusing.times()
    beats = count_rounds(running.worker._components.beats)
    running.worker._components.heartbeat.look_for_orphaned_claims()
    await rounds_pass(beats, 4)
    assert await refusing.times() == times
    nothing_degraded(running)


async def test_a_job_that_is_never_stale_ends_once_its_failure_is_refused_no_more(
    client: JobClient, rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(TAKE_BACK)
    running = await start(scripted(echo, stale_threshold=None, crash_threshold=None))
    kept, forgotten = [await client.enqueue(KIND, {"hostile": True}) for _ in range(2)]
    heartbeat = running.worker._components.heartbeat

    async def marked(tries: int) -> None:
        heartbeat.look_for_orphaned_claims()
        found = await rows.query("SELECT tries FROM jsworker.refused_rows WHERE attempted = 'fail'")
        assert [row["tries"] for row in found] == [tries] * 2

    await eventually(lambda: marked(1))
    await rows.query("UPDATE jsworker.jobs SET claimed_at = claimed_at - interval '1 hour'")
    await rows.query("UPDATE jsworker.refused_rows SET retry_at = clock_timestamp()")
    await eventually(lambda: marked(2))
    times = await refusing.times()
    await rounds_pass(count_rounds(running.worker._components.beats), 4)
    assert await refusing.times() == times  # until it is due again

    forgotten_run = (forgotten.id, (await rows.job(forgotten.id))["fencing_token"])
    del running.worker._components.pipeline.settler._refused[forgotten_run]
    await refusing.end()
    heartbeat.look_for_orphaned_claims()
    row = await rows.becomes(kept.id, "failed")
    assert row["last_error"] == "cannot be completed: PostgreSQL refused a row: SQLSTATE P0001"
    row = await rows.becomes(forgotten.id, "scheduled")
    assert (row["errors"], row["last_error"]) == (
        1,
        "its run has ended, but PostgreSQL refused to write how",
    )
    for job in (kept, forgotten):
        assert "released" not in await rows.told(job.id)
    await marks_are_gone(rows)


@pytest.mark.parametrize("limit", [None, Limit(5)], ids=["claim", "admission"])
async def test_a_run_that_could_not_be_settled_is_read_back_by_no_unclear_claim(
    *,
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    refusing: Refusing,
    monkeypatch: pytest.MonkeyPatch,
    limit: Limit | None,
) -> None:
    room, name = (claims, "claim") if limit is None else (admission, "admit")
    ask, lose, runs = getattr(room, name), asyncio.Event(), list[tuple[UUID, int]]()

    async def unanswered(*arguments: Any, ids: Sequence[UUID] = (), **named: Any) -> Any:
        taken = await ask(*arguments, ids=ids, **named)
        if ids and lose.is_set():
            lose.clear()
            raise DatabaseUnavailable("no answer")
        return taken

    async def process(job: Job[Any]) -> None:
        runs.append((job.id, job.fencing_token))

    monkeypatch.setattr(room, name, unanswered)
    await refusing.begin(TAKE_BACK)
    running = await start(scripted(process, limit=limit))
    context, [consumer] = running.worker._context, running.worker._components.pipeline.consumers
    hostile = await client.enqueue(KIND, {"hostile": True})
    await running.events.told("job.lost")
    assert context.in_flight.unsettled == {(hostile.id, 1)}
    lose.set()
    consumer.take(hostile.id)  # as when a late copy of its message comes
    await consumer.flush()
    assert (lose.is_set(), hostile.id in context.in_flight) == (False, False)
    if limit is not None:  # an admission reads back what nobody has named, too
        lose.set()
        good = await client.enqueue(KIND, {})
        await rows.becomes(good.id, "completed")
        assert not lose.is_set()
    assert [run for run in runs if run[0] == hostile.id] == [(hostile.id, 1)]

    await refusing.end()
    await rows.query("UPDATE jsworker.jobs SET claimed_at = claimed_at - interval '1 hour'")
    running.worker._components.heartbeat.look_for_orphaned_claims()

    async def is_forgotten() -> None:
        assert not context.in_flight.unsettled

    await eventually(is_forgotten)


async def test_a_job_whose_every_outcome_is_refused_runs_no_more_often_than_its_stalls_allow(
    client: JobClient, rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    runs: list[int] = []

    async def process(job: Job[Any]) -> None:
        runs.append(job.fencing_token)

    await refusing.begin(END)
    running = await start(scripted(process))
    hostile = await client.enqueue(KIND, {"hostile": True}, max_stalls=3)
    heartbeat = running.worker._components.heartbeat

    async def pass_time() -> None:
        """Age the row once after each run, until its last stall is refused too."""
        await rows.query(
            "UPDATE jsworker.jobs AS j SET claimed_at = claimed_at - interval '1 hour', "
            "stale_after = interval '1 second', last_activity_at = last_activity_at - interval '1 hour' "
            "FROM jsworker.refused_rows AS r WHERE r.job_id = j.id AND r.attempted = 'fail' "
            "AND r.fencing_token = j.fencing_token AND j.status = 'processing' "
            "AND j.last_activity_at > clock_timestamp() - interval '10 minutes'"
        )
        await rows.query(
            "UPDATE jsworker.refused_rows SET retry_at = clock_timestamp() WHERE attempted = 'fail'"
        )
        await rows.query("UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE status = 'scheduled'")
        heartbeat.look_for_orphaned_claims()
        assert "reset" in [event["attempted"] for event in running.events.of("row.refused")]

    await eventually(pass_time, seconds=60)
    assert "released" not in await rows.told(hostile.id)
    row = await rows.job(hostile.id)
    assert (row["status"], row["stalls"]) == ("processing", 2)
    uncounted = [each for each in running.events.of("job.stalled") if not each["counted"]]
    assert len(runs) == 3 + len(uncounted)
    beats = count_rounds(running.worker._components.beats)
    heartbeat.look_for_orphaned_claims()
    await rounds_pass(beats, 4)
    assert (await rows.job(hostile.id))["fencing_token"] == runs[-1]


async def test_a_stale_row_that_cannot_be_taken_back_keeps_no_other_from_it(
    database: Database, rows: Rows, settings: Settings, start: StartWorker, refusing: Refusing
) -> None:
    lives = Lives(database, rows, settings)
    jobs = [await lives.hold("gone", silent_for=60.0, stale_after=0.3) for _ in range(GOOD)]
    hostile = jobs[2]
    await rows.query("UPDATE jsworker.jobs SET payload = '{\"hostile\": true}' WHERE id = %s", hostile)
    await refusing.begin(TAKE_BACK)
    running = await start(scripted(echo))
    for job_id in jobs:
        if job_id != hostile:
            await rows.becomes(job_id, "queued")
    await told_once(running, hostile, "reset")
    times = await refusing.times()
    await rounds_pass(count_rounds(running.worker._components.scans), 3)
    assert await refusing.times() == times
    assert (await rows.job(hostile))["status"] == "processing"
    await refusing.end()
    await rows.becomes(hostile, "queued")
    await marks_are_gone(rows)


async def test_what_the_dead_of_this_host_held_goes_back_but_for_the_refused_row(
    database: Database, rows: Rows, settings: Settings, start: StartWorker, refusing: Refusing
) -> None:
    lives = Lives(database, rows, settings)
    await lives.add("gone", pid=ended_pid(), job=False)
    jobs = [await lives.hold("gone") for _ in range(GOOD)]
    await rows.query("UPDATE jsworker.jobs SET payload = '{\"hostile\": true}' WHERE id = %s", jobs[2])
    await refusing.begin(TAKE_BACK)
    running = await start(scripted(echo))
    [told] = await running.events.told("reconcile.completed")
    assert told["jobs"] == GOOD - 1
    await told_once(running, jobs[2], "reset")
    assert (await rows.job(jobs[2]))["status"] == "processing"


@pytest.mark.parametrize("on_delete", ["", "ON DELETE CASCADE", "ON DELETE SET NULL"])
async def test_jobs_that_a_foreign_key_keeps_are_pruned_around(
    rows: Rows,
    start: StartWorker,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    on_delete: LiteralString,
) -> None:
    monkeypatch.setattr(retention, "_PASS_SECONDS", 0.05)
    monkeypatch.setattr(retention, "_SHARE", 1.0)  # else it rests ten times as long as it works
    await rows.query(f"CREATE TABLE orders (id int, job_id uuid REFERENCES jsworker.jobs {on_delete})")
    await rows.query(
        "INSERT INTO jsworker.jobs"
        " (id, kind, payload, status, fencing_token, attempts, finished_at, dispatch)"
        " SELECT gen_random_uuid(), 'old', '{}', 'completed', 1, 1, clock_timestamp() - interval '2 days', 1"
        " FROM generate_series(1, 60)"
    )
    await rows.query("INSERT INTO orders SELECT 1, id FROM jsworker.jobs ORDER BY id LIMIT 6")
    running = await start(scripted(echo), with_settings=make_settings(retention=86_400.0))
    kept = 0 if on_delete else 6

    async def pruned() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs") == kept

    await eventually(pruned)
    assert not running.events.of("prune.failed")
    if not on_delete:

        async def all_told() -> None:
            assert sum(event["jobs"] for event in running.events.of("row.refused")) == 6

        await eventually(all_told)
        told = running.events.of("row.refused")
        assert {(event["attempted"], event["sqlstate"]) for event in told} == {("prune", "23503")}
        assert {event["constraint"] for event in told} == {"orders_job_id_fkey"}
        await rounds_pass(count_rounds(running.worker._components.retention), 3)
        assert sum(event["jobs"] for event in running.events.of("row.refused")) == 6
        assert await rows.value("SELECT max(tries) FROM jsworker.refused_rows") == 1
        await rows.query("DELETE FROM orders")
        await rows.query("UPDATE jsworker.refused_rows SET retry_at = clock_timestamp()")
        kept = 0
        await eventually(pruned)
        await marks_are_gone(rows)


async def test_instants_that_python_cannot_hold_stop_no_search(
    rows: Rows, start: StartWorker, client: JobClient
) -> None:
    """What the driver cannot read would hide a whole page of the search for lost messages."""
    for row in await rows.query(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'jsworker.jobs'::regclass AND contype = 'c'"
        " AND pg_get_constraintdef(oid) ~ '(queued_at|stream_created)'"
    ):
        await rows.query(f"ALTER TABLE jsworker.jobs DROP CONSTRAINT {row['conname']}")
    strange = [await insert(rows, "strange", kind=ELSEWHERE, needs_publish=False) for _ in range(3)]
    for job_id, queued_at, created in zip(
        strange,
        ["0044-03-15 BC", "-infinity", "2020-01-01"],
        ["infinity", "20000-01-01", "infinity"],
        strict=True,
    ):
        await rows.query(
            "UPDATE jsworker.jobs SET queued_at = %s, stream_seq = 1, stream_created = %s WHERE id = %s",
            queued_at,
            created,
            job_id,
        )
    running = await start(scripted(echo))

    async def dispatched_again() -> None:
        assert {
            (await rows.value("SELECT dispatch FROM jsworker.jobs WHERE id = %s", job_id))
            for job_id in strange[2:]
        } == {2}

    await eventually(dispatched_again)
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    nothing_degraded(running)


async def test_a_worker_whose_own_row_is_refused_goes_on(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    await rows.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"
    )
    await rows.query(
        "CREATE TRIGGER theirs BEFORE INSERT OR UPDATE OR DELETE ON jsworker.workers "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    beats = count_rounds(running.worker._components.beats)
    await rounds_pass(beats, 3)
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    told = running.events.of("row.refused")
    assert told == [{"job_id": None, "sqlstate": "P0001", "constraint": None}]
    assert not running.events.of("heartbeat.failed")
    await rows.query("DROP TRIGGER theirs ON jsworker.workers")


async def test_timelines_that_take_no_entry_end_no_loop(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """A late outcome is told in the timeline; where that is refused, it is refused all the same."""
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rows.take_back(job.id)
    await rows.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"
    )
    await rows.query(
        "CREATE TRIGGER theirs BEFORE INSERT ON jsworker.job_events FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    gate.open()
    await running.events.told("job.lost")
    other = await client.enqueue(KIND, {})
    await rows.becomes(other.id, "completed")


async def test_a_fenced_run_is_handed_back_although_its_timeline_takes_no_entry(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await rows.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"
    )
    await rows.query(
        "CREATE TRIGGER theirs BEFORE INSERT ON jsworker.job_events FOR EACH ROW"
        " WHEN (NEW.event = 'fenced') EXECUTE FUNCTION refuse()"
    )
    [run] = running.worker._context.in_flight.runs.values()
    run.signal(StopReason.FENCED)
    gate.open()
    await rows.becomes(job.id, "completed")
    assert await rows.told(job.id) == ["released", "claimed"]


async def test_the_survey_counts_what_is_set_aside(
    rows: Rows, start: StartWorker, refusing: Refusing
) -> None:
    await refusing.begin(PROMOTE)
    await insert_all(rows, status="scheduled")
    running = await start(scripted(echo))
    await running.events.told("row.refused")
    await running.worker._components.survey.step()
    found = running.worker._components.survey.latest
    assert isinstance(found, Fleet)
    assert found.refused_rows == {"promote": 1}


async def test_a_login_without_rights_on_the_marks_works_and_says_what_it_lacks(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    role = f"weak_{secrets.token_hex(4)}"
    for statement in (
        "CREATE ROLE {} LOGIN",
        "GRANT USAGE ON SCHEMA jsworker TO {}",
        "GRANT ALL ON ALL TABLES IN SCHEMA jsworker TO {}",
        "GRANT ALL ON ALL SEQUENCES IN SCHEMA jsworker TO {}",
        "REVOKE ALL ON jsworker.refused_rows FROM {}",
    ):
        await rows.connection.execute(SQL(statement).format(Identifier(role)))
    url = make_url(settings.database_dsn()).set(username=role).render_as_string(hide_password=False)
    running = await start(scripted(echo), with_settings=settings.model_copy(update={"database_url": url}))
    [degraded] = await running.events.told("worker.degraded")
    assert (degraded["what"], "refused_rows" in degraded["reason"]) == ("refused rows", True)
    unsettled = running.worker._components._context.in_flight.unsettled
    unsettled.add((uuid4(), 1))  # of a job that is gone

    async def forgotten() -> None:
        assert not unsettled

    await eventually(forgotten)
    for job in await client.enqueue_many("scripted", [{}] * 20):
        await rows.becomes(job.id, "completed")
    assert [event["what"] for event in running.events.of("worker.degraded")] == ["refused rows"]
