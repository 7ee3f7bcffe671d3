"""A full outbox is published in several batches at once; a short batch, or an error, ends them all."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.client import publishing as publishing_of_client
from jsworker.client.publishing import OutboxPublisher
from jsworker.core.errors import DatabaseUnavailable, PublishFailed
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import publish as outbox_statements
from jsworker.ownership.transitions.publish import Outgoing, Sent, take_outgoing
from jsworker.ownership.transitions.refused_rows import RefusedRows
from tests.support.polling import eventually
from tests.worker.rows import Rows

KIND = "kind"
LIMIT = 2
AT_ONCE = 4

MakeSettings = Callable[..., Settings]
Publish = Callable[[Callable[[], Awaitable[list[Outgoing]]]], OutboxPublisher]


@pytest.fixture
async def outbox(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Awaitable[None]]:
    """Fills the outbox: enqueues without NATS."""

    async def fill(jobs: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr("jsworker.client.client_publisher._CONNECT_SECONDS", 0.3)
            async with JobClient(make_settings(nats_url="nats://127.0.0.1:1")) as absent:
                await absent.enqueue_many(KIND, [{}] * jobs)

    return fill


@pytest.fixture
def publishing(client: JobClient, database: Database) -> Publish:
    """Makes publishers of small batches on the client's stream."""
    stream = client.publisher.stream
    assert stream is not None

    def new_publisher(take: Callable[[], Awaitable[list[Outgoing]]]) -> OutboxPublisher:
        return OutboxPublisher(database, stream, limit=LIMIT, take=take)

    return new_publisher


