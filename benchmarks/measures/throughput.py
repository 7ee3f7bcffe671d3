"""(a) How many jobs that do nothing one worker process finishes a second, with a backlog before it."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Final

from benchmarks.figures import Figure
from benchmarks.runs import Rounds, drain
from benchmarks.servers import running_servers
from benchmarks.systems import ALL, load

LETTER: Final = "a"
TITLE: Final = "No-op jobs, one worker process, preloaded backlog"
NAME: Final = "no-op jobs, one worker process"

_SHARES = MappingProxyType({"procrastinate": 0.1, "awa": 0.5})
"""The share of the jobs that slow systems get, so that a round ends soon."""


def measure(
    rounds: int, show: Callable[[str], None], *, jobs: int = 20_000, systems: Sequence[str] = ALL
) -> list[Figure]:
    """Measure the rate from 5 % done to all done, by the final states that the servers hold."""
    measured = Rounds(LETTER, systems, rounds, show)
    with running_servers() as servers:
        for system in measured.systems("no-op jobs"):
            with measured.failing(system):
                count = int(jobs * _SHARES.get(system, 1.0))
                value = drain(servers, system, count)
                measured.add(NAME, system, "jobs/s", value, note=load(system).NOTE)
    return measured.figures()
