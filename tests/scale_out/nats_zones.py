"""Three nats-servers whose routes lead through proxies: one can be cut off from the others."""

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import permutations

from jsworker.embedded.resources import LOOPBACK, free_port
from tests.faults.stores import Node
from tests.scale_out.nats_cluster import SIZE, is_healthy, monitored
from tests.support.polling import eventually
from tests.support.proxy import Proxy, proxied
from tests.support.servers import new_servers_folder

_NOWHERE = f"{LOOPBACK}:1"
"""What a server tells others of itself, so that they find it by its proxies alone."""


@dataclass
class Zones:
    """A cluster with a server in each zone.

    Attributes:
        nodes: the servers, one in each zone.
    """

    nodes: list[Node]
    _monitors: list[int]
    _ways: dict[tuple[int, int], Proxy]

    async def healthy(self) -> None:
        """Wait until the servers follow one leader again, and each is current in everything that it keeps.

        A leader that was cut off calls itself healthy for some seconds after it is connected again.
        """
        await eventually(self._follow_one_leader)
        for port in self._monitors:
            await eventually(lambda port=port: is_healthy(port))  # type: ignore[misc]

    async def _follow_one_leader(self) -> None:
        views = [(await monitored(port, "jsz"))["meta_cluster"] for port in self._monitors]
        assert len({view.get("leader") for view in views}) == 1, views
        assert any(all(copy["current"] for copy in view["replicas"]) for view in views), views

    def cut(self, node: Node) -> None:
        """Cut a server off from both others, which still have each other."""
        for ends, proxy in self._ways.items():
            if self.nodes.index(node) in ends:
                proxy.cut()

    def restore(self) -> None:
        """Connect all servers again."""
        for proxy in self._ways.values():
            proxy.restore()


@asynccontextmanager
async def zoned() -> AsyncIterator[Zones]:
    """Run the servers."""
    folder, name = new_servers_folder(), f"c{secrets.token_hex(4)}"  # of digits alone it would be a number
    routes, monitors = [free_port() for _ in range(SIZE)], [free_port() for _ in range(SIZE)]
    async with AsyncExitStack() as ending:
        ending.callback(shutil.rmtree, folder, ignore_errors=True)
        ways: dict[tuple[int, int], Proxy] = {}
        listed: dict[int, list[str]] = {number: [] for number in range(SIZE)}
        for start, end in permutations(range(SIZE), 2):
            way = proxied(f"nats://{LOOPBACK}:{routes[end]}")
            ways[start, end], url = await ending.enter_async_context(way)
            listed[start].append(f'"{url}"')
        nodes = [
            Node(
                folder / f"nats-{number}",
                config=(
                    f'http: "{LOOPBACK}:{monitors[number]}"\n'
                    f'cluster {{\n  name: {name}\n  listen: "{LOOPBACK}:{routes[number]}"\n'
                    f'  no_advertise: true\n  advertise: "{_NOWHERE}"\n  pool_size: -1\n'
                    f"  routes: [{', '.join(listed[number])}]\n}}"
                ),
            )
            for number in range(SIZE)
        ]
        for node in nodes:
            ending.callback(node.kill)
            await asyncio.to_thread(node.start)
        zones = Zones(nodes, monitors, ways)
        await zones.healthy()
        yield zones
