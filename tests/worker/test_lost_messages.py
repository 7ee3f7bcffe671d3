"""Messages get lost in every way: their jobs are published again, and no others, however deep the queue."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import republish, workers
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.stream.jetstream import Stream, ensured_stream
from jsworker.stream.message import WireMessage
from jsworker.worker.maintenance.throttled_scan import ThrottledScan
from jsworker.worker.recovery import lost_messages
from jsworker.worker.recovery.lost_messages import LostMessages
from tests.stream.nats_server import NatsServer
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

LOST = "lost"
"""A kind that the watching worker does not process, so that no idle poll is faster than the repair."""

DEEP = 10_000


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
async def stream(settings: Settings, database: Database) -> AsyncIterator[Stream]:
    opened = Stream(
        settings,
        installation_id=await workers.installation_id(database),
        events=Events(),
        client_name="repairing",
    )
    await opened.connect()
    await opened.ensure([LOST])
    yield opened
    await opened.close()


async def post(client: JobClient, rows: Rows, count: int) -> list[UUID]:
    """Enqueue jobs and wait until their messages are in the stream and marked so."""
    ids = [(await client.enqueue(LOST, {"n": number})).id for number in range(count)]

    async def marked() -> None:
        assert await rows.value(
            "SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish AND stream_seq > 0"
        ) == len(ids)

    await eventually(marked)
    return ids


async def age(rows: Rows) -> None:
    """Let jobs be old enough to be looked at."""
    await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 minute'")


async def seq_of(rows: Rows, job_id: UUID) -> int:
    return int((await rows.job(job_id))["stream_seq"])


def republished(running: Running) -> int:
    return sum(event["jobs"] for event in running.events.of("message.republished"))


async def dispatched_again(rows: Rows) -> set[UUID]:
    told = await rows.query("SELECT job_id FROM jsworker.job_events WHERE event = 'republished'")
    return {row["job_id"] for row in told}


# --- every way to lose a message ---

Break = Callable[[JetStreamContext, str, Rows, list[UUID]], Awaitable[set[int]]]
"""Loses messages of three jobs in a stream and returns whose, by their places."""


async def purge(js: JetStreamContext, stream: str, _rows: Rows, _ids: list[UUID]) -> set[int]:
    await js.purge_stream(stream)
    return {0, 1, 2}


async def delete_consumer(js: JetStreamContext, stream: str, _rows: Rows, _ids: list[UUID]) -> set[int]:
    await js.delete_consumer(stream, LOST)
    return set()  # the messages wait for the next consumer


async def delete_stream(js: JetStreamContext, stream: str, _rows: Rows, _ids: list[UUID]) -> set[int]:
    await js.delete_stream(stream)
    return {0, 1, 2}


async def delete_one(js: JetStreamContext, stream: str, rows: Rows, ids: list[UUID]) -> set[int]:
    assert await js.delete_msg(stream, await seq_of(rows, ids[1]))
    return {1}


async def delete_first_and_last(js: JetStreamContext, stream: str, rows: Rows, ids: list[UUID]) -> set[int]:
    for place in (0, 2):
        assert await js.delete_msg(stream, await seq_of(rows, ids[place]))
    return {0, 2}


async def mistake_the_number(_js: JetStreamContext, _stream: str, rows: Rows, ids: list[UUID]) -> set[int]:
    """After a loss of files, a number may name another job's message, in a stream of the same date."""
    await rows.query(
        "UPDATE jsworker.jobs SET stream_seq = %s WHERE id = %s", await seq_of(rows, ids[2]), ids[0]
    )
    return {0}


async def restore_older_files(_js: JetStreamContext, _stream: str, rows: Rows, ids: list[UUID]) -> set[int]:
    await rows.query("UPDATE jsworker.jobs SET stream_seq = 1000 WHERE id = %s", ids[1])
    return {1}


