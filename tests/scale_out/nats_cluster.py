"""Three nats-servers in a cluster, with one PostgreSQL beside them."""

import asyncio
import json
import secrets
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsworker.embedded.resources import LOOPBACK, free_port
from tests.faults.stores import Node, Stores
from tests.support.polling import eventually
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, new_servers_folder

SIZE = 3
_HEALTHY_SECONDS = 60.0
_DUCK_SECONDS = 90.0


@dataclass
class Cluster:
    """Servers of a scenario.

    Attributes:
        monitors: the HTTP port of each node.
    """

    stores: Stores
    monitors: list[int]

    async def healthy(self) -> None:
        """Wait until every node says that it is current in everything that it keeps."""
        for port in self.monitors:
            await eventually(lambda port=port: is_healthy(port), seconds=_HEALTHY_SECONDS)  # type: ignore[misc]

    async def leader_of(self, stream: str) -> Node:
        """Return the node that leads a stream."""

        async def found() -> Node:
            async with self.stores.connected_to_nats() as connection:
                info = await connection.jetstream().stream_info(stream)
            name = info.cluster.leader if info.cluster else None
            leaders = [node for node in self.stores.nodes if node.server_name == name]
            assert leaders, f"stream {stream} has no leader"
            return leaders[0]

        return await eventually(found, seconds=_HEALTHY_SECONDS)

    async def restart(self, node: Node, *, lame_duck: bool) -> None:
        """Stop a node in order, start it, and wait until it has caught up, as a rolling update does.

        Args:
            node: which.
            lame_duck: it first hands over what it leads and sends its clients away, a few at a time.
        """
        if lame_duck:
            node._process.send_signal(signal.SIGUSR2)  # type: ignore[union-attr]

            async def gone() -> None:
                assert not node.running

            await eventually(gone, seconds=_DUCK_SECONDS)
        else:
            await asyncio.to_thread(node.stop)
        await asyncio.to_thread(node.start)
        await self.healthy()


async def monitored(port: int, page: str) -> dict[str, Any]:
    """Return a page of the node with this monitoring port; AssertionError if there is none."""

    def get() -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/{page}", timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    try:
        return await asyncio.to_thread(get)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise AssertionError(f"node with monitor {port}: {error}") from error


async def is_healthy(port: int) -> None:
    """Assert that the node with this monitoring port is current in everything that it keeps."""
    await monitored(port, "healthz")


def _new_cluster(folder: Path) -> Cluster:
    routes, monitors = [free_port() for _ in range(SIZE)], [free_port() for _ in range(SIZE)]
    name = f"c{secrets.token_hex(4)}"  # of digits alone it would be a number
    listed = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in routes)
    nodes = [
        Node(
            folder / f"nats-{number}",
            config=(
                f'http: "{LOOPBACK}:{monitor}"\n'
                'lame_duck_grace_period: "2s"\nlame_duck_duration: "30s"\n'
                f'cluster {{\n  name: {name}\n  listen: "{LOOPBACK}:{route}"\n  no_advertise: true\n'
                f"  routes: [{listed}]\n}}"
            ),
        )
        for number, (route, monitor) in enumerate(zip(routes, monitors, strict=True))
    ]
    postgres = ThrowawayPostgres(folder / "postgres", settings=THROWAWAY_SETTINGS)
    return Cluster(Stores(folder, postgres, nodes), monitors)


@asynccontextmanager
async def clustered() -> AsyncIterator[Cluster]:
    """Run a cluster and a database."""
    cluster = _new_cluster(new_servers_folder())
    try:
        cluster.stores.start()
        await cluster.healthy()
        yield cluster
    finally:
        cluster.stores.discard()
