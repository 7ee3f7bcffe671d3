"""Messages that no consumer takes: removed after a while, unless jobs of their kind wait."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig

from jsworker import JobClient
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import overlap
from jsworker.worker.maintenance import watches as module
from jsworker.worker.maintenance.watches import Unconsumed
from tests.stream.nats_server import NatsServer
from tests.stream.streams import TestStream
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.worker.processors import KIND, echo, scripted
from tests.worker.recorder import Recorder
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


class Alone:
    """A removal without a worker, stepped by the test, on a stream with a consumer of one kind."""

    def __init__(self, database: Database, stream: Stream, events: Events) -> None:
        self.told = Recorder()
        events.on("*", self.told)
        self.stream = stream
        self.unconsumed = Unconsumed(make_context(database, stream=stream, events=events))

    async def publish(self, kind: str, *, times: int) -> None:
        for number in range(times):
            await self.stream.publish_raw(self.stream.subject_of(kind), str(number).encode())

    async def step_after(self, seconds: float) -> None:
        """Step as if the subjects were first seen so much earlier."""
        for kind, (seen_at, state) in self.unconsumed._seen.items():
            self.unconsumed._seen[kind] = seen_at - seconds, state
        await self.unconsumed.step()

    async def left(self) -> int:
        return (await self.stream.state()).messages


@pytest.fixture
async def alone(settings: Settings, database: Database, client: JobClient) -> AsyncIterator[Alone]:
    events = Events()
    stream = Stream(settings, installation_id=None, events=events, client_name="test")
    await stream.connect()
    await stream.ensure([KIND])
    yield Alone(database, stream, events)
    await stream.close()


@pytest.mark.parametrize("subject", ["*", ">", "*.high", ">.low"])
async def test_a_subject_that_is_a_wildcard_costs_no_message(alone: Alone, subject: str) -> None:
    await alone.publish(KIND, times=3)
    await alone.publish(subject, times=1)
    await alone.unconsumed.step()
    await alone.step_after(3700.0)
    assert await alone.left() == 4


async def test_a_subject_that_postgresql_cannot_hold_keeps_no_other_from_its_removal(alone: Alone) -> None:
    await alone.publish("n\x00ul", times=1)
    await alone.publish("ghost", times=1)
    await alone.unconsumed.step()
    await alone.step_after(3700.0)
    assert "ghost" not in await alone.stream.unconsumed()
    assert not alone.told.of("row.refused")


async def test_what_no_consumer_takes_is_removed_after_an_hour(alone: Alone) -> None:
    await alone.publish(KIND, times=1)
    await alone.publish("ghost", times=2)
    await alone.publish("No-Kind_At$All", times=1)
    assert await alone.stream.unconsumed() == {"ghost": 2, "No-Kind_At$All": 1}
    await alone.unconsumed.step()
    await alone.publish("ghost", times=1)  # after the first sight
    await alone.step_after(3500.0)
    assert await alone.left() == 5
    await alone.step_after(200.0)
    assert await alone.left() == 2
    assert await alone.stream.unconsumed() == {"ghost": 1}
    told = {
        event["what"].split(",")[0]: (event["was"], event["is"]) for event in alone.told.of("stream.changed")
    }
    prefix = alone.stream.subject_of("")
    assert told[f"messages of {prefix}ghost"] == (3, 1)
    assert told[f"messages of {prefix}No-Kind_At$All"] == (1, 0)
    await alone.step_after(3500.0)  # the one that came later was first seen later
    assert await alone.left() == 2
    await alone.step_after(3600.0)
    assert await alone.left() == 1


async def test_what_is_left_of_a_lane_is_removed_as_well(alone: Alone, client: JobClient, rows: Rows) -> None:
    """The table brought the job, and the lane was never opened."""
    await alone.publish("ghost.high", times=2)
    await alone.publish("ghost.urgent", times=0)
    await alone.publish(KIND, times=1)
    assert await alone.stream.unconsumed() == {"ghost.high": 2}
    await alone.unconsumed.step()
    job = await client.enqueue("ghost", {}, delay=3600.0)
    await rows.query("UPDATE jsworker.jobs SET status = 'queued', dispatch = 1, queued_at = now()")
    await alone.step_after(3700.0)
    assert await alone.left() == 3  # a job of the kind waits
    await client.cancel(job.id)
    await alone.step_after(3700.0)
    assert await alone.left() == 1


async def test_messages_of_jobs_that_wait_are_left_alone(alone: Alone, client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("ghost", {})

    async def published() -> None:
        assert await alone.left() == 1

    await eventually(published)
    await alone.unconsumed.step()
    await alone.step_after(4000.0)
    assert await alone.left() == 1
    await client.cancel(job.id)
    await alone.step_after(4000.0)
    assert await alone.left() == 0


async def test_kinds_whose_jobs_wait_keep_no_other_from_its_removal(alone: Alone, client: JobClient) -> None:
    await asyncio.gather(*(client.enqueue(f"a-{number}", {}) for number in range(500)))

    async def published() -> None:
        assert await alone.left() == 500

    await eventually(published)
    await alone.publish("z", times=2)
    assert (await alone.stream.unconsumed())["z"] == 2
    await alone.unconsumed.step()
    await alone.step_after(3700.0)
    assert await alone.left() == 500


async def test_a_subject_that_gets_its_consumer_is_forgotten(alone: Alone) -> None:
    await alone.publish("late", times=1)
    await alone.unconsumed.step()
    await alone.stream.ensure(["late"])
    await alone.step_after(4000.0)
    assert await alone.left() == 1


async def test_another_stream_of_the_same_name_is_looked_at_anew(alone: Alone, client: JobClient) -> None:
    await alone.publish("ghost", times=1)
    await alone.unconsumed.step()
    await alone.stream.connection.client.jsm().delete_stream(alone.stream.name)
    await alone.stream.ensure([KIND])
    await alone.publish("ghost", times=1)
    await alone.step_after(4000.0)
    assert await alone.left() == 1


async def test_what_a_consumer_of_another_name_takes_is_left_to_it(
    alone: Alone, js: JetStreamContext
) -> None:
    await alone.publish("audited", times=2)
    await alone.publish("ghost", times=1)
    audit = ConsumerConfig(durable_name="audit", filter_subject=alone.stream.subject_of("audited"))
    await js.add_consumer(alone.stream.name, audit)
    assert await alone.stream.unconsumed() == {"ghost": 1}
    await alone.unconsumed.step()
    await alone.step_after(3700.0)
    assert (await js.consumer_info(alone.stream.name, "audit")).num_pending == 2
    assert await alone.left() == 2


@pytest.fixture
async def may_not_list(make_settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[TestStream]:
    """Return a stream whose login may not list consumers."""
    may = 'permissions: { publish: { allow: ">", deny: "$JS.API.CONSUMER.LIST.>" } }'
    server = NatsServer(tmp_path, extra=f"authorization {{ users: [{{ user: me, password: x, {may} }}] }}")
    await server.start()
    stream = TestStream(make_settings(nats_url=server.url.replace("//", "//me:x@")), installation_id=None)
    await stream.connect()
    yield stream
    await stream.close()
    await server.stop()


async def test_where_consumers_may_not_be_listed_nothing_is_removed_unless_all_are_known(
    may_not_list: TestStream,
) -> None:
    stream = may_not_list
    refusals: list[str] = []
    stream.connection.denied_callbacks.append(refusals.append)
    await stream.ensure([KIND, f"{KIND}=high"])
    await stream.publish_raw(stream.subject_of("ghost"), b"")
    assert await stream.unconsumed([KIND]) == {"ghost": 1}
    assert refusals == []
    await stream.ensure(["of-other-workers"])
    for _ in range(3):
        assert await stream.unconsumed([KIND]) == {}
    assert len(refusals) == 1


async def test_consumers_of_other_workers_kinds_are_known(
    may_not_list: TestStream, database: Database, client: JobClient, rows: Rows
) -> None:
    alone = Alone(database, may_not_list, may_not_list.events)
    await alone.stream.ensure([KIND, "of-other-workers", "of-other-workers=low"])
    await alone.publish("ghost", times=2)
    await rows.query(
        "INSERT INTO jsworker.workers"
        " (id, hostname, pid, kinds, concurrency, version, heartbeat_interval, state)"
        " VALUES ('other-1-0badf00d', 'other', 1, %s, 1, '1', '5 s', 'running')",
        [KIND, "of-other-workers", "no kind\r\n.>"],
    )
    await alone.unconsumed.step()
    await alone.step_after(3700.0)
    assert await alone.left() == 0
    assert not alone.told.of("worker.degraded")


async def test_filters_without_wildcards_are_not_compared_one_by_one(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of kinds and hundreds of subjects would keep the event loop busy for seconds."""
    compared: list[tuple[str, str]] = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return overlap(one, other)

    monkeypatch.setattr("jsworker.stream.api.overlap", compare)
    await alone.publish("ghost", times=1)
    assert await alone.stream.unconsumed() == {"ghost": 1}
    assert compared == []
    await alone.publish("*", times=1)
    assert await alone.stream.unconsumed() == {"ghost": 1}
    assert compared == [(alone.stream.subject_of(KIND), alone.stream.subject_of("*"))]


async def test_where_nats_refuses_it_is_told_once(alone: Alone, js: JetStreamContext) -> None:
    await alone.publish("ghost", times=1)
    config = (await js.stream_info(alone.stream.name)).config
    await js.update_stream(replace(config, deny_purge=True))
    for _ in range(3):
        await alone.step_after(4000.0)
    assert await alone.left() == 1
    [degraded] = alone.told.of("worker.degraded")
    assert degraded["what"] == "removal of messages that no consumer takes"


async def test_a_worker_looks(start: StartWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEFT_SECONDS", 0.0)
    monkeypatch.setattr("jsworker.worker.maintenance.watches.LOOK_SECONDS", 0.05)
    running = await start(scripted(echo))
    await running.worker._stream.publish_raw(running.worker._stream.subject_of("ghost"), b"")
    await running.stream_is_empty()
