"""The journal in which workers note their runs, and what it shows about a limit."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "LIMITS_JOURNAL"


@contextmanager
def running(job: str) -> Iterator[None]:
    """Write down when a run begins and ends. A killed process writes no end."""
    journal = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_APPEND)
    try:
        _write(journal, "begin", job)
        yield
        _write(journal, "end", job)
    finally:
        os.close(journal)


def _write(journal: int, what: str, job: str) -> None:
    # Lines of several processes do not mix, because each is appended by one short write.
    os.write(journal, f"{time.monotonic_ns()} {what} {os.getpgrp()} {job}\n".encode())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a journal shows about a limit.

    Attributes:
        runs: how many runs began.
        ended: how many jobs have ended.
        twice: how many of these ended more than once.
        exceeded: runs that began while as many as the limit allows were under way.
        most: the most runs at once.
        standstill: seconds, the longest time without any run.
        busy: the share of all slots that were taken, on average until the kills ended.
        most_afterwards: the most runs at once, from a while after the last kill on.
    """

    runs: int
    ended: int
    twice: int
    exceeded: int
    most: int
    standstill: float
    busy: float
    most_afterwards: int


def judge(
    journal: Path, kills: Mapping[int, float], *, limit: int, kills_ended: float, settled: float, until: float
) -> Verdict:
    """Read a journal whose times are those of ``time.monotonic``.

    Args:
        journal: the file.
        kills: when each process group was killed; its runs have ended then.
        limit: how many runs may be under way at once.
        kills_ended: when the last kill was over.
        settled: the time by which a queue has been able to notice every death.
        until: when the watch ended.
    """
    changes = [(at, "killed", group, "") for group, at in kills.items()]
    for line in journal.read_text().splitlines():
        nanoseconds, said, writer, run = line.split()
        changes.append((int(nanoseconds) / 1e9, said, int(writer), run))
    changes.sort()
    under_way: set[tuple[int, str]] = set()
    ends: Counter[str] = Counter()
    exceeded = most = most_afterwards = 0
    busy = standstill = 0.0
    first = before = empty_since = changes[0][0] if changes else until
    for at, what, group, job in [*changes, (until, "over", 0, "")]:
        busy += min(len(under_way), limit) * max(min(at, kills_ended) - before, 0.0)
        if under_way:
            empty_since = at
        else:
            standstill = max(standstill, at - empty_since)
        before = at
        if what == "begin":
            exceeded += len(under_way) >= limit
            under_way.add((group, job))
            most = max(most, len(under_way))
        elif what == "end":
            under_way.discard((group, job))
            ends[job] += 1
        else:
            under_way = {run for run in under_way if run[0] != group}
        if at >= settled:
            most_afterwards = max(most_afterwards, len(under_way))
    return Verdict(
        runs=sum(what == "begin" for _, what, _, _ in changes),
        ended=len(ends),
        twice=sum(number > 1 for number in ends.values()),
        exceeded=exceeded,
        most=most,
        standstill=standstill,
        busy=busy / (limit * max(kills_ended - first, 1e-9)),
        most_afterwards=most_afterwards,
    )
