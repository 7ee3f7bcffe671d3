"""One run of one system: prepare, preload, start workers, wait for the last job."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.figures import Figure
from benchmarks.processes import Process, SystemFailed, answer_of, module, running, wait_until
from benchmarks.producing import FIRST
from benchmarks.servers import Servers
from benchmarks.systems import System, delivered, load
from benchmarks.systems.database import tidy
from benchmarks.systems.stamps import Stamps, new_stamps

SKIPPED_SHARE = 0.05
"""The share of the first jobs that no rate counts: when they are done, the process has started."""

_SAMPLE_SECONDS = 0.02
_LOAD_SECONDS = 120.0
_WARM_UP_JOBS = 20


class Rounds:
    """The values of interleaved rounds; a system that fails once is not run again, and is still listed."""

    def __init__(
        self, measure: str, systems: Sequence[str], rounds: int, show: Callable[[str], None]
    ) -> None:
        """Prepare.

        Args:
            measure: its letter.
            systems: the systems to measure.
            rounds: the number of rounds.
            show: called with the run that is going on.
        """
        self._measure = measure
        self._systems = tuple(systems)
        self._rounds = rounds
        self._show = show
        self._values: dict[tuple[str, str], list[float]] = {}
        self._about: dict[tuple[str, str], tuple[str, bool, str]] = {}
        self._failures: dict[str, str] = {}

    def systems(self, what: str) -> Iterator[str]:
        """Yield the system to run next: in each round all systems, each time in another order."""
        for turn in range(self._rounds):
            for system in order(self._systems, turn):
                if system not in self._failures:
                    self._show(f"round {turn + 1} of {self._rounds}: {what}, {system}")
                    yield system

    @contextmanager
    def failing(self, system: str) -> Iterator[None]:
        """Note a failure of the system instead of ending the measure."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 -- what a peer raises is its failure, shown in the table
            reason = " ".join(str(error).split()) or type(error).__name__
            self._failures[system] = f"failed: {reason}"

    def add(
        self, name: str, system: str, unit: str, value: float, *, more_is_better: bool = True, note: str = ""
    ) -> None:
        """Keep the value of a round; a later note replaces the present one, unless that contains it."""
        self._values.setdefault((name, system), []).append(value)
        _, _, before = self._about.get((name, system), (unit, more_is_better, ""))
        self._about[name, system] = (unit, more_is_better, before if note in before else note)

    def figures(self) -> list[Figure]:
        """Return the figures that were measured in every round, and one without values for each failure."""
        figures = [
            Figure(self._measure, name, system, unit, tuple(values), more_is_better, note)
            for (name, system), values in self._values.items()
            for unit, more_is_better, note in [self._about[name, system]]
            if len(values) == self._rounds
        ]
        return figures + [
            Figure(self._measure, "", system, "", (), note=reason)
            for system, reason in self._failures.items()
        ]


