"""Priorities in a worker: lanes open on demand, take turns of 8 : 3 : 1, and nobody starves."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from nats.js import JetStreamContext

from jsworker import JobClient
from jsworker.core.errors import TransitionRefused
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.stream.message import subject_of
from jsworker.worker.pipeline import slots as slots_module
from tests.conftest import UNHURRIED
from tests.support.polling import eventually
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

MakeSettings = Callable[..., Settings]


@pytest.fixture
def pace(patient: None) -> dict[str, Any]:
    """What was claimed ahead is handed back after a heartbeat's time without a slot: here, never.

    Statements take their time, too: what a claim's lost answer leaves behind would wait for a heartbeat.
    """
    return UNHURRIED | {"heartbeat_interval": 100.0, "stale_threshold": 400.0, "ack_wait": 800.0}


class Order:
    """Notes in which order jobs begin, by what their payload says; each takes its time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.begun: list[str] = []
        self.gate = asyncio.Event()

    async def process(self, job: Job[Any]) -> None:
        if job.payload["as"] != "warm":
            await self.gate.wait()
            self.begun.append(job.payload["as"])
        await asyncio.sleep(self._seconds)


async def with_open_lanes(
    client: JobClient, rows: Rows, start: StartWorker, *processors: JobProcessor[Any], settings: Settings
) -> Running:
    """Start a worker that has done a job of each priority."""
    running = await start(*processors, with_settings=settings)
    for processor in processors:
        for priority in ("high", "normal", "low"):
            job = await client.enqueue(processor.kind, {"as": "warm"}, priority=priority)
            await rows.becomes(job.id, "completed")
    return running


async def enqueue(client: JobClient, jobs: dict[str, int], kind: str = KIND) -> None:
    for priority, count in jobs.items():
        await client.enqueue_many(kind, [{"as": priority}] * count, priority=priority)  # type: ignore[call-overload] # one of them


async def begun(order: Order, count: int) -> list[str]:
    async def enough() -> list[str]:
        assert len(order.begun) >= count, Counter(order.begun)
        return list(order.begun)

    return await eventually(enough)


async def test_a_lane_opens_with_its_first_job_and_not_before(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings, start: StartWorker
) -> None:
    running = await start(scripted(echo))
    done = await client.enqueue(KIND, {})
    await rows.becomes(done.id, "completed")
    names = {each.name for each in await js.consumers_info(settings.stream)}
    assert names == {KIND}
    job = await client.enqueue(KIND, {}, priority="high")
    assert (await rows.becomes(job.id, "completed"))["priority"] == 0

    async def opened() -> None:  # the job may have come from the table before
        names = {each.name for each in await js.consumers_info(settings.stream)}
        assert names == {KIND, f"{KIND}=high"}

    await eventually(opened)
    pullers = {puller.name for puller in running.worker._components.pipeline.pullers}
    assert pullers == {KIND, f"{KIND}=high"}
    await running.stream_is_empty()


