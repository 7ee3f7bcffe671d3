"""(d) How soon jobs start and end when the worker has little else to do, at three rates of arrival."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from benchmarks.figures import Figure
from benchmarks.runs import IdleWorker, Rounds, idle_worker
from benchmarks.servers import running_servers
from benchmarks.systems import ALL, load

LETTER: Final = "d"
TITLE: Final = "Latency from the call of enqueue, one worker process"
JOBS: Final[Mapping[int, int]] = MappingProxyType({20: 200, 200: 600, 2000: 2000})
"""The number of jobs by their rate in jobs per second."""

_LATE_SECONDS = 1.0
_SLOW = ("procrastinate",)
"""Systems that cannot follow the highest rate: they get a quarter of its jobs, so that a round ends soon."""


def figure_name(event: str, rate: int, percentile: str) -> str:
    """Return a figure's name.

    Args:
        event: ``start`` or ``completed``.
        rate: jobs per second.
        percentile: ``p50`` or ``p99``.
    """
    return f"{event} at {rate:,} jobs/s, {percentile}"


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    jobs: Mapping[int, int] = JOBS,
    systems: Sequence[str] = ALL,
) -> list[Figure]:
    """Measure all rates on one worker, one after the other; jobs are enqueued at fixed times.

    Starts are read inside the job, on the clock that all processes of a machine share; completions are the
    times that the system's database stored, by the statement that stored the final state.
    """
    measured = Rounds(LETTER, systems, rounds, show)
    with running_servers() as servers:
        for system in measured.systems(f"jobs at {', '.join(map(str, jobs))} a second"):
            with (
                measured.failing(system),
                idle_worker(servers, system, sum(jobs.values())) as worker,
            ):
                for rate, whole in jobs.items():
                    count = whole // 4 if system in _SLOW and rate == max(jobs) else whole
                    _add(measured, worker, rate, count)
    return measured.figures()


def _add(measured: Rounds, worker: IdleWorker, rate: int, count: int) -> None:
    taken = worker.latencies(rate, count)
    note = load(worker.name).NOTE
    if taken.start[-1] > _LATE_SECONDS:
        note = f"could not keep up with this rate; {note}"
    for event, latencies in (("start", taken.start), ("completed", taken.completed)):
        if latencies:
            for percentile, value in percentiles(latencies).items():
                measured.add(
                    figure_name(event, rate, percentile),
                    worker.name,
                    "ms",
                    value * 1000,
                    more_is_better=False,
                    note=note,
                )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile."""
    return {"p50": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98]}
