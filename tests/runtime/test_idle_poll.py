"""The idle poll: jobs whose message went to somebody who never answers are claimed from the table."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any
from uuid import UUID

import nats
import pytest
from nats.js import JetStreamContext

from jsworker.client import JobClient
from jsworker.runtime.clock import boottime
from jsworker.settings import Settings
from tests.conftest import FAST
from tests.runtime.processors import KIND, Gate, echo, scripted
from tests.runtime.rows import Rows
from tests.runtime.running import Running, StartWorker, new_worker
from tests.support.leaks import nothing_left
from tests.support.rounds import count_rounds, rounds_pass

SCAN = FAST["scan_interval"]


pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture(autouse=True)
async def _nothing_left(database_url: str) -> AsyncIterator[None]:
    async with nothing_left(database_url):
        yield


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
                pulled += len(await pull.fetch(count - pulled, timeout=5))
            except nats.errors.TimeoutError:
                raise AssertionError(f"{pulled} of {count} messages came") from None
        await pull.unsubscribe()
        return ids

    return enqueue_and_pull


class Taken:
    """The claims that a worker began without a message."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        self.claims: list[tuple[float, UUID]] = []
        [consumer] = running.worker._parts.consumers
        take = consumer.take

        def note(job_id: UUID) -> None:
            self.claims.append((boottime(), job_id))
            take(job_id)

        monkeypatch.setattr(consumer, "take", note)


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
        assert 2 * SCAN <= waited < 2 * SCAN + 8
    assert running.events.of("message.republished") == []


async def test_a_worker_that_is_kept_busy_takes_one_such_job_a_scan(
    client: JobClient,
    swallow: Callable[[int], Any],
    start: StartWorker,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forgotten = await swallow(4)
    await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 minute'")
    running = await start(scripted(echo))
    taken = Taken(running, monkeypatch)
    enough = asyncio.Event()

    async def keep_busy() -> None:
        while not enough.is_set():
            await client.enqueue(KIND, {})
            await asyncio.sleep(SCAN / 10)  # the load itself

    async with asyncio.TaskGroup() as load:
        load.create_task(keep_busy())
        for job_id in forgotten:
            await rows.becomes(job_id, "completed")
        enough.set()
    claims = [(at, job_id) for at, job_id in taken.claims if job_id in forgotten]
    assert len(claims) == 4
    assert all(later - earlier > SCAN / 2 for (earlier, _), (later, _) in pairwise(claims))
    # Whoever waits for the longest time comes first.
    assert [job_id for _, job_id in claims] == forgotten


async def test_a_worker_without_free_slots_takes_nothing(
    swallow: Callable[[int], Any],
    start: StartWorker,
    rows: Rows,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [forgotten] = await swallow(1)
    gate = Gate()
    running = await start(
        scripted(gate.process), with_settings=settings.model_copy(update={"concurrency": 1})
    )
    taken = Taken(running, monkeypatch)
    async with JobClient(settings) as client:
        own = await client.enqueue(KIND, {})
    assert (await gate.met()).id == own.id
    await rows.query("UPDATE jsworker.jobs SET queued_at = queued_at - interval '1 minute'")
    await rounds_pass(count_rounds(running.worker._parts.scans), 4)
    assert taken.claims == []
    gate.open()
    await rows.becomes(forgotten, "completed")
    assert [job_id for _, job_id in taken.claims] == [forgotten]
