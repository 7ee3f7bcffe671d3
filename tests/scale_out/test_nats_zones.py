"""A zone is cut off from the others, its worker from the database: no job runs on both sides of the cut."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from jsworker import Job, JobClient
from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.settings import Settings
from jsworker.stream.liveness import Answer
from tests.faults.stores import Node
from tests.ownership.rows import Sql
from tests.scale_out.nats_zones import Zones, zoned
from tests.stream.streams import TestStream
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, scripted
from tests.worker.running import Running, new_worker

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.thorough, pytest.mark.hurried]

TIMES: dict[str, Any] = {
    "heartbeat_interval": 2.0,
    "statement_timeout": 1.5,
    "crash_threshold": 8.0,
    "stale_threshold": 120.0,
    "scan_interval": 1.0,
    "ack_wait": 180.0,
}
MakeSettings = Callable[..., Settings]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def zones() -> AsyncIterator[Zones]:
    async with zoned() as running:
        yield running


class Story:
    """What two workers did with one job: the order in which its runs began and ended, and who ran it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.opened = asyncio.Event()

    def processor(self, name: str) -> Any:
        async def process(_: Job[Any]) -> None:
            self.told.append(f"{name} begins")
            try:
                await self.opened.wait()
            finally:
                self.told.append(f"{name} ends")

        return scripted(process)

    async def is_told(self, what: str) -> None:
        async def told() -> None:
            assert what in self.told, self.told

        await eventually(told)


class Scene:
    """A worker in a zone of its own, which runs a job, and a second one in another zone."""

    story: Story
    job: UUID
    zone: Node
    database: Proxy
    owner: Running
    other: Running

    async def set(
        self, ending: AsyncExitStack, zones: Zones, make: MakeSettings, *, replicas: int, leads: bool
    ) -> None:
        times = {**TIMES, "stream_replicas": replicas}
        self.story = Story()
        self.zone, other = await self._zones(zones, make(nats_url=zones.nodes[0].url, **times), leads=leads)
        ending.callback(zones.restore)
        theirs = make(nats_url=other.url, **times)
        self.database, database_url = await ending.enter_async_context(proxied(theirs.database_dsn()))
        own = make(nats_url=self.zone.url, database_url=database_url, **times)
        self.owner = new_worker(self.story.processor("owner"), settings=own)
        self.other = new_worker(self.story.processor("other"), settings=theirs)
        ending.push_async_callback(self.owner.end)
        await self.owner.worker.start()
        async with JobClient(theirs) as client:
            self.job = (await client.enqueue(KIND, {})).id
        await self.story.is_told("owner begins")
        ending.push_async_callback(self.other.end)
        await self.other.worker.start()
        await eventually(self._finds_the_owner)

    async def _zones(self, zones: Zones, settings: Settings, *, leads: bool) -> tuple[Node, Node]:
        """Make the stream; return the zone to be cut off, which is to lead the stream or not, and another."""
        stream = TestStream(settings, installation_id=None)
        await stream.connect()
        try:
            await eventually(lambda: self._made(stream))
            await zones.healthy()
            cluster = (await stream.stream_info()).cluster
        finally:
            await stream.close()
        assert cluster
        assert cluster.leader
        by_lead = sorted(zones.nodes, key=lambda node: node.server_name == cluster.leader, reverse=leads)
        return by_lead[0], by_lead[1]

    async def _made(self, stream: TestStream) -> None:
        try:
            await stream.ensure([KIND])
        except (StreamRefused, StreamUnavailable) as error:  # a server that was cut off still counts as away
            raise AssertionError(str(error)) from error

    async def _finds_the_owner(self) -> None:
        presence = self.other.worker._components.presence
        assert await presence.ask(self.owner.worker.id) is Answer.ALIVE
        assert self.owner.worker._components.presence.answers

    async def wait_past_the_threshold(self, sql: Sql) -> None:
        """Wait until the owner was silent for longer than the crash threshold, and some scans saw that."""

        async def silent() -> None:
            assert self.row(sql)["silent"]

        await eventually(silent)
        await rounds_pass(count_rounds(self.other.worker._components.scans), 5)

    def row(self, sql: Sql) -> dict[str, Any]:
        row = sql.execute(
            "SELECT status, fencing_token, clock_timestamp() - last_activity_at > crash_after AS silent"
            " FROM jsworker.jobs WHERE id = %s",
            [self.job],
        ).fetchone()
        assert row
        return row


@pytest.mark.parametrize("leads", [True, False], ids=["leader cut off", "leader on the other side"])
async def test_the_majority_takes_a_job_over_after_its_run_has_ended(
    zones: Zones, make_settings: MakeSettings, *, leads: bool
) -> None:
    async with AsyncExitStack() as ending:
        scene = Scene()
        await scene.set(ending, zones, make_settings, replicas=3, leads=leads)
        scene.database.cut()
        zones.cut(scene.zone)
        await scene.story.is_told("other begins")
        assert scene.story.told == ["owner begins", "owner ends", "other begins"]
        assert len(scene.owner.events.of("job.fenced")) == 1
        scene.story.opened.set()
        await scene.story.is_told("other ends")
    await zones.healthy()


@pytest.mark.parametrize(
    ("replicas", "is_cut"), [(1, True), (3, False)], ids=["with the only copy", "from the database alone"]
)
async def test_a_run_goes_on_where_nobody_may_take_its_job(
    zones: Zones, make_settings: MakeSettings, sql: Sql, *, replicas: int, is_cut: bool
) -> None:
    async with AsyncExitStack() as ending:
        scene = Scene()
        await scene.set(ending, zones, make_settings, replicas=replicas, leads=True)
        scene.database.cut()
        if is_cut:
            zones.cut(scene.zone)
        await scene.wait_past_the_threshold(sql)
        assert scene.story.told == ["owner begins"]
        assert scene.owner.events.of("job.fenced") == []
        scene.database.restore()
        zones.restore()
        scene.story.opened.set()

        async def completed() -> None:
            row = scene.row(sql)
            assert (row["status"], row["fencing_token"]) == ("completed", 1)

        await eventually(completed)
    await zones.healthy()