async def answer_for_a_stranger(js: JetStreamContext, stream: str, _rows: Rows, _ids: list[UUID]) -> set[int]:
    pull = await js.pull_subscribe_bind(consumer=LOST, stream=stream)
    [message] = await pull.fetch(1, timeout=30)
    await message.ack_sync(timeout=30)
    await pull.unsubscribe()
    return {0}


@pytest.fixture
async def posted(client: JobClient, rows: Rows, stream: Stream) -> list[UUID]:  # the stream has the consumer
    return await post(client, rows, 3)


@pytest.mark.parametrize(
    "lose",
    [
        purge,
        delete_consumer,
        delete_stream,
        delete_one,
        delete_first_and_last,
        mistake_the_number,
        restore_older_files,
        answer_for_a_stranger,
    ],
    ids=lambda lose: lose.__name__,
)
async def test_what_is_gone_is_published_again_and_nothing_else(
    posted: list[UUID], js: JetStreamContext, start: StartWorker, rows: Rows, lose: Break
) -> None:
    running = await start(scripted(echo, kind="other"))
    scans = count_rounds(running.worker._components.repairs)
    ids = posted
    lost = {ids[place] for place in await lose(js, running.worker._stream.name, rows, ids)}
    await age(rows)

    async def all_found() -> None:
        assert await dispatched_again(rows) >= lost

    await eventually(all_found)
    await rounds_pass(scans, 3)
    assert await dispatched_again(rows) == lost
    assert republished(running) == len(lost)
    reasons = {event["reason"] for event in running.events.of("message.republished")}
    assert reasons <= {"their messages are gone"}
    for job_id in ids:
        row = await rows.job(job_id)
        assert (row["status"], row["dispatch"]) == ("queued", 2 if job_id in lost else 1)

    doing = await start(scripted(echo, kind=LOST))
    for place, job_id in enumerate(ids):
        row = await rows.becomes(job_id, "completed")
        assert (row["fencing_token"], row["result"]) == (1, {"n": place})
    await doing.stream_is_empty()
    assert republished(running) + republished(doing) == len(lost)


async def test_jobs_outlive_the_store_of_their_server(
    make_settings: Callable[..., Settings], start: StartWorker, rows: Rows, tmp_path: Path
) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    try:
        settings = make_settings(nats_url=server.url)
        running = await start(scripted(echo, kind="other"), with_settings=settings)
        async with JobClient(settings) as client:
            ids = await post(client, rows, 3)
        await server.stop()
        await asyncio.to_thread(shutil.rmtree, tmp_path / f"store-{server.port}")
        await server.start()
        await age(rows)

        async def all_found() -> None:
            assert await dispatched_again(rows) == set(ids)

        await eventually(all_found)
        doing = await start(scripted(echo, kind=LOST), with_settings=settings)
        for job_id in ids:
            await rows.becomes(job_id, "completed")
        await doing.stream_is_empty()
        assert republished(running) + republished(doing) == 3
        await doing.worker.close(force=True)
        await running.worker.close(force=True)
    finally:
        await server.stop()


