"""Messages that nobody of ours sent: a message is a hint, and whatever it says, only the row decides."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest
from nats.js import JetStreamContext
from nats.js.errors import APIError

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import claim as claims
from jsworker.ownership.transitions import dead_messages
from jsworker.worker.pipeline import intake, slots
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

MARKER = "hunter2-do-not-show"


class Publisher:
    """Publishes on the subjects of the test's stream, without the code under test."""

    def __init__(self, js: JetStreamContext, settings: Settings) -> None:
        self._js = js
        self._settings = settings

    async def raw(self, data: bytes, *, kind: str = KIND) -> int:
        """Publish bytes and return their number in the stream."""
        ack = await self._js.publish(f"{self._settings.subject_prefix}.{kind}", data)
        return ack.seq

    async def message(self, job_id: UUID, *, on: str = KIND, **fields: Any) -> int:
        """Publish a well-formed message about a job, some fields other than usual."""
        content = {
            "v": 1,
            "job_id": str(job_id),
            "kind": on,
            "dispatch": 1,
            "cleared": False,
            "clear_reason": None,
        }
        return await self.raw(json.dumps(content | fields).encode(), kind=on)

    async def flood(self) -> None:
        """Publish thousands of messages that nobody can read."""
        for _ in range(FLOOD // 200):
            await asyncio.gather(*(self.raw(MARKER.encode() * 40) for _ in range(200)))

    async def waiting(self, kind: str = KIND) -> tuple[int, int]:
        """Return how many messages of a kind were delivered so far, and how many are in the stream."""
        consumer = await self._js.consumer_info(self._settings.stream, kind)
        stream = await self._js.stream_info(self._settings.stream)
        return consumer.delivered.consumer_seq if consumer.delivered else 0, stream.state.messages


@pytest.fixture
async def publisher(js: JetStreamContext, settings: Settings) -> Publisher:
    return Publisher(js, settings)


GOOD: dict[str, Any] = {
    "v": 1,
    "job_id": str(UUID(int=7)),
    "kind": KIND,
    "dispatch": 1,
    "cleared": False,
    "clear_reason": None,
}


def _with(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


UNREADABLE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not JSON"),
    "no JSON": (b'{"v":1,' + MARKER.encode(), "not JSON"),
    "no UTF-8": (b"\xff\xfe\x00", "not JSON"),
    "a list": (b"[1]", "not a JSON object"),
    "null": (b"null", "not a JSON object"),
    "deep": (b"[" * 30_000, "not JSON"),
    "another version": (_with(v=2), "wrong version: v must be 1"),
    "no version": (b'{"hello":"%b"}' % MARKER.encode(), "wrong version: v must be 1"),
    "no UUID": (_with(job_id=MARKER), "job_id must be a UUID"),
    "a number for an id": (_with(job_id=7), "job_id must be a UUID"),
    "another kind": (_with(kind=MARKER), f"kind is not {KIND}, the kind of the consumer that delivered it"),
    "dispatch 0": (_with(dispatch=0), "dispatch must be an integer"),
    "a huge dispatch": (_with(dispatch=10**30), "dispatch must be an integer"),
    "a text for a dispatch": (_with(dispatch="1"), "dispatch must be an integer"),
    "a text for cleared": (_with(cleared="yes"), "cleared must be true or false"),
    "a number for the reason": (_with(clear_reason=1), "clear_reason must be a text or null"),
    "large": (b'"' + b"x" * 60_000 + b'"', "not a JSON object"),
}


async def test_what_cannot_be_read_is_kept_for_people_and_terminated(
    client: JobClient, rows: Rows, start: StartWorker, publisher: Publisher, settings: Settings
) -> None:
    running = await start(scripted(echo))
    sent = {await publisher.raw(data): (data, reason) for data, reason in UNREADABLE.values()}
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    told = await dead_messages_told(running, len(sent))
    kept = {row["stream_seq"]: row for row in await rows.query("SELECT * FROM jsworker.dead_messages")}
    assert kept.keys() == sent.keys()
    for number, (data, reason) in sent.items():
        row = kept[number]
        assert row["reason"].startswith(reason), (row["reason"], reason)
        assert row["subject"] == f"{settings.subject_prefix}.{KIND}"
        assert bytes(row["data"]) == data[:4096]
        assert row["truncated"] is (len(data) > 4096)
        assert row["stored_at"] is not None
    assert {event["stream_seq"] for event in told} <= sent.keys()
    assert MARKER not in str(told) + str([row["reason"] for row in kept.values()])


async def dead_messages_told(running: Running, number: int) -> list[dict[str, Any]]:
    """Wait until events told of so many dead messages, and return their fields."""

    async def told() -> list[dict[str, Any]]:
        found = running.events.of("message.dead")
        assert sum(event["messages"] for event in found) == number
        return found

    return await eventually(told)


FLOOD = 2_000


async def test_a_flood_of_what_cannot_be_read_is_never_all_in_hand_and_no_flood_of_events(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = statements = 0
    really_bury = dead_messages.keep

    async def bury(database: Database, letters: Sequence[Any]) -> Any:
        nonlocal most, statements
        unanswered = len(running.worker._components.pipeline.dead_letters._unanswered)
        most, statements = max(most, unanswered), statements + 1
        # As long as a busy database takes: at first so long that all of them could arrive meanwhile.
        await asyncio.sleep(max(0.005, began + 2.0 - time.monotonic()))
        return await really_bury(database, letters)

    monkeypatch.setattr("jsworker.worker.maintenance.dead_letters.keep", bury)
    await publisher.flood()
    job = await client.enqueue(KIND, {})
    began = time.monotonic()
    running = await start(scripted(echo))
    told = await dead_messages_told(running, FLOOD)
    seconds = time.monotonic() - began
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    asked_for = running.worker._settings.concurrency + slots._PREFETCH_JOBS
    assert 0 < most < intake._MOST_UNUSABLE + asked_for
    assert statements < FLOOD / 5
    assert len(told) <= seconds + 2
    [kept] = await rows.query("SELECT count(*) AS messages FROM jsworker.dead_messages")
    assert kept["messages"] == FLOOD


async def test_a_forced_close_waits_for_no_flood_and_what_was_not_kept_comes_again(
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_bury = dead_messages.keep
    began = asyncio.Event()

    async def slowly_bury(database: Database, letters: Sequence[Any]) -> Any:
        began.set()
        await asyncio.sleep(1.0)
        return await really_bury(database, letters)

    monkeypatch.setattr("jsworker.worker.maintenance.dead_letters.keep", slowly_bury)
    running = await start(scripted(echo))
    await publisher.flood()
    await began.wait()
    async with asyncio.timeout(20.0):
        await running.worker.close(force=True)
    [kept] = await rows.query("SELECT count(*) AS messages FROM jsworker.dead_messages")
    _, left = await publisher.waiting()
    assert kept["messages"] + left >= FLOOD
    assert left > 0
    monkeypatch.setattr("jsworker.worker.maintenance.dead_letters.keep", really_bury)
    again = await start(scripted(echo))
    await again.stream_is_empty()  # before the consumer's ack_wait


async def test_a_forced_close_waits_for_no_burial_that_never_ends(
    start: StartWorker, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def never_bury(*_: Any) -> Any:
        began.set()
        await ended.wait()
        return [], []

    monkeypatch.setattr("jsworker.worker.maintenance.dead_letters.keep", never_bury)
    running = await start(scripted(echo))
    await publisher.raw(b"{")
    await began.wait()
    try:
        async with asyncio.timeout(30.0):
            await running.worker.close(force=True)
    finally:
        ended.set()
    assert running.worker._components.pipeline.dead_letters._unanswered == set()


async def test_a_table_that_takes_no_dead_messages_stops_no_job(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jsworker.worker.maintenance.dead_letters._REFUSED_DELAY", 0.05)
    await rows.query("ALTER TABLE jsworker.dead_messages ADD CHECK (reason <> 'not JSON')")
    running = await start(scripted(echo))
    await publisher.raw(b"{")
    [degraded] = await running.events.told("worker.degraded")
    assert degraded["what"] == "dead messages"
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert running.worker._context.health.up
    await rows.query("ALTER TABLE jsworker.dead_messages DROP CONSTRAINT dead_messages_reason_check")
    await dead_messages_told(running, 1)
    await running.stream_is_empty()
    assert len(running.events.of("worker.degraded")) == 1


async def test_the_stream_takes_no_message_of_more_than_64_kib(
    start: StartWorker, publisher: Publisher
) -> None:
    running = await start(scripted(echo))
    with pytest.raises(APIError, match="message size exceeds maximum allowed"):
        await publisher.raw(b"x" * 65_537)
    await running.stream_is_empty()
    assert not running.events.of("message.dead")


async def test_a_message_without_a_row_waits_while_it_is_young_and_is_then_dead(
    rows: Rows, start: StartWorker, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.worker.pipeline.intake._NO_ROW_DELAY", 0.02)
    running = await start(scripted(echo))
    number = await publisher.message(UUID(int=7))

    async def delivered_again() -> None:
        delivered, messages = await publisher.waiting()
        assert delivered >= 3
        assert messages == 1

    await eventually(delivered_again)
    assert await rows.query("SELECT id FROM jsworker.dead_messages") == []
    monkeypatch.setattr("jsworker.worker.pipeline.intake._NO_ROW_SECONDS", 0.0)  # now it is old
    await running.stream_is_empty()
    [row] = await rows.query("SELECT stream_seq, reason FROM jsworker.dead_messages")
    assert row == {"stream_seq": number, "reason": "no job of this kind has this id"}
    [told] = await running.events.told("message.dead")
    assert told["stream_seq"] == number


def test_young_is_less_than_a_minute() -> None:
    assert (intake._NO_ROW_SECONDS, intake._NO_ROW_DELAY) == (60.0, 5.0)


@pytest.fixture
def start_with_one_slot(start: StartWorker, settings: Settings) -> Callable[[], Awaitable[Running]]:
    return lambda: start(scripted(echo), with_settings=settings.model_copy(update={"concurrency": 1}))


async def test_messages_without_a_row_do_not_hold_up_a_job_behind_them(
    client: JobClient,
    rows: Rows,
    start_with_one_slot: Callable[[], Awaitable[Running]],
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a backup that has no rows for them: they come again before the job's message, without end."""
    monkeypatch.setattr(intake, "_NO_ROW_DELAY", 0.0)
    monkeypatch.setattr(intake, "_NO_ROW_SECONDS", 3600.0)
    await start_with_one_slot()
    for _ in range(10):
        await asyncio.gather(*(publisher.message(uuid4()) for _ in range(100)))
    job = await client.enqueue(KIND, {"n": 1})
    await rows.becomes(job.id, "completed", seconds=60.0)


async def test_a_message_that_overtook_its_rows_commit_starts_the_job_all_the_same(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jsworker.worker.pipeline.intake._NO_ROW_DELAY", 0.02)
    running = await start(scripted(echo))
    job_id = uuid4()
    await publisher.message(job_id)

    async def delivered() -> None:
        assert (await publisher.waiting())[0] >= 1

    await eventually(delivered)
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at) "
        "VALUES (%s, %s, '{}', 'queued', 1, clock_timestamp())",
        job_id,
        KIND,
    )
    await rows.becomes(job_id, "completed")
    await running.stream_is_empty()


async def enter_the_queue(job_id: UUID, rows: Rows, *, dispatch: int = 1) -> None:
    """Put a scheduled job into the queue without a message."""
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'queued', dispatch = %s, queued_at = clock_timestamp() "
        "WHERE id = %s",
        dispatch,
        job_id,
    )


async def test_a_message_that_names_a_job_of_another_kind_disturbs_nobody(  # noqa: PLR0917 -- fixtures
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jsworker.worker.pipeline.intake._NO_ROW_SECONDS", 0.0)
    job = await client.enqueue("other", {"mine": True}, delay=3600.0)
    await enter_the_queue(job.id, rows)
    # Nor does a sweep find its row first: it would after two scans.
    rarely = settings.model_copy(update={"scan_interval": 25.0, "ack_wait": 120.0})
    running = await start(scripted(echo), scripted(echo, kind="other"), with_settings=rarely)
    await publisher.message(job.id, on=KIND)
    await running.events.told("message.dead")
    await running.stream_is_empty()
    assert (await rows.job(job.id))["status"] == "queued"
    await publisher.message(job.id, on="other")
    assert (await rows.becomes(job.id, "completed"))["result"] == {"mine": True}


async def test_what_a_message_says_about_clearing_is_not_believed(
    client: JobClient, rows: Rows, start: StartWorker, publisher: Publisher
) -> None:
    async def process(job: Job[Any]) -> Any:
        return {"cleared": job.cleared, "reason": job.clear_reason, "payload": job.payload}

    job = await client.enqueue(KIND, {"a": 1}, delay=3600.0)
    await enter_the_queue(job.id, rows)
    running = await start(scripted(process))
    await publisher.message(job.id, cleared=True, clear_reason="forged", payload={"a": 2})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"cleared": False, "reason": None, "payload": {"a": 1}}
    await running.stream_is_empty()


@pytest.mark.parametrize("dispatch", [1, 3, 2**31 - 1], ids=["lower", "equal", "higher"])
async def test_a_queued_job_is_run_once_whatever_dispatch_a_message_names(
    client: JobClient, rows: Rows, start: StartWorker, publisher: Publisher, dispatch: int
) -> None:
    job = await client.enqueue(KIND, {}, delay=3600.0)
    await enter_the_queue(job.id, rows, dispatch=3)
    running = await start(scripted(echo))
    await publisher.message(job.id, dispatch=dispatch)
    await publisher.message(job.id, dispatch=3)
    row = await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert (row["attempts"], row["fencing_token"]) == (1, 1)
    assert running.events.names(job.id).count("job.started") == 1


async def test_copies_for_a_running_job_never_start_it_twice(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy that the run has used up is answered at once; a newer one may be the job's only message."""
    monkeypatch.setattr("jsworker.worker.pipeline.intake._ANOTHER_COPY_DELAY", 0.02)
    gate = Gate()
    running = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await publisher.message(job.id, dispatch=1)

    async def one_left() -> None:
        assert (await publisher.waiting())[1] == 1

    await eventually(one_left)
    await publisher.message(job.id, dispatch=9)
    before = (await publisher.waiting())[0]

    async def nakked_again_and_again() -> None:
        delivered, messages = await publisher.waiting()
        assert delivered >= before + 3
        assert messages == 2

    await eventually(nakked_again_and_again)
    assert gate.waiting == 0
    gate.open()
    row = await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert (row["attempts"], row["fencing_token"]) == (1, 1)
    assert await rows.told(job.id) == []


async def test_a_newer_copy_for_a_running_job_comes_back_ever_more_seldom(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands of forged ones would be redelivered before all new messages, for as long as the run lasts."""
    first = 0.001
    delays: list[float] = []

    def noted(seconds: float, share: float) -> float:
        assert share > 0
        delays.append(seconds)
        return seconds

    monkeypatch.setattr(intake, "_ANOTHER_COPY_DELAY", first)
    monkeypatch.setattr(intake, "jittered", noted)
    gate = Gate()
    await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await publisher.message(job.id, dispatch=9)

    async def put_off_often() -> None:
        assert len(delays) >= 9

    await eventually(put_off_often)
    assert delays[:9] == [first * times for times in (1, 2, 4, 8, 16, 32, 64, 64, 64)]
    gate.open()
    await rows.becomes(job.id, "completed")


async def test_copies_delivered_together_with_the_first_message_are_one_job(
    client: JobClient, rows: Rows, start: StartWorker, publisher: Publisher
) -> None:
    jobs = await client.enqueue_many(KIND, [{"n": n} for n in range(30)], delay=3600.0)
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'queued', dispatch = 1, queued_at = clock_timestamp()"
    )
    first = await start(scripted(echo))
    second = await start(scripted(echo))
    for _ in range(3):
        for job in jobs:
            await publisher.message(job.id)
    for job in jobs:
        row = await rows.becomes(job.id, "completed")
        assert (row["attempts"], row["fencing_token"]) == (1, 1)
    await first.stream_is_empty()
    started = first.events.of("job.started") + second.events.of("job.started")
    assert len(started) == len(jobs)


async def test_of_a_flood_of_copies_few_wait_for_the_claim(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jsworker.worker.pipeline.intake._ANOTHER_COPY_DELAY", 0.02)
    running = await start(scripted(echo))
    consumer = running.worker._components.pipeline.consumers[0]
    really_claim = consumer.claim
    allowed = asyncio.Event()

    async def claim(ids: Sequence[UUID]) -> Any:
        await allowed.wait()
        return await really_claim(ids)

    monkeypatch.setattr(consumer, "claim", claim)
    job = await client.enqueue(KIND, {})
    copies = 5 * intake._MOST_COPIES
    for _ in range(copies):
        await publisher.message(job.id)

    async def all_were_delivered() -> None:
        assert (await publisher.waiting())[0] > copies

    await eventually(all_were_delivered)
    claiming = running.worker._context.in_flight.claiming[job.id]
    assert len(claiming.deliveries) == intake._MOST_COPIES
    allowed.set()
    row = await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert row["attempts"] == 1


async def test_a_job_that_enters_the_queue_right_after_its_claim_was_refused_keeps_its_message(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message may be the job's only one: it is not acknowledged for what the row was a moment ago."""
    look = claims.look_at_refused

    async def look_after_it_was_queued(*arguments: Any, **named: Any) -> Any:
        if (await rows.job(job.id))["status"] == "scheduled":
            await enter_the_queue(job.id, rows)
        return await look(*arguments, **named)

    monkeypatch.setattr(claims, "look_at_refused", look_after_it_was_queued)
    monkeypatch.setattr("jsworker.worker.pipeline.intake._DATABASE_DELAY", 0.02)
    job = await client.enqueue(KIND, {}, delay=3600.0)
    running = await start(scripted(echo))
    await publisher.message(job.id)
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()


async def test_a_newer_message_that_comes_while_a_claim_is_refused_is_not_acknowledged(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its owner hands the job back after its row was read: the second message is the job's only one."""
    look = claims.look_at_refused

    async def look_before_it_is_handed_back(*arguments: Any, **named: Any) -> Any:
        found = await look(*arguments, **named)
        if found[job.id].status == "scheduled":
            await enter_the_queue(job.id, rows)
            await publisher.message(job.id, dispatch=2)

            async def has_come() -> None:
                copies = running.worker._context.in_flight.claiming[job.id].deliveries
                assert [copy.dispatch for copy in copies] == [1, 2]

            await eventually(has_come)
        return found

    monkeypatch.setattr(claims, "look_at_refused", look_before_it_is_handed_back)
    job = await client.enqueue(KIND, {}, delay=3600.0)
    running = await start(scripted(echo))
    await publisher.message(job.id)
    await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    skipped = [event["status"] for event in running.events.of("job.skipped")]
    assert skipped.count("scheduled") == 1


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled", "scheduled"])
async def test_a_message_for_a_job_that_waits_for_none_is_skipped(
    client: JobClient, rows: Rows, start: StartWorker, publisher: Publisher, status: str
) -> None:
    job = await client.enqueue(KIND, {}, delay=3600.0)
    if status != "scheduled":
        await rows.query(
            "UPDATE jsworker.jobs SET status = %s, finished_at = clock_timestamp(), attempts = %s "
            "WHERE id = %s",
            status,
            int(status == "completed"),
            job.id,
        )
    before = await rows.job(job.id)
    running = await start(scripted(echo))
    await publisher.message(job.id)
    [skipped] = await running.events.told("job.skipped")
    assert (skipped["job_id"], skipped["status"]) == (str(job.id), status)
    await running.stream_is_empty()
    assert await rows.job(job.id) == before


async def test_a_message_for_a_job_that_another_worker_runs_is_skipped(  # noqa: PLR0917 -- fixtures
    client: JobClient,
    rows: Rows,
    js: JetStreamContext,
    settings: Settings,
    start: StartWorker,
    publisher: Publisher,
) -> None:
    gate = Gate()
    owner = await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    puller = owner.worker._components.pipeline.pullers[0]
    puller._room = lambda: 0

    async def asks_for_nothing() -> None:
        puller.wake()
        assert puller._credit.total == 0

    await eventually(asks_for_nothing)

    async def nothing_is_asked_for() -> None:  # the server knows it, too
        assert (await js.consumer_info(settings.stream, KIND)).num_waiting == 0

    await eventually(nothing_is_asked_for)
    other = await start(scripted(gate.process))
    await publisher.message(job.id, dispatch=5)
    [skipped] = await other.events.told("job.skipped")
    assert (skipped["status"], skipped["owner"]) == ("processing", owner.worker.id)
    gate.open()
    await rows.becomes(job.id, "completed")
    await other.stream_is_empty()
