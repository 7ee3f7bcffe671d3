"""What can happen to NATS: killed, frozen, its store lost or old, the stream or consumers gone."""

import asyncio
import os
import shutil
import signal
from contextlib import suppress

from nats.js import JetStreamContext
from nats.js.errors import APIError, NotFoundError

from tests.faults.battlefield import Battlefield, Nemesis
from tests.faults.stores import PREFIX, STREAM

_DOWN_SECONDS = 1.5
_FROZEN_SECONDS = 5.0
_BETWEEN_SECONDS = 3.0
_BACKLOG = 100
"""Jobs; three times as many as a fleet has slots."""
_REFUSED_JOBS = 60
_REFUSED_SECONDS = 8.0
"""What begins later than this was not delivered before."""
_BUSY_SECONDS = 2.0
"""For so long each of them takes a slot: longer than a lost message stays unnoticed."""
_ELECTION_SECONDS = 12.0
"""For so long the stream and each of its consumers may look for a new leader."""


async def nats_killed(field: Battlefield) -> None:
    """SIGKILL, and a restart on the same port and store."""
    async with field.fault("nats_sigkill", "nats"):
        await asyncio.to_thread(field.stores.nats.kill)
        await asyncio.sleep(_DOWN_SECONDS)
        await asyncio.to_thread(field.stores.nats.start)


async def nats_frozen(field: Battlefield) -> None:
    """SIGSTOP for longer than anybody waits for an answer."""
    async with field.fault("nats_sigstop", "nats"):
        server = field.stores.nats.pid
        os.kill(server, signal.SIGSTOP)
        try:
            await asyncio.sleep(_FROZEN_SECONDS)
        finally:
            os.kill(server, signal.SIGCONT)


async def store_deleted(field: Battlefield) -> None:
    """The server comes back without any data."""
    async with field.fault("nats_store_deleted", "nats"):
        await asyncio.to_thread(field.stores.nats.kill)
        shutil.rmtree(field.stores.nats.data / "store")
        await asyncio.to_thread(field.stores.nats.start)


async def store_restored(field: Battlefield) -> None:
    """The server comes back with files that are some seconds old: messages are gone, others come twice."""
    store = field.stores.nats.data / "store"
    old = field.stores.nats.data / "older-store"
    async with field.fault("nats_store_restored", "nats"):
        await asyncio.to_thread(field.stores.nats.stop)
        shutil.copytree(store, old)
        await asyncio.to_thread(field.stores.nats.start)
        await asyncio.sleep(_BETWEEN_SECONDS)
        await asyncio.to_thread(field.stores.nats.kill)
        shutil.rmtree(store)
        old.rename(store)
        await asyncio.to_thread(field.stores.nats.start)


async def stream_purged(field: Battlefield) -> None:
    """Every message is deleted while nobody is idle: else jobs are claimed from the table first."""
    await field.enqueue("ordinary", count=_BACKLOG, seconds=_BUSY_SECONDS)
    async with field.fault("stream_purged", "messages"), field.stores.connected_to_nats() as nats:
        for _ in range(3):
            await nats.jetstream().purge_stream(STREAM)
            await asyncio.sleep(0.5)


async def stream_deleted(field: Battlefield) -> None:
    """The stream is deleted, with its consumers."""
    async with field.fault("stream_deleted", "messages", "nats"), field.stores.connected_to_nats() as nats:
        await nats.jetstream().delete_stream(STREAM)


async def consumers_deleted(field: Battlefield) -> None:
    """Every consumer is deleted under those who pull on it."""
    async with field.fault("consumers_deleted", "messages"), field.stores.connected_to_nats() as nats:
        for consumer in await nats.jetstream().consumers_info(STREAM):
            with suppress(NotFoundError):
                await nats.jetstream().delete_consumer(STREAM, consumer.name)


async def publishing_refused(field: Battlefield) -> None:
    """JetStream answers and stores nothing, for the stream is full: jobs begin from the table meanwhile."""
    late = "SELECT count(*) FROM jsworker.jobs WHERE started_at > %s + make_interval(secs => %s)"
    async with field.stores.connected_to_nats() as nats:
        jetstream = nats.jetstream()
        async with field.fault("publishing_refused", "messages", "nats") as fault:
            [[began]] = await field.stores.execute("SELECT clock_timestamp()")

            async def jobs_begin() -> bool:
                await _keep_full(jetstream)  # whoever mends it meanwhile
                return (await field.stores.execute(late, began, _REFUSED_SECONDS))[0][0] != 0

            try:
                await field.enqueue("ordinary", count=_REFUSED_JOBS, published=False, seconds=0.2)
                fault.fired = await field.until(jobs_begin, 4 * _REFUSED_SECONDS)
            finally:
                info = await jetstream.stream_info(STREAM)
                await jetstream.update_stream(info.config, max_msgs=-1)
                await jetstream.purge_stream(STREAM, subject=f"{PREFIX}.nobody")


async def _keep_full(jetstream: JetStreamContext) -> None:
    with suppress(APIError):  # it was full already
        await jetstream.publish(f"{PREFIX}.nobody", b"filler")
    info = await jetstream.stream_info(STREAM)
    await jetstream.update_stream(info.config, max_msgs=1)


async def leader_killed(field: Battlefield) -> None:
    """SIGKILL of the cluster member that leads the stream; the others elect another one."""
    async with field.fault("cluster_leader_killed", "nats") as fault:
        async with field.stores.connected_to_nats() as nats:
            info = await nats.jetstream().stream_info(STREAM)
        name = info.cluster.leader if info.cluster else None
        leaders = [node for node in field.stores.nodes if node.server_name == name]
        fault.fired = bool(leaders)
        for leader in leaders:
            await asyncio.to_thread(leader.kill)
            await asyncio.sleep(_FROZEN_SECONDS)
            await asyncio.to_thread(leader.start)
            await asyncio.sleep(_BETWEEN_SECONDS)


async def members_killed_in_turn(field: Battlefield) -> None:
    """SIGKILL of one cluster member after the other, each back before the next goes."""
    async with field.fault("cluster_members_killed_in_turn", "nats"):
        for node in field.stores.nodes:
            await asyncio.to_thread(node.kill)
            await asyncio.sleep(_DOWN_SECONDS)
            await asyncio.to_thread(node.start)
            await asyncio.sleep(_ELECTION_SECONDS)


NEMESES: dict[str, Nemesis] = {
    "nats_sigkill": nats_killed,
    "nats_sigstop": nats_frozen,
    "nats_store_deleted": store_deleted,
    "nats_store_restored": store_restored,
    "stream_purged": stream_purged,
    "stream_deleted": stream_deleted,
    "consumers_deleted": consumers_deleted,
    "publishing_refused": publishing_refused,
}

CLUSTER: dict[str, Nemesis] = {
    "cluster_leader_killed": leader_killed,
    "cluster_members_killed_in_turn": members_killed_in_turn,
}