async def test_processes_that_use_different_streams_are_named_as_the_cause(
    repairing: "Repairing",
    make_settings: Callable[..., Settings],
    rows: Rows,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(republish, "_CHANGE", timedelta())
    other = make_settings()
    other = make_settings(stream=f"{other.stream}_OTHER", subject_prefix=f"{other.subject_prefix}-other")
    installation_id = await workers.installation_id(database)
    made = ensured_stream(other, installation_id, [LOST], events=Events(), client_name="other")
    async with made, JobClient(other) as client:
        ids = await post(client, rows, 3)

    async def all_found() -> None:
        await repairing.scan(1)
        assert await dispatched_again(rows) == set(ids)

    await eventually(all_found)
    [told, *_] = repairing.heard.of("message.republished")
    created = (await rows.job(ids[0]))["stream_created"]
    assert told["reason"] == (
        f"they went to another stream, made at {created:%Y-%m-%d %H:%M:%S} UTC: all processes that use this "
        "database need the same JSWORKER_NATS_URL and JSWORKER_STREAM"
    )


# --- deep queues ---


class Repairing:
    """A repair of the test's own, scan by scan."""

    def __init__(
        self, database: Database, stream: Stream, settings: Settings, scan_interval: float = 0.4
    ) -> None:
        self.stream = stream
        events = Events()
        self.heard = Recorder()
        events.on("*", self.heard)
        settings = settings.model_copy(update={"scan_interval": scan_interval, "statement_timeout": 5.0})
        context = make_context(database, stream=stream, events=events, settings=settings)
        self.repair = LostMessages(context)
        self.repair._search = ThrottledScan(context, "it", rest=0)

    async def scan(self, times: int) -> None:
        for _ in range(times):
            await self.repair.step()

    @property
    def jobs(self) -> int:
        return sum(event["jobs"] for event in self.heard.of("message.republished"))


@pytest.fixture
def repairing(database: Database, stream: Stream, settings: Settings) -> Repairing:
    return Repairing(database, stream, settings)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_messages, "_PAGE", 6)
    monkeypatch.setattr(lost_messages, "_LOOKED_UP", 2)


