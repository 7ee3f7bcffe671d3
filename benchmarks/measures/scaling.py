"""(b) No-op jobs as in (a), with 1, 2 and 4 worker processes."""

from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.figures import JSWORKER, RAW, Figure
from benchmarks.runs import Rounds, drain
from benchmarks.servers import running_servers
from benchmarks.systems import load

LETTER: Final = "b"
TITLE: Final = "No-op jobs, 1, 2 and 4 worker processes"

_SYSTEMS = (JSWORKER, RAW, "pgqueuer")
_SKIPPED_SHARE = 0.25  # the last of four processes has started by then


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    jobs: int = 40_000,
    processes: Sequence[int] = (1, 2, 4),
    systems: Sequence[str] = _SYSTEMS,
) -> list[Figure]:
    """Measure as in (a), but from 25 % done on, all counts of processes in every turn of a system."""
    measured = Rounds(LETTER, systems, rounds, show)
    with running_servers() as servers:
        for system in measured.systems(f"{', '.join(map(str, processes))} processes"):
            with measured.failing(system):
                for count in processes:
                    name = f"no-op jobs, {count} worker process{'es' if count > 1 else ''}"
                    value = drain(servers, system, jobs, processes=count, skipped=_SKIPPED_SHARE)
                    measured.add(name, system, "jobs/s", value, note=load(system).NOTE)
    return measured.figures()