async def test_batches_are_under_way_at_once_and_all_is_published_once(
    outbox: Callable[[int], Awaitable[None]],
    publishing: Publish,
    database: Database,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await outbox(25)
    together = asyncio.Barrier(AT_ONCE)
    marks = taking = 0

    async def take() -> list[Outgoing]:
        nonlocal taking
        taking += 1
        outgoing = await take_outgoing(database, limit=LIMIT)
        assert taking == 1  # a second PUBLISH would lock what this one has taken, and MARK skip it
        taking -= 1
        return outgoing

    async def mark(database: Database, sent: Sequence[Sent], _refused_rows: RefusedRows | None) -> int:
        nonlocal marks
        marks += 1
        if 1 < marks <= 1 + AT_ONCE:  # the first batch goes alone
            async with asyncio.timeout(10):
                await together.wait()
        return await outbox_statements.mark(database, sent)

    monkeypatch.setattr(publishing_of_client, "mark", mark)
    tally = await publishing(take).publish()

    assert (tally.published, tally.failed) == (25, None)
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == 25
    assert await rows.value("SELECT count(DISTINCT stream_seq) FROM jsworker.jobs") == 25


async def test_a_short_batch_is_the_only_one(
    outbox: Callable[[int], Awaitable[None]], publishing: Publish, database: Database
) -> None:
    await outbox(1)
    calls = 0

    async def take() -> list[Outgoing]:
        nonlocal calls
        calls += 1
        return await take_outgoing(database, limit=LIMIT)

    assert (await publishing(take).publish()).published == 1
    assert calls == 1


@pytest.mark.parametrize(("few", "marked"), [(2, 3), (3, 0)])
async def test_few_messages_are_marked_later_and_many_at_once(  # noqa: PLR0917 -- fixtures
    client: JobClient,
    outbox: Callable[[int], Awaitable[None]],
    database: Database,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
    few: int,
    marked: int,
) -> None:
    monkeypatch.setattr(publishing_of_client, "_FEW", few)
    stream = client.publisher.stream
    assert stream is not None
    later: list[Sent] = []
    await outbox(3)

    publisher = OutboxPublisher(database, stream, limit=10, mark_later=later.append)
    assert (await publisher.publish()).published == 3

    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == marked
    assert len({sent.id for sent in later}) == 3 - marked
    if later:
        assert await outbox_statements.mark(database, later) == 3


async def test_beside_one_that_failed_the_others_are_marked_at_once(
    client: JobClient,
    outbox: Callable[[int], Awaitable[None]],
    database: Database,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wait for it has taken as long as relays leave the others alone."""
    stream = client.publisher.stream
    assert stream is not None
    publish_traced = publishing_of_client.publish_traced

    async def lose_one(*arguments: Any, **named: Any) -> Any:
        _, *others = await publish_traced(*arguments, **named)
        return [PublishFailed("no answer"), *others]

    monkeypatch.setattr(publishing_of_client, "publish_traced", lose_one)
    later: list[Sent] = []
    await outbox(3)
    publisher = OutboxPublisher(database, stream, limit=10, mark_later=later.append)
    assert (await publisher.publish()).published == 2
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == 2
    assert later == []


async def test_an_error_ends_all_of_them_and_leaves_nothing_half_done(
    outbox: Callable[[int], Awaitable[None]], publishing: Publish, database: Database, rows: Rows
) -> None:
    await outbox(40)
    calls = 0

    async def take() -> list[Outgoing]:
        nonlocal calls
        calls += 1
        if calls == 1 + AT_ONCE:
            raise DatabaseUnavailable("gone")
        return await take_outgoing(database, limit=LIMIT)

    before = asyncio.all_tasks()
    with pytest.raises(DatabaseUnavailable, match="gone"):
        await publishing(take).publish()

    left = {task for task in asyncio.all_tasks() - before if "publish" in repr(task.get_coro())}
    assert left == set()
    assert calls == 1 + AT_ONCE  # nobody begins another batch
    taken = "SELECT count(*) FROM jsworker.jobs WHERE publish_after > clock_timestamp() AND needs_publish"
    assert await rows.value(taken) == 0  # what others had taken is published and marked
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == AT_ONCE * LIMIT


async def test_a_stream_that_takes_nothing_is_not_asked_for_ever(
    outbox: Callable[[int], Awaitable[None]],
    publishing: Publish,
    database: Database,
    js: JetStreamContext,
    settings: Settings,
) -> None:
    await outbox(20)
    await js.delete_stream(settings.stream)
    calls = 0

    async def take() -> list[Outgoing]:
        nonlocal calls
        calls += 1
        return await take_outgoing(database, limit=LIMIT)

    tally = await publishing(take).publish()

    assert (calls, tally.published) == (1, 0)
    assert tally.failed is not None


async def test_what_is_refused_of_one_subject_alone_is_no_refusal_of_the_stream(  # noqa: PLR0917 -- fixtures
    client: JobClient,
    outbox: Callable[[int], Awaitable[None]],
    publishing: Publish,
    database: Database,
    rows: Rows,
    js: JetStreamContext,
    settings: Settings,
) -> None:
    full = "full"
    await js.update_stream(
        (await js.stream_info(settings.stream)).config, max_msgs_per_subject=1, discard_new_per_subject=True
    )
    await js.publish(f"{settings.subject_prefix}.{full}", b"filler")
    await outbox(3)
    [one] = await rows.query("SELECT id FROM jsworker.jobs ORDER BY id LIMIT 1")
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp()")
    await rows.query("UPDATE jsworker.jobs SET kind = %s WHERE id <> %s", full, one["id"])

    publisher = publishing(lambda: take_outgoing(database, limit=10))
    tally = await publisher.publish()
    assert (tally.published, tally.stored, tally.refused) == (1, 1, None)
    assert tally.failed is not None

    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp() WHERE needs_publish")
    tally = await publisher.publish()  # by itself it tells nothing of the others
    assert tally.refused is not None


async def test_a_request_right_after_the_last_look_is_served_at_once(
    client: JobClient, outbox: Callable[[int], Awaitable[None]], rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the event loop has told anybody that the task of the requests before has ended."""
    publish_all = client.publisher._publish_all
    asked = 0

    async def publish_all_and_ask(publisher: OutboxPublisher, tally: publishing_of_client.Tally) -> None:
        nonlocal asked
        await publish_all(publisher, tally)
        if not asked:
            await outbox(1)
            asked += 1
            asyncio.get_running_loop().call_soon(client.publisher.publish_in_background)

    monkeypatch.setattr(client.publisher, "_publish_all", publish_all_and_ask)
    await client.enqueue_many(KIND, [{}])

    async def all_published() -> None:
        waiting = await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish")
        assert (asked, waiting) == (1, 0)

    await eventually(all_published)