async def test_a_worker_that_starts_pulls_from_the_lanes_that_there_are(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    first = await with_open_lanes(client, rows, start, scripted(echo), settings=make_settings())
    await first.end()
    second = await start(scripted(echo), with_settings=make_settings())

    async def opened() -> None:
        pullers = {puller.name for puller in second.worker._components.pipeline.pullers}
        assert pullers == {KIND, f"{KIND}=high", f"{KIND}=low"}

    await eventually(opened)


async def test_the_lane_of_a_class_is_open_from_the_start(
    client: JobClient, rows: Rows, js: JetStreamContext, settings: Settings, start: StartWorker
) -> None:
    urgent = scripted(echo, priority="high")
    running = await start(urgent)
    assert {each.name for each in running.worker._components.pipeline.consumers} == {KIND, f"{KIND}=high"}
    job = await client.enqueue(type(urgent), {})
    assert (await rows.becomes(job.id, "completed"))["priority"] == 0
    other = await client.enqueue(type(urgent), {}, priority="low")
    assert (await rows.becomes(other.id, "completed"))["priority"] == 2


@pytest.mark.parametrize("expects_short_runs", [False, True], ids=["long runs", "short runs"])
async def test_a_high_job_begins_before_all_that_were_claimed_ahead(
    client: JobClient,
    rows: Rows,
    make_settings: MakeSettings,
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    expects_short_runs: bool,
) -> None:
    order = Order()
    settings = make_settings(concurrency=1)
    running = await with_open_lanes(client, rows, start, scripted(order.process), settings=settings)
    slots = running.worker._components.pipeline.slots
    slots._mean_seconds[KIND] = 0.001 if expects_short_runs else 100.0
    await enqueue(client, {"normal": 300, "low": 50})
    pullers = running.worker._components.pipeline.pullers

    async def taken() -> None:
        assert slots._taken == 1
        if expects_short_runs:
            assert slots._in_line[1] >= 20
        else:  # what was asked for while runs were short is withdrawn
            assert sum(puller._credit.total for puller in pullers) == 0

    await eventually(taken)
    monkeypatch.setattr(slots_module, "_GRACE_SECONDS", 60.0)  # however busy the machine is
    high = await client.enqueue(KIND, {"as": "high"}, priority="high")
    if expects_short_runs:
        await rows.becomes(high.id, "processing")  # claimed though the line was full of others

        async def in_line() -> None:  # the answer to the claim is a moment behind its commit
            assert slots._in_line[0] == 1

        await eventually(in_line)
    order.gate.set()
    names = await begun(order, 2)
    assert "high" in names[:2], names[:20]


async def test_lanes_take_turns_of_8_3_1_and_nobody_starves(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    order = Order(seconds=0.01)
    settings = make_settings(concurrency=2)
    running = await with_open_lanes(client, rows, start, scripted(order.process), settings=settings)
    slots = running.worker._components.pipeline.slots
    slots._mean_seconds[KIND] = 0.001
    await enqueue(client, {"low": 200, "normal": 400, "high": 800})

    async def in_line() -> None:  # so many that no turn depends on claims that are late
        high, normal, low, _ = slots._in_line
        assert high >= 80, slots._in_line
        assert normal >= 30, slots._in_line
        assert low >= 10, slots._in_line

    await eventually(in_line)
    order.gate.set()
    first = Counter((await begun(order, 120))[:120])
    for priority, turns in (("high", 80), ("normal", 30), ("low", 10)):
        assert abs(first[priority] - turns) <= 3, first


async def test_a_lane_that_has_work_alone_gets_everything(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    gate = Gate()

    async def process(job: Job[Any]) -> None:
        if job.payload["as"] != "warm":
            await gate.process(job)

    settings = make_settings(concurrency=6)
    await with_open_lanes(client, rows, start, scripted(process), settings=settings)
    await enqueue(client, {"low": 12})

    async def all_slots() -> None:
        assert gate.waiting == 6

    await eventually(all_slots)
    gate.open()


async def test_priorities_hold_among_the_kinds_of_a_worker(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    order = Order(seconds=0.01)
    settings = make_settings(concurrency=1)
    processors = [scripted(order.process, kind="flood"), scripted(order.process, kind="rare")]
    running = await with_open_lanes(client, rows, start, *processors, settings=settings)
    slots = running.worker._components.pipeline.slots
    for kind in ("flood", "rare"):
        slots._mean_seconds[kind] = 0.001
    await enqueue(client, {"low": 300}, "flood")
    await enqueue(client, {"normal": 40}, "rare")

    async def in_line() -> None:  # so many that no turn depends on claims that are late
        assert slots._in_line[1] >= 12, slots._in_line
        assert slots._in_line[2] >= 4, slots._in_line

    await eventually(in_line)
    order.gate.set()
    first = Counter((await begun(order, 16))[:16])
    assert first["normal"] >= 2 * first["low"], first


async def test_without_messages_the_table_brings_jobs_by_their_priority(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    order = Order(seconds=0.02)
    settings = make_settings(concurrency=1)
    running = await with_open_lanes(client, rows, start, scripted(order.process), settings=settings)
    slots = running.worker._components.pipeline.slots
    slots._mean_seconds[KIND] = 0.001
    running.worker._context.publishing.failed("the test says so")
    await rows.query(
        "INSERT INTO jsworker.jobs "
        "(id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at, priority) "
        "SELECT gen_random_uuid(), %s, jsonb_build_object('as', (ARRAY['high', 'normal', 'low'])[p + 1]), "
        "'queued', 1, true, now() + interval '1 hour', now() - (60 + p) * interval '1 minute', p "
        "FROM generate_series(1, 60) AS n, generate_series(0, 2) AS p",
        KIND,
    )

    async def in_line() -> None:  # so many that no turn depends on claims that are late
        high, normal, low, _ = slots._in_line
        assert high >= 24, slots._in_line
        assert normal >= 9, slots._in_line
        assert low >= 3, slots._in_line

    await eventually(in_line)
    order.gate.set()
    first = Counter((await begun(order, 36))[:36])
    assert first["high"] > first["normal"] > first["low"] >= 1, first


@pytest.mark.parametrize("closed_by", ["pause", "dead letters"])
async def test_a_kind_that_may_claim_nothing_leaves_its_turns_to_others(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker, closed_by: str
) -> None:
    gate = Gate()
    urgent, other = scripted(gate.process, kind="urgent", priority="high"), scripted(echo, kind="other")
    await client.enqueue_many("urgent", [{}] * 10, priority="high")
    running = await start(urgent, other, with_settings=make_settings(concurrency=1))
    pipeline = running.worker._components.pipeline
    pipeline.slots._mean_seconds |= {"urgent": 100.0, "other": 100.0}  # nothing is claimed ahead
    await gate.met()
    [high] = [each for each in pipeline.consumers if each.name == "urgent=high"]

    async def has_more() -> None:
        assert high.has_more

    await eventually(has_more)
    if closed_by == "pause":
        await client.pause("urgent", reason="their API is down")
        await running.events.told("limit.paused")
    else:
        high._unusable = 1_000
    await client.enqueue_many("other", [{}] * 40)
    gate.open()

    async def all_of_the_other() -> None:
        done = await rows.query(
            "SELECT kind, count(*) FROM jsworker.jobs WHERE status = 'completed' GROUP BY kind"
        )
        assert {row["kind"]: row["count"] for row in done} == {"urgent": 1, "other": 40}

    await eventually(all_of_the_other)


async def test_a_waiting_job_changes_lanes(
    client: JobClient, rows: Rows, js: JetStreamContext, make_settings: MakeSettings, start: StartWorker
) -> None:
    settings = make_settings(concurrency=1)
    gate = Gate()
    running = await start(scripted(gate.process), with_settings=settings)
    held = await client.enqueue(KIND, {})
    await gate.met()
    first, second = [await client.enqueue(KIND, {"n": n}) for n in range(2)]
    await client.set_priority(second.id, "high")
    row = await rows.job(second.id)
    assert (row["priority"], row["status"], row["dispatch"]) == (0, "queued", 2)

    async def in_its_lane() -> None:
        subject = subject_of(settings.subject_prefix, KIND, 0)
        info = await js.stream_info(settings.stream, subjects_filter=subject)
        assert info.state.subjects == {subject: 1}

    await eventually(in_its_lane)

    async def opened() -> None:
        assert f"{KIND}=high" in {each.name for each in running.worker._components.pipeline.pullers}

    await eventually(opened)
    with pytest.raises(TransitionRefused, match="is processing; only a waiting job's priority can be set"):
        await client.set_priority(held.id, "low")
    gate.open()
    for job in (held, first, second):
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert (await rows.job(second.id))["fencing_token"] == 1
    assert "priority_set" in await rows.told(second.id)