def order(systems: Sequence[str], turn: int) -> list[str]:
    """Return the systems rotated, every second time reversed: each comes first and last about as often."""
    # Every second order is reversed. Then an even number moves by one only every second time, or only every
    # second system would come first: of two always the same one.
    start = (turn if len(systems) % 2 else turn // 2) % len(systems) if systems else 0
    turned = [*systems[start:], *systems[:start]]
    return turned[::-1] if turn % 2 else turned


def drain(
    servers: Servers,
    name: str,
    jobs: int,
    *,
    processes: int = 1,
    skipped: float = SKIPPED_SHARE,
    seconds: float = 180.0,
) -> float:
    """Preload a backlog, start workers, and return jobs per second from 5 % done to all done.

    Times are those that the system's own database stored with the final states; for systems that store none,
    the NATS server is asked every 20 ms how many messages are acknowledged.

    Raises:
        SystemFailed: not everything was done in ``seconds``.
    """
    system = load(name)
    variables = system.prepare(servers)
    with new_stamps(servers.folder, jobs) as stamps:
        variables |= stamps.variables
        answer_of(module("benchmarks.producing", name, "load", str(jobs)), variables, seconds=_LOAD_SECONDS)
        tidy_databases(variables)
        with running(system.workers(processes), variables) as started:
            if delivered.STREAM in variables:
                return rate(asyncio.run(_sampled(variables, jobs, started, seconds)), skipped=skipped)
            asyncio.run(_all_done(system, variables, stamps, started, seconds))
        times = asyncio.run(system.finish_times(variables))
    return rate(sorted((times or {}).values()), skipped=skipped)


def rate(times: Sequence[float], *, skipped: float = SKIPPED_SHARE) -> float:
    """Return jobs per second from 5 % done to all done.

    Args:
        times: when jobs were done, in seconds, ascending.
        skipped: the share to leave out, if not 5 %.

    Raises:
        SystemFailed: the times are too few, or do not differ.
    """
    first = math.floor(len(times) * skipped)
    if len(times) < 2 or times[-1] <= times[first]:
        raise SystemFailed(f"{len(times)} jobs are too few for a rate")
    return (len(times) - 1 - first) / (times[-1] - times[first])


def tidy_databases(variables: Mapping[str, str]) -> None:
    """Vacuum, analyze and checkpoint every database among the variables."""
    for value in variables.values():
        if value.startswith("postgresql://"):
            tidy(value)


async def _all_done(
    system: System,
    variables: Mapping[str, str],
    stamps: Stamps,
    processes: Sequence[Process],
    seconds: float,
) -> None:
    jobs = stamps.count

    async def all_started() -> bool:
        return stamps.all_started()

    async def all_finished() -> bool:
        return await system.finished(variables) >= jobs

    # Nothing but shared memory is read until the last job has started.
    await wait_until(all_started, processes, what=f"{jobs} jobs started", seconds=seconds)
    await wait_until(all_finished, processes, what=f"{jobs} jobs finished", seconds=seconds)


async def _sampled(
    variables: Mapping[str, str], jobs: int, processes: Sequence[Process], seconds: float
) -> list[float]:
    times: list[float] = []
    async with delivered.Watch(variables) as watch:

        async def all_acknowledged() -> bool:
            asked = time.monotonic()
            done = await watch.acknowledged()
            times.extend([asked] * (done - len(times)))
            return done >= jobs

        await wait_until(
            all_acknowledged,
            processes,
            what=f"{jobs} messages acknowledged",
            seconds=seconds,
            every=_SAMPLE_SECONDS,
        )
    return times


@dataclass(slots=True)
class Latencies:
    """The latencies of jobs that came at a rate, in seconds from the call of enqueue.

    Attributes:
        start: until the job started.
        completed: until its final state was written; empty for systems that store no such times.
    """

    start: list[float]
    completed: list[float]


@dataclass(slots=True)
class IdleWorker:
    """A worker that waits for jobs."""

    name: str
    system: System
    variables: dict[str, str]
    stamps: Stamps
    processes: list[Process]
    _next: int = field(default=_WARM_UP_JOBS)

    def latencies(self, rate: float, jobs: int, *, seconds: float = 60.0) -> Latencies:
        """Enqueue jobs at a rate from a process of its own, and return how long they took.

        Raises:
            SystemFailed: the jobs were not done ``seconds`` after the last was due.
        """
        first, self._next = self._next, self._next + jobs
        command = module("benchmarks.producing", self.name, "paced", str(jobs), str(rate))
        limit = jobs / rate + seconds
        calls = answer_of(command, self.variables | {FIRST: str(first)}, seconds=limit)
        asyncio.run(_all_started(self.stamps, self.processes, self._next, seconds))
        start = [self.stamps.start_of(number) - called for number, called, _ in calls]
        return Latencies(start, asyncio.run(self._completed(calls, seconds)))

    async def _completed(self, calls: Sequence[tuple[int, float, str]], seconds: float) -> list[float]:
        times = await self.system.finish_times(self.variables)
        if times is None:
            return []

        async def all_finished() -> bool:
            times.update(await self.system.finish_times(self.variables) or {})
            return all(job_id in times for _, _, job_id in calls)

        await wait_until(all_finished, self.processes, what=f"{len(calls)} jobs finished", seconds=seconds)
        epoch = time.time() - time.monotonic()
        return [times[job_id] - epoch - called for _, called, job_id in calls]


@contextmanager
def idle_worker(servers: Servers, name: str, jobs: int) -> Iterator[IdleWorker]:
    """Run a worker that has done a few jobs and waits; the caller may use numbers of jobs from 20 on.

    Yields the worker.
    """
    system = load(name)
    variables = system.prepare(servers)
    with new_stamps(servers.folder, jobs + _WARM_UP_JOBS) as stamps:
        variables |= stamps.variables | {delivered.BATCH: "1"}
        command = module("benchmarks.producing", name, "paced", str(_WARM_UP_JOBS), "50")
        with running(system.workers(1), variables) as processes:
            answer_of(command, variables | {FIRST: "0"}, seconds=60)
            asyncio.run(_all_started(stamps, processes, _WARM_UP_JOBS, 60.0))
            tidy_databases(variables)
            yield IdleWorker(name, system, variables, stamps, processes)


async def _all_started(stamps: Stamps, processes: Sequence[Process], count: int, seconds: float) -> None:
    async def all_started() -> bool:
        return stamps.all_started(count)

    await wait_until(all_started, processes, what=f"{count} jobs started", seconds=seconds)
