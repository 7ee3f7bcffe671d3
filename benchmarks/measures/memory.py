"""(h) Memory of an idle worker and of a busy one, and how long ``import jsworker`` takes."""

import asyncio
import compileall
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import psutil
import psycopg

import jsworker
from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import new_client, publish_all, until
from benchmarks.measures.sample_processors import HOLD, NOOP, Hold
from benchmarks.servers import environment_with, running_servers

LETTER: Final = "h"
TITLE: Final = "memory and import time"

_MEGABYTE = 1024 * 1024
_SETTLE_SECONDS = 6.0
"""After this time, with a heartbeat and a scan, an idle worker has loaded all that it needs."""
_HELD = "SELECT count(*) FROM jsworker.jobs WHERE status || '' = 'processing'"
_BEGINNINGS = {
    "an empty Python program": ["-c", "pass"],
    "import jsworker": ["-c", "import jsworker"],
    "python -m jsworker --help": ["-m", "jsworker", "--help"],
}


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    running_jobs: int = 1000,
    starts: int = 5,
    settle_seconds: float = _SETTLE_SECONDS,
) -> list[Figure]:
    """Measure the memory of jsworker's processes and the time of their start.

    Args:
        rounds: the number of rounds of everything.
        show: called with what is going on.
        running_jobs: jobs that run at once in one worker.
        starts: starts of each fresh interpreter in a round; their median counts.
        settle_seconds: between the start of a worker and the reading of its memory.
    """
    compileall.compile_dir(Path(jsworker.__file__).parent, quiet=2)
    sizes: list[dict[str, float]] = []
    times: list[dict[str, tuple[float, float]]] = []
    with running_servers() as servers:
        for n in range(rounds):
            show(f"memory, round {n + 1}")
            sizes.append(
                _idle(servers.new_jsworker(), settle_seconds)
                | _busy(servers.new_jsworker(), running_jobs, settle_seconds)
            )
    for n in range(rounds):
        show(f"import time, round {n + 1}")
        times.append({name: _start(arguments, starts) for name, arguments in _BEGINNINGS.items()})
    return _weights(sizes) + _durations(times)


def _idle(variables: Mapping[str, str], settle_seconds: float) -> dict[str, float]:
    with workers(1, [NOOP], variables) as running:
        time.sleep(settle_seconds)
        return _weigh("idle worker", running.children[0]) | _weigh("supervisor", running.parent)


def _busy(variables: Mapping[str, str], jobs: int, settle_seconds: float) -> dict[str, float]:
    limits = {"JSWORKER_CONCURRENCY": str(jobs), "JSWORKER_SHUTDOWN_TIMEOUT": "0.1"}
    with workers(1, [HOLD], {**variables, **limits}) as running:
        asyncio.run(_hold(variables, jobs))
        time.sleep(settle_seconds)
        return _weigh(f"worker with {jobs:,} running jobs", running.children[0])


async def _hold(variables: Mapping[str, str], jobs: int) -> None:
    async def all_held() -> bool:
        async with await psycopg.AsyncConnection.connect(variables["JSWORKER_DATABASE_URL"]) as connection:
            return await (await connection.execute(_HELD)).fetchone() == (jobs,)

    async with new_client(variables) as client:
        await client.enqueue_many(Hold, [{"n": n} for n in range(jobs)])
    await publish_all(variables)
    await until(all_held)


def _weigh(who: str, pid: int) -> dict[str, float]:
    """Return resident memory, and this process's own shares of it, in megabytes."""
    memory = psutil.Process(pid).memory_full_info()
    shares = {"RSS": memory.rss, "PSS": memory.pss, "USS": memory.uss}
    return {f"{who}: {share}": size / _MEGABYTE for share, size in shares.items()}


def _start(arguments: list[str], starts: int) -> tuple[float, float]:
    """Return median CPU and wall seconds of starts; one more warms the disk, and the slowest is dropped."""
    runs = sorted(_start_once(arguments) for _ in range(starts + 1))[: max(starts, 1)]
    cpu, wall = zip(*runs, strict=True)
    return sorted(cpu)[len(cpu) // 2], sorted(wall)[len(wall) // 2]


def _start_once(arguments: list[str]) -> tuple[float, float]:
    started = time.perf_counter()
    process = subprocess.Popen(  # noqa: S603 -- this interpreter
        [sys.executable, *arguments],
        env=environment_with({}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)  # psutil cannot read a process that has ended
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode != 0:
        raise RuntimeError(f"python {' '.join(arguments)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall


def _weights(rounds: list[dict[str, float]]) -> list[Figure]:
    return [
        Figure(LETTER, name, JSWORKER, "MB", tuple(sizes[name] for sizes in rounds), more_is_better=False)
        for name in rounds[0]
    ]


def _durations(rounds: list[dict[str, tuple[float, float]]]) -> list[Figure]:
    def figure(name: str, what: str, index: int) -> Figure:
        values = tuple(times[name][index] for times in rounds)
        return Figure(LETTER, f"{name}: {what}", JSWORKER, "s", values, more_is_better=False)

    return [
        figure(name, what, index)
        for name in _BEGINNINGS
        for index, what in enumerate(("CPU time", "wall time"))
    ]
