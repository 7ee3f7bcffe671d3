"""(m) How even a rate of 50 a second is, with six worker processes: when each job was admitted."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import new_client, p50_and_p99
from benchmarks.measures.sample_processors import FiftyASecond
from benchmarks.servers import running_servers

LETTER: Final = "m"
TITLE: Final = "evenness of a rate"

_RATE: Final = FiftyASecond.rate
_TARGET: Final = f"{FiftyASecond.__module__}:{FiftyASecond.__name__}"
_MORE_SECONDS: Final = 2.0
"""Jobs are enqueued for so much longer than is counted, so that the last second is full, too."""
_ADMITTED = """
SELECT extract(epoch FROM claimed_at)::double precision FROM jsworker.jobs
WHERE claimed_at IS NOT NULL ORDER BY claimed_at
"""
# The bucket was never full again, so each job has moved this time on by one step.
_FULL_AT = "SELECT extract(epoch FROM full_at)::double precision FROM jsworker.limits"


@dataclass(frozen=True, slots=True)
class Admitted:
    """When jobs were admitted, by the database's clock.

    Attributes:
        by_second: the number of jobs in each whole second since the first job.
        late_milliseconds: for each job after the burst, the time from the return of its token.
    """

    by_second: list[int]
    late_milliseconds: list[float]


def measure(
    rounds: int, show: Callable[[str], None], *, seconds: int = 61, processes: int = 6
) -> list[Figure]:
    """Enqueue more jobs than a rate admits while workers wait, and count how many each second admits.

    Args:
        rounds: each on a database of its own.
        show: called with what is going on.
        seconds: the seconds to count; the first one has the burst.
        processes: the number of worker processes.
    """
    found: list[Admitted] = []
    with running_servers() as servers:
        for turn in range(rounds):
            show(f"round {turn + 1} of {rounds}: {seconds} seconds")
            variables = servers.new_jsworker()
            with workers(processes, [_TARGET], variables):
                asyncio.run(_enqueue(variables, seconds))
                time.sleep(seconds + 1.0)
            found.append(_admitted(variables["JSWORKER_DATABASE_URL"], seconds))
    return _figures(found, processes)


async def _enqueue(variables: Mapping[str, str], seconds: int) -> None:
    jobs = _RATE.number + math.ceil(_RATE.number / _RATE.per * (seconds + _MORE_SECONDS))
    async with new_client(variables) as client:
        await client.enqueue_many(FiftyASecond, [{}] * jobs)


def _admitted(url: str, seconds: int) -> Admitted:
    with psycopg.connect(url) as connection:
        [[full_at]] = connection.execute(_FULL_AT)
        times = [float(row[0]) for row in connection.execute(_ADMITTED)]
    counts = Counter(int(at - times[0]) for at in times)
    step = _RATE.per / _RATE.number
    began = full_at - step * len(times)
    due = [began + (n + 1) * step for n in range(len(times) - _RATE.number)]
    late = [1000 * (at - token) for at, token in zip(times[_RATE.number :], due, strict=True)]
    return Admitted([counts[second] for second in range(seconds)], late)


def _figures(found: Sequence[Admitted], processes: int) -> list[Figure]:
    first = tuple(float(each.by_second[0]) for each in found)
    later = [each.by_second[1:] for each in found]
    late = [p50_and_p99(each.late_milliseconds) for each in found]
    load = f"{_RATE.number} per {_RATE.per:g} s, {processes} worker processes"

    def jobs(name: str, values: tuple[float, ...]) -> Figure:
        return Figure(LETTER, f"{load}: {name}", JSWORKER, "jobs", values, more_is_better=False)

    def milliseconds(name: str, values: tuple[float, ...]) -> Figure:
        name = f"{load}: admitted after the token was back, {name}"
        return Figure(LETTER, name, JSWORKER, "ms", values, more_is_better=False)

    return [
        jobs("begun in the first second, of which a full bucket at once", first),
        jobs("fewest in a later second", tuple(float(min(each)) for each in later)),
        jobs("most in a later second", tuple(float(max(each)) for each in later)),
        milliseconds("p50", tuple(p50 for p50, _ in late)),
        milliseconds("p99", tuple(p99 for _, p99 in late)),
    ]
