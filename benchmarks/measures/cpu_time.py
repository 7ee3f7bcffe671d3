"""CPU seconds of processes and of everything that they have started, ended processes included."""

from collections.abc import Sequence

import psutil


def cpu_seconds(*pids: int) -> float:
    """Return user and system time that these processes and those below them have used so far."""
    return sum(_of_tree(psutil.Process(pid)) for pid in pids)


def own_cpu_seconds(pid: int) -> float:
    """Return user and system time of one process alone."""
    return sum(psutil.Process(pid).cpu_times()[:2])


def _of_tree(process: psutil.Process) -> float:
    return sum(_with_ended_children(_times(one)) for one in (process, *process.children(recursive=True)))


def _times(process: psutil.Process) -> Sequence[float]:
    try:
        times: Sequence[float] = process.cpu_times()
    except psutil.NoSuchProcess:
        return ()  # ended just now: from the next reading on, its parent has its time
    return times


def _with_ended_children(times: Sequence[float]) -> float:
    return sum(times[:4])
