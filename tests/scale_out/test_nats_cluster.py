"""Three nats-servers, stream R3: nodes may go, one at a time."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jsworker.core.errors import StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.diagnostics import Inspector
from jsworker.stream.jetstream import Stream
from tests.scale_out.nats_cluster import Cluster, monitored
from tests.scale_out.pods import SHORT
from tests.scale_out.scenarios import leader_killed, nodes_restarted
from tests.stream.streams import TestStream, settings_for
from tests.support.polling import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.thorough]

RATE = 40.0
BETWEEN = 60
LONGEST_GAP = 15.0
"""Seconds. A leader is missed for 4 to 9 s before the next election; meanwhile workers look in the table."""


async def test_a_rolling_restart_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    figures = await nodes_restarted(
        cluster, tmp_path, timing=SHORT, rate=RATE, lame_duck=False, between=BETWEEN
    )
    outcome = figures.outcome
    assert (outcome.lost, outcome.twice) == (0, 0), f"{outcome}; {figures.log}"
    assert outcome.enqueued >= 4 * BETWEEN
    assert outcome.longest_gap() < LONGEST_GAP, figures.log
    assert figures.changes == []  # it is the database's history, not the stream's


async def test_the_diagnosis_names_a_server_whose_copy_is_away(cluster: Cluster) -> None:
    settings = Settings(
        database_url="postgresql://nobody@localhost/nothing",
        nats_url=",".join(node.url for node in cluster.stores.nodes),
        stream="COPIES",
        subject_prefix="copies",
        stream_replicas=3,
    )
    inspector = Inspector(settings)

    async def behind(*names: str) -> None:
        try:
            report = await inspector.stream()
        except StreamUnavailable as error:  # the connection to the killed server, or no leader
            raise AssertionError(str(error)) from error
        assert report
        assert report.behind == names

    async with AsyncExitStack() as ending:
        stream = Stream(settings, installation_id=None, events=Events(), client_name="test")
        ending.push_async_callback(stream.close)
        ending.push_async_callback(inspector.close)
        await stream.connect()
        await stream.ensure([])
        await inspector.connect()
        await eventually(behind)
        leader = await cluster.leader_of("COPIES")
        away = next(node for node in cluster.stores.nodes if node is not leader)
        await asyncio.to_thread(away.kill)
        try:
            await eventually(lambda: behind(away.server_name))
        finally:
            await asyncio.to_thread(away.start)
            await cluster.healthy()
        await eventually(behind)


async def test_a_new_stream_waits_for_servers_that_are_away(cluster: Cluster) -> None:
    leader = (await monitored(cluster.monitors[0], "jsz"))["meta_cluster"]["leader"]  # it alone refuses
    left, *others = sorted(cluster.stores.nodes, key=lambda node: node.server_name != leader)
    settings = settings_for(left.url, stream="WAITS", subject_prefix="waits", stream_replicas=3)
    stream = TestStream(settings, installation_id=None)
    async with AsyncExitStack() as ending:
        ending.push_async_callback(stream.close)
        await stream.connect()
        for node in others:
            ending.push_async_callback(asyncio.to_thread, node.start)
            await asyncio.to_thread(node.stop)
        with pytest.raises(StreamUnavailable):
            await stream.ensure([], timeout=0.5)
        making = asyncio.create_task(stream.ensure([], timeout=120.0))
        for node in others:
            await asyncio.to_thread(node.start)
        await making
    await cluster.healthy()


async def test_the_leaders_death_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    figures = await leader_killed(cluster, tmp_path, timing=SHORT, rate=RATE, kills=1, between=BETWEEN)
    outcome = figures.outcome
    assert (outcome.lost, outcome.twice) == (0, 0), f"{outcome}; {figures.log}"
    assert outcome.longest_gap() < LONGEST_GAP, figures.log
    assert max(figures.seconds()) < LONGEST_GAP
