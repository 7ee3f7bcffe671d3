"""A client publishes what ``enqueue_many`` has stored from memory; relays take what it does not get to."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

from jsworker import JobClient
from jsworker.client import client_publisher, enqueueing
from jsworker.client.publishing import Tally
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import enqueue_terms, publish
from jsworker.ownership.transitions.publish import Outgoing, take_outgoing
from tests.support.polling import eventually
from tests.worker.rows import Rows

KIND = "kind"
MakeSettings = Callable[..., Settings]
_UNPUBLISHED = "SELECT count(*) FROM jsworker.jobs WHERE needs_publish"


@pytest.fixture(autouse=True)
def _relays_are_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine does, what is kept is published in time."""
    monkeypatch.setattr(client_publisher, "_RESERVED_SECONDS", 60.0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[list[Outgoing]]:
    """What the client took from the outbox, each time."""
    found: list[list[Outgoing]] = []

    async def take(database: Database, **options: Any) -> list[Outgoing]:
        found.append(await take_outgoing(database, **options))
        return found[-1]

    monkeypatch.setattr(publish, "take_outgoing", take)
    return found


@pytest.fixture
def unpublished(client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is killed between the commit and the first message."""
    monkeypatch.setattr(client.publisher, "start_publishing", lambda: None)


async def all_published(rows: Rows, jobs: int) -> None:
    async def published() -> None:
        count = await rows.value("SELECT count(*) FROM jsworker.jobs WHERE published_at IS NOT NULL")
        assert (count, await rows.value(_UNPUBLISHED)) == (jobs, 0)

    await eventually(published)


async def messages_of(js: JetStreamContext, settings: Settings) -> int:
    return (await js.stream_info(settings.stream)).state.messages


async def test_what_was_stored_is_not_read_again(
    client: JobClient, rows: Rows, taken: list[list[Outgoing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 4)
    monkeypatch.setattr(client_publisher, "_BATCH", 3)
    await client.enqueue_many(KIND, [{"n": n} for n in range(10)])
    await all_published(rows, 10)
    assert taken == []
    assert not client.publisher._kept


@pytest.fixture
def marks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is marked later than at once is not marked before somebody asks for it."""
    monkeypatch.setattr(client_publisher, "MARK_SECONDS", 3600.0)


async def test_a_few_jobs_may_be_claimed_before_anybody_marks_them(
    marks_wait: None, rows: Rows, js: JetStreamContext, settings: Settings
) -> None:
    """A mark would hold the locks of their rows as their messages arrive, and no claim waits for a lock."""

    async def published() -> None:
        assert await messages_of(js, settings) == 3
        assert client.publisher._marks.is_busy

    async with JobClient(settings) as client:
        await client.enqueue_many(KIND, [{}] * 3)
        await eventually(published)
        assert await rows.value(_UNPUBLISHED) == 3
        assert await client.publish_pending() == 0
        assert await rows.value(_UNPUBLISHED) == 3
    assert await rows.value(_UNPUBLISHED) == 0


async def test_publish_pending_marks_a_few_jobs_later_too(
    marks_wait: None, rows: Rows, settings: Settings
) -> None:
    async with JobClient(settings) as client:
        await client.enqueue(KIND, {}, delay=3600.0)
        await rows.query(
            "UPDATE jsworker.jobs SET status = 'queued', dispatch = 1, needs_publish = true,"
            " queued_at = clock_timestamp(), publish_after = clock_timestamp()"
        )
        assert await client.publish_pending() == 1
        assert await rows.value(_UNPUBLISHED) == 1
    assert await rows.value(_UNPUBLISHED) == 0


async def test_a_client_ends_without_its_marks_while_postgresql_does_not_answer(
    marks_wait: None, rows: Rows, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_MARK_AT_END_SECONDS", 0.1)
    given_up = asyncio.Event()

    async def mark(_database: Database, _sent: Any) -> int:
        try:
            await asyncio.sleep(3600.0)
        finally:
            given_up.set()
        raise AssertionError("never")

    monkeypatch.setattr(publish, "mark", mark)
    client = JobClient(settings)
    async with client:
        await client.enqueue(KIND, {})
    assert given_up.is_set()
    monkeypatch.undo()
    async with client:  # opened again, it marks
        await client.enqueue(KIND, {})
    assert await rows.value(_UNPUBLISHED) == 1


async def test_the_last_marks_come_after_the_claims_of_what_was_published_just_now(
    marks_wait: None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_LAST_CLAIMS_SECONDS", 0.2)
    marked: list[float] = []

    async def mark(_database: Database, sent: Sequence[Any]) -> int:
        marked.append(asyncio.get_running_loop().time())
        return len(sent)

    monkeypatch.setattr(publish, "mark", mark)
    async with JobClient(settings) as client:
        await client.enqueue(KIND, {})
        published = asyncio.get_running_loop().time()
    assert len(marked) == 1
    assert marked[0] - published >= 0.2


async def test_a_client_whose_close_is_cancelled_disconnects(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = JobClient(settings)
    await client.open()
    await client.enqueue(KIND, {})
    marking = asyncio.Event()

    async def flush() -> None:
        marking.set()
        await asyncio.sleep(3600.0)

    monkeypatch.setattr(client_publisher, "_MARK_AT_END_SECONDS", 3600.0)
    monkeypatch.setattr(client.publisher._marks, "flush", flush)
    closing = asyncio.create_task(client.close())
    await marking.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert client.publisher.stream is None
    assert all(pool._closed for pool in client.database.pools_by_name().values())


async def test_of_what_is_not_kept_the_outbox_is_asked(
    client: JobClient, rows: Rows, taken: list[list[Outgoing]]
) -> None:
    await client.enqueue_many(KIND, [{}] * 2, expires_in=600.0)
    await all_published(rows, 2)
    assert sum(map(len, taken)) == 2


async def test_of_a_client_that_dies_relays_take_it_later(
    client: JobClient, rows: Rows, database: Database, unpublished: None
) -> None:
    handles = await client.enqueue_many(KIND, [{}] * 3)
    [row] = await rows.query("SELECT max(publish_after - queued_at) AS later FROM jsworker.jobs")
    assert 30 < row["later"].total_seconds() < 90
    assert await take_outgoing(database, limit=10) == []
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp()")
    assert {job.id for job in await take_outgoing(database, limit=10)} == {handle.id for handle in handles}


async def test_more_than_it_keeps_is_taken_from_the_outbox(
    client: JobClient, rows: Rows, taken: list[list[Outgoing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    monkeypatch.setattr(client_publisher, "_MOST_KEPT", 4)
    await client.enqueue_many(KIND, [{}] * 10)
    await all_published(rows, 10)
    assert 0 < sum(map(len, taken)) <= 8


async def test_many_calls_at_once_fill_no_memory(
    client: JobClient, rows: Rows, unpublished: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_MOST_KEPT", 4)
    monkeypatch.setattr(client_publisher, "_MOST_OF_CALLS_AT_ONCE", 8)
    publisher = client.publisher
    await asyncio.gather(*(client.enqueue_many(KIND, [{}] * 3) for _ in range(5)))
    assert publisher._jobs_kept == sum(len(kept.ids) for kept in publisher._kept) == 8
    assert "workers publish" in str(client.unpublished_because)
    assert await rows.value(_UNPUBLISHED) == 15


async def test_what_relays_are_about_to_take_is_left_to_them(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_LEAST_SECONDS", 100.0)
    await client.enqueue_many(KIND, [{}] * 3)

    async def given_up() -> None:
        assert client.publisher._publishing is not None
        assert client.publisher._publishing.done()

    await eventually(given_up)
    assert (len(client.publisher._kept), client.publisher._jobs_kept) == (0, 0)
    assert await rows.value(_UNPUBLISHED) == 3
    assert "workers publish them" in str(client.unpublished_because)


async def test_while_the_stream_is_silent_nothing_is_kept(
    client: JobClient, rows: Rows, database: Database, unpublished: None
) -> None:
    await client.enqueue_many(KIND, [{}])
    client.publisher.silent_because = "it does not answer"
    assert await client.publish_pending() == 0
    stream = client.publisher.stream
    assert stream is not None
    await client.publisher._publish_kept(stream, Tally())
    assert not client.publisher._kept
    [later] = await client.enqueue_many(KIND, [{}])
    assert not client.publisher._kept
    assert [job.id for job in await take_outgoing(database, limit=10)] == [later.id]  # at once


async def test_small_calls_go_together(
    client: JobClient, unpublished: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_BATCH", 5)
    publisher = client.publisher
    for size in (2, 2, 2, 7):
        await client.enqueue_many(KIND, [{}] * size)
    assert [len(await publisher._take_kept()) for _ in range(4)] == [4, 2, 5, 2]
    assert (await publisher._take_kept(), publisher._jobs_kept) == ([], 0)


async def test_relays_leave_more_time_for_many(client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_publisher, "_RESERVED_SECONDS", 5.0)
    publisher = client.publisher
    assert publisher.reserved_seconds_for(1) == pytest.approx(5.0, abs=0.01)
    assert publisher.reserved_seconds_for(40_000) == pytest.approx(9.0)
    assert publisher.reserved_seconds_for(50_001) == 0


async def test_a_stream_that_refuses_is_not_tried_again_before_it_has_stored_something(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings
) -> None:
    config = (await js.stream_info(settings.stream)).config
    await js.publish(f"{settings.subject_prefix}.{KIND}", b"filler")
    await js.update_stream(config, max_msgs=1, discard=DiscardPolicy.NEW)
    publisher = client.publisher

    async def at_rest() -> None:
        assert publisher._publishing is not None
        assert publisher._publishing.done()
        assert publisher.silent_because is not None

    for _ in range(2):
        await client.enqueue_many(KIND, [{}] * 3)
        await eventually(at_rest)
        assert not publisher._kept
    assert publisher.reserved_seconds_for(1) == 0
    assert await rows.value(_UNPUBLISHED) == 6

    await js.update_stream(config, max_msgs=-1)
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp()")
    await client.enqueue_many(KIND, [{}])
    await all_published(rows, 7)
    assert publisher.reserved_seconds_for(1) > 0


@pytest.mark.usefixtures("copied_or_inserted")
async def test_no_setting_of_the_login_changes_the_time(
    database_url: str, make_settings: MakeSettings, rows: Rows
) -> None:
    name = urlsplit(database_url).path.removeprefix("/")
    await rows.query(f"ALTER DATABASE {name} SET DateStyle = 'German, DMY'")
    await rows.query(f"ALTER DATABASE {name} SET TimeZone = 'America/St_Johns'")
    async with JobClient(make_settings()) as client:
        await client.enqueue_many(KIND, [{}] * 3)
        later = await rows.value(
            "SELECT CAST(extract(epoch FROM max(publish_after - queued_at)) AS float) FROM jsworker.jobs"
        )
        assert 30 < later < 90


async def test_payloads_are_not_kept(client: JobClient, unpublished: None) -> None:
    """Ids alone: fifty thousand payloads of a megabyte would fill any memory."""
    await client.enqueue_many(KIND, [{"text": "a large one"}])
    [kept] = client.publisher._kept
    assert len(kept.ids) == 1
    assert "a large one" not in repr(kept)


async def test_publish_pending_publishes_it_with_the_outbox(
    client: JobClient, rows: Rows, unpublished: None
) -> None:
    await client.enqueue_many(KIND, [{}] * 3)
    await client.enqueue_many(KIND, [{}] * 2)
    [*_, last] = client.publisher._kept
    client.publisher._kept.pop()
    await rows.query(
        "UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE id = ANY(%s)", last.ids
    )
    assert await client.publish_pending() == 5
    await all_published(rows, 5)


async def test_only_what_was_created_is_published(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings
) -> None:
    await client.enqueue(KIND, {}, unique_key="a")
    existing, created = await client.enqueue_many(KIND, [{}, {}], unique_keys=["a", "b"])
    assert (existing.created, created.created) == (False, True)
    await all_published(rows, 2)
    assert await messages_of(js, settings) == 2


@pytest.mark.parametrize("options", [{"delay": 60.0}, {"expires_in": 60.0}])
async def test_what_is_not_due_or_has_terms_is_not_kept(
    client: JobClient, rows: Rows, unpublished: None, options: dict[str, Any]
) -> None:
    await client.enqueue_many(KIND, [{}] * 2, **options)
    assert not client.publisher._kept
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE publish_after > clock_timestamp()") == 0


@pytest.mark.parametrize("most_kept", [0, 100])
async def test_what_was_stored_before_an_error_is_published(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch, most_kept: int
) -> None:
    monkeypatch.setattr(client_publisher, "_MOST_KEPT", most_kept)
    insert = enqueue_terms.enqueue_many
    statements = 0

    async def fail_later(database: Database, kind: str, new: Sequence[Any], **options: Any) -> Any:
        nonlocal statements
        statements += 1
        if statements > 1:
            raise DatabaseUnavailable("gone")
        return await insert(database, kind, new, **options)

    monkeypatch.setattr(enqueue_terms, "enqueue_many", fail_later)
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    monkeypatch.setattr(enqueueing, "_AT_ONCE", 1)
    with pytest.raises(DatabaseUnavailable):
        await client.enqueue_many(KIND, [{}] * 4)
    await all_published(rows, 2)