@pytest.mark.usefixtures("small_pages")
async def test_a_page_may_hold_gone_and_present_messages_and_pages_begin_anew(
    client: JobClient, js: JetStreamContext, rows: Rows, repairing: Repairing
) -> None:
    ids = await post(client, rows, 15)
    await age(rows)
    lost = {ids[0], ids[3], ids[7], ids[14]}
    for job_id in lost:  # numbers tell of the first and the last, only a look of those in between
        assert await js.delete_msg(repairing.stream.name, await seq_of(rows, job_id))
    await repairing.scan(8 + 1)  # two looks a scan, and the end is an end too
    await repairing.scan(8 + 1)
    assert await dispatched_again(rows) == lost
    assert repairing.jobs == len(lost)
    late = ids[1]  # its page has long been turned
    assert await js.delete_msg(repairing.stream.name, await seq_of(rows, late))
    await repairing.scan(2 * (8 + 1))
    assert await dispatched_again(rows) == {*lost, late}
    assert repairing.jobs == len(lost) + 1
    assert not repairing.heard.of("worker.degraded")


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no message be looked up by its number."""
    monkeypatch.setattr(lost_messages, "_LOOKED_UP", 0)


@pytest.mark.usefixtures("no_look")
@pytest.mark.parametrize(
    "lose", [purge, restore_older_files, answer_for_a_stranger], ids=lambda lose: lose.__name__
)
async def test_numbers_alone_tell_what_is_gone_from_a_deep_queue(
    posted: list[UUID], js: JetStreamContext, rows: Rows, repairing: Repairing, lose: Break
) -> None:
    lost = {posted[place] for place in await lose(js, repairing.stream.name, rows, posted)}
    await age(rows)
    await repairing.scan(1)
    assert await dispatched_again(rows) == lost
    await repairing.scan(3)
    assert repairing.jobs == len(lost)


@pytest.mark.usefixtures("no_look")
async def test_a_consumer_that_takes_other_messages_has_answered_for_none(
    client: JobClient, js: JetStreamContext, rows: Rows, repairing: Repairing
) -> None:
    stream = repairing.stream
    await stream.ensure([LOST, f"{LOST}=high"])
    ids = [(await client.enqueue(LOST, {}, priority="high")).id for _ in range(2)]

    async def marked() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == len(ids)

    await eventually(marked)
    config = (await js.consumer_info(stream.name, f"{LOST}=high")).config
    config.filter_subject = f"{stream.subject_of(LOST)}.hihg"
    assert (await js.add_consumer(stream.name, config)).num_pending == 0
    await age(rows)
    await repairing.scan(3)
    assert await dispatched_again(rows) == set()


async def test_messages_that_keep_vanishing_are_published_again_at_growing_intervals(
    client: JobClient, js: JetStreamContext, rows: Rows, database: Database, stream: Stream
) -> None:
    """A stream whose oldest messages are discarded, for example."""
    repairing = Repairing(database, stream, client.settings, scan_interval=60.0)
    ids = await post(client, rows, 3)
    await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 day'")
    waits = "UPDATE jsworker.jobs SET published_at = published_at - make_interval(secs => %s)"
    for dispatch, minutes in enumerate((0, 2, 5, 5), start=1):
        await js.purge_stream(stream.name)
        if minutes:
            await rows.query(waits, 60 * (minutes - 1))
            await repairing.scan(2)
            assert repairing.jobs == len(ids) * (dispatch - 1)
            await rows.query(waits, 60)
        await repairing.scan(2)
        assert repairing.jobs == len(ids) * dispatch

        async def stored_again() -> None:
            await client.publish_pending()
            assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == len(ids)

        await eventually(stored_again)
        assert (await stream.state()).messages == len(ids)


async def test_a_stream_that_was_made_anew_is_filled_again_at_once(
    posted: list[UUID], js: JetStreamContext, rows: Rows, repairing: Repairing
) -> None:
    """Whatever was dispatched before without a claim: changes of priority, pauses, waits for a key."""
    await rows.query("UPDATE jsworker.jobs SET dispatch = 8, published_at = clock_timestamp()")
    await age(rows)
    await js.delete_stream(repairing.stream.name)
    await repairing.stream.ensure([LOST])
    await repairing.scan(1)
    assert await dispatched_again(rows) == set(posted)


@pytest.mark.usefixtures("no_look")
async def test_what_a_kind_s_consumer_has_answered_for_is_gone_behind_others_messages(
    client: JobClient, js: JetStreamContext, rows: Rows, repairing: Repairing
) -> None:
    await repairing.stream.publish_many([WireMessage(new_job_id(), "another", 1)])
    ids = await post(client, rows, 2)
    await answer_for_a_stranger(js, repairing.stream.name, rows, ids)
    assert (await repairing.stream.state()).first_seq == 1
    await age(rows)
    await repairing.scan(1)
    assert await dispatched_again(rows) == {ids[0]}


@pytest.mark.usefixtures("no_look")
async def test_the_same_number_in_another_stream_is_another_message(
    posted: list[UUID], js: JetStreamContext, rows: Rows, repairing: Repairing
) -> None:
    stream = repairing.stream
    await js.delete_stream(stream.name)
    await stream.ensure([LOST])
    new = [WireMessage(new_job_id(), LOST, 1) for _ in posted]  # under the numbers of the lost ones
    await stream.publish_many(new)
    await age(rows)
    await repairing.scan(1)
    assert await dispatched_again(rows) == set(posted)


async def test_a_deep_backlog_is_never_published_again(
    make_settings: Callable[..., Settings], start: StartWorker, rows: Rows, repairing: Repairing
) -> None:
    async with JobClient(make_settings(statement_timeout=10.0)) as client:
        await client.enqueue_many(LOST, [{}] * DEEP)

        async def all_are_marked() -> None:
            await client.publish_pending()
            waiting = "SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish AND stream_seq IS NOT NULL"
            assert await rows.value(waiting) == DEEP

        await eventually(all_are_marked, seconds=60)
    await age(rows)
    running = await start(scripted(echo, kind="other"))
    scans = count_rounds(running.worker._components.repairs)
    await repairing.scan(30)
    await rounds_pass(scans, 3)
    assert (repairing.jobs, republished(running)) == (0, 0)
    assert repairing.heard.events == []
    assert await rows.value("SELECT max(dispatch) FROM jsworker.jobs") == 1
    state = await repairing.stream.state()
    assert (state.messages, state.last_seq) == (DEEP, DEEP)
