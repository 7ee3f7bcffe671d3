"""Partitions of one pod from NATS, from PostgreSQL, or from both: cut, silent, one way, slow; and resets."""

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


_RESETS = 40
_LONGEST_GAP_SECONDS = 0.4
"""Some resets meet a connection in use, others one that is just being made."""


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


async def connections_reset(field: Battlefield, *, side: str) -> None:
    """Reset one pod's connections (RST, no orderly end) again and again while it works."""
    pod = await field.working_pod()
    sides = _SIDES[side]
    async with field.fault(f"connections_reset_{side}", *sides, pods=[pod]):
        for _ in range(_RESETS):
            await asyncio.sleep(field.dice.uniform(0.0, _LONGEST_GAP_SECONDS))
            for proxy in pod.proxies(*sides):
                proxy.reset_connections()


NEMESES: dict[str, Nemesis] = {
    **{f"partition_{side}_{way}": partial(partition, side=side, way=way) for side in _SIDES for way in _WAYS},
    **{f"connections_reset_{side}": partial(connections_reset, side=side) for side in _SIDES},
}
