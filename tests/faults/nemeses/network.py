"""Partitions of one pod from NATS, from PostgreSQL, or from both: cut, silent, one way, slow."""

import asyncio
from collections.abc import Callable
from functools import partial

from tests.faults.battlefield import Battlefield, Nemesis
from tests.support.proxy import Proxy

_SIDES = {"nats": ("nats",), "database": ("database",), "both": ("nats", "database")}

_WAYS: dict[str, Callable[[Proxy], None]] = {
    "cut": Proxy.cut,
    "black_hole": Proxy.black_hole,
    "requests_lost": Proxy.swallow_requests,
    "answers_lost": Proxy.swallow_answers,
    "slow": lambda proxy: proxy.slow_down(0.15, dribble_bytes=256),
}


async def partition(field: Battlefield, *, side: str, way: str) -> None:
    """Part one pod from servers for one and a half stale thresholds."""
    pod = await field.working_pod()
    sides = _SIDES[side]
    async with field.fault(f"partition_{side}_{way}", *sides, pods=[pod]):
        proxies = pod.proxies(*sides)
        for proxy in proxies:
            _WAYS[way](proxy)
        try:
            await asyncio.sleep(1.5 * field.stale_seconds)
        finally:
            for proxy in proxies:
                proxy.restore()


NEMESES: dict[str, Nemesis] = {
    f"partition_{side}_{way}": partial(partition, side=side, way=way) for side in _SIDES for way in _WAYS
}
