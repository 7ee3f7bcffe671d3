"""A client publishes what ``enqueue_many`` has stored from memory; relays take what it does not get to."""

from collections.abc import Sequence
from typing import Any

import pytest
from nats.js import JetStreamContext

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
_UNPUBLISHED = "SELECT count(*) FROM jsworker.jobs WHERE needs_publish"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Outgoing]:
    """What the client took from the outbox."""
    found: list[Outgoing] = []

    async def take(database: Database, **options: Any) -> list[Outgoing]:
        outgoing = await take_outgoing(database, **options)
        found.extend(outgoing)
        return outgoing

    monkeypatch.setattr(publish, "take_outgoing", take)
    return found


@pytest.fixture
def unpublished(client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is killed between the commit and the first message."""
    monkeypatch.setattr(client._publisher, "publish_in_background", lambda **_: None)


async def all_published(rows: Rows, jobs: int) -> None:
    async def published() -> None:
        count = await rows.value("SELECT count(*) FROM jsworker.jobs WHERE published_at IS NOT NULL")
        assert (count, await rows.value(_UNPUBLISHED)) == (jobs, 0)

    await eventually(published)


async def messages_of(js: JetStreamContext, settings: Settings) -> int:
    return (await js.stream_info(settings.stream)).state.messages


async def test_what_was_stored_is_not_read_again(
    client: JobClient, rows: Rows, taken: list[Outgoing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 4)
    monkeypatch.setattr(client_publisher, "_BATCH", 3)
    await client.enqueue_many(KIND, [{"n": n} for n in range(10)])
    await all_published(rows, 10)
    assert taken == []
    assert not client._publisher._kept


async def test_of_a_client_that_dies_relays_take_it_after_five_seconds(
    client: JobClient, rows: Rows, database: Database, unpublished: None
) -> None:
    handles = await client.enqueue_many(KIND, [{}] * 3)
    [row] = await rows.query("SELECT max(publish_after - queued_at) AS later FROM jsworker.jobs")
    assert 4 < row["later"].total_seconds() < 60
    assert await take_outgoing(database, limit=10) == []
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp()")
    assert {job.id for job in await take_outgoing(database, limit=10)} == {handle.id for handle in handles}


async def test_more_than_it_keeps_is_taken_from_the_outbox(
    client: JobClient, rows: Rows, taken: list[Outgoing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    monkeypatch.setattr(client_publisher, "_MOST_KEPT", 4)
    await client.enqueue_many(KIND, [{}] * 10)
    await all_published(rows, 10)
    assert 0 < len(taken) <= 8


async def test_what_relays_are_about_to_take_is_left_to_them(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_publisher, "_LEAST_SECONDS", 10.0)
    await client.enqueue_many(KIND, [{}] * 3)

    async def given_up() -> None:
        assert client._publisher._publishing is not None
        assert client._publisher._publishing.done()

    await eventually(given_up)
    assert not client._publisher._kept
    assert await rows.value(_UNPUBLISHED) == 3


async def test_while_the_stream_is_silent_nothing_is_kept(
    client: JobClient, rows: Rows, database: Database, unpublished: None
) -> None:
    await client.enqueue_many(KIND, [{}])
    client._publisher.silent_because = "it does not answer"
    assert await client.publish_pending() == 0
    stream = client._publisher.stream
    assert stream is not None
    await client._publisher._publish_kept(stream, Tally())
    assert not client._publisher._kept
    [later] = await client.enqueue_many(KIND, [{}])
    assert not client._publisher._kept
    assert [job.id for job in await take_outgoing(database, limit=10)] == [later.id]  # at once


async def test_payloads_are_not_kept(client: JobClient, unpublished: None) -> None:
    """Ids alone: fifty thousand payloads of a megabyte would fill any memory."""
    await client.enqueue_many(KIND, [{"text": "a large one"}])
    [kept] = client._publisher._kept
    assert len(kept.ids) == 1
    assert "a large one" not in repr(kept)


async def test_publish_pending_publishes_it_with_the_outbox(
    client: JobClient, rows: Rows, unpublished: None
) -> None:
    await client.enqueue_many(KIND, [{}] * 3)
    await client.enqueue_many(KIND, [{}] * 2)
    client._publisher._kept.pop()
    await rows.query("UPDATE jsworker.jobs SET publish_after = clock_timestamp()")
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
    assert not client._publisher._kept
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE publish_after > clock_timestamp()") == 0


async def test_what_was_stored_before_an_error_is_published(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
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
