"""JetStream is there and stores nothing: jobs are claimed from the table, at full speed, meanwhile."""

from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from nats.js import JetStreamContext
from nats.js.errors import APIError

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.doctor.checks import examine
from jsworker.doctor.finding import Level
from jsworker.doctor.gather import gather
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import enqueue
from jsworker.ownership.transitions.enqueue import NewJob, new_job_id
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

pytestmark = pytest.mark.usefixtures("nothing_is_left")

JOBS = 200


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """Scans are rare: were jobs claimed by them alone, a few at a time, no test would see its end."""
    return make_settings(concurrency=2, scan_interval=15.0, ack_wait=120.0)


async def fill(js: JetStreamContext, settings: Settings) -> None:
    """Let the stream hold one message, which nobody takes, and refuse all others."""
    info = await js.stream_info(settings.stream)
    await js.publish(f"{settings.subject_prefix}.nobody", b"filler")
    await js.update_stream(info.config, max_msgs=1)
    with pytest.raises(APIError, match="maximum messages exceeded"):
        await js.publish(f"{settings.subject_prefix}.nobody", b"another")


async def empty(js: JetStreamContext, settings: Settings) -> None:
    """Let the stream store messages again."""
    await js.update_stream((await js.stream_info(settings.stream)).config, max_msgs=-1)
    await js.purge_stream(settings.stream, subject=f"{settings.subject_prefix}.nobody")


async def insert(database: Database, count: int) -> list[UUID]:
    """Queue jobs whose messages are the relay's."""
    new = [NewJob(new_job_id(), f'{{"n": {number}}}') for number in range(count)]
    for each in new:
        await enqueue.enqueue(database, KIND, each, publish_after=0.0)
    return [each.id for each in new]


async def all_complete(rows: Rows, ids: list[UUID]) -> None:
    async def check() -> None:
        done = "SELECT count(*) FROM jsworker.jobs WHERE status = 'completed' AND id = ANY(%s)"
        assert await rows.value(done, ids) == len(ids)

    await eventually(check)


def told(running: Running, name: str) -> list[dict[str, Any]]:
    return [event for event in running.events.of(name) if event["what"] == "publishing"]


async def doctor_says(settings: Settings) -> Level:
    findings = examine(await gather(settings))
    [level] = [finding.level for finding in findings if finding.check == "nats.publishing"]
    return level


async def test_jobs_are_claimed_from_the_table_until_messages_are_stored_again(
    start: StartWorker, rows: Rows, database: Database, js: JetStreamContext, settings: Settings
) -> None:
    running = await start(scripted(echo))
    await fill(js, settings)
    await all_complete(rows, await insert(database, JOBS))  # in much less time than a few for each scan
    [degraded] = told(running, "worker.degraded")
    assert degraded["reason"].endswith("maximum messages exceeded")
    assert told(running, "worker.restored") == []
    status = running.worker.status()
    assert status is not None
    assert not status.readiness.publishing
    assert status.readiness.pulling
    assert await doctor_says(settings) == "error"
    last_seq = (await js.stream_info(settings.stream)).state.last_seq
    await empty(js, settings)

    async def publishes_again() -> None:
        await all_complete(rows, await insert(database, 1))
        assert told(running, "worker.restored")

    await eventually(publishes_again)
    status = running.worker.status()
    assert status is not None
    assert status.readiness.publishing
    assert await doctor_says(settings) == "ok"
    ids = await insert(database, 20)
    await all_complete(rows, ids)
    await running.stream_is_empty()
    assert (await js.stream_info(settings.stream)).state.last_seq >= last_seq + 10
    assert await rows.query("SELECT DISTINCT attempts, stalls, errors, fencing_token FROM jsworker.jobs") == [
        {"attempts": 1, "stalls": 0, "errors": 0, "fencing_token": 1}
    ]
    assert await rows.query("SELECT * FROM jsworker.job_events") == []
    poll = running.worker._components.poll
    await poll.step()
    assert [line.in_flight for line in poll._lines] == [set()]


async def test_messages_of_producers_tell_that_the_stream_stores_again(
    start: StartWorker,
    rows: Rows,
    database: Database,
    js: JetStreamContext,
    make_settings: Callable[..., Settings],
) -> None:
    """Nothing is left to the relay, so that it has nothing to try with."""
    settings = make_settings(scan_interval=0.5, ack_wait=120.0)  # the rhythm of its looks at the stream
    running = await start(scripted(echo), with_settings=settings)
    await fill(js, settings)
    await all_complete(rows, await insert(database, 3))
    await empty(js, settings)

    async def restored() -> None:
        async with JobClient(settings) as client:
            await client.enqueue(KIND, {})
        assert told(running, "worker.restored")

    await eventually(restored)
    await running.stream_is_empty()
    assert len(told(running, "worker.degraded")) == 1


async def test_the_table_is_worked_off_at_the_pace_of_its_jobs(
    start: StartWorker,
    rows: Rows,
    database: Database,
    js: JetStreamContext,
    make_settings: Callable[..., Settings],
) -> None:
    """Its ticks are rare here, and at each a worker with two slots takes a few jobs."""
    settings = make_settings(concurrency=2, scan_interval=25.0, relay_interval=10.0, ack_wait=150.0)
    running = await start(scripted(echo), with_settings=settings)
    await fill(js, settings)
    ids = await insert(database, 4 * JOBS)
    await all_complete(rows, ids)
    assert told(running, "worker.degraded")


def fall_silent(proxy: Proxy) -> None:
    proxy.black_hole()


def answer_late(proxy: Proxy) -> None:
    """Longer than a worker waits, and shorter than until the connection counts as lost."""
    proxy.slow_down(8.0)


@pytest.mark.parametrize("disturb", [fall_silent, answer_late])
async def test_an_idle_worker_says_that_a_silent_server_answers_again(
    start: StartWorker,
    rows: Rows,
    database: Database,
    make_settings: Callable[..., Settings],
    settings: Settings,
    *,
    disturb: Callable[[Proxy], None],
) -> None:
    """The only job is claimed from the table, so that no message can tell."""
    async with proxied(settings.nats_url) as (proxy, url):
        with_settings = make_settings(nats_url=url, scan_interval=0.5, ack_wait=120.0)
        running = await start(scripted(echo), with_settings=with_settings)
        disturb(proxy)
        await all_complete(rows, await insert(database, 1))

        async def degraded() -> None:
            assert told(running, "worker.degraded")

        await eventually(degraded)
        assert told(running, "worker.restored") == []
        proxy.restore()

        async def restored() -> None:
            assert told(running, "worker.restored")

        await eventually(restored)
        assert len(told(running, "worker.degraded")) == 1
        await running.end()
