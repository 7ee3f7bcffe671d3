"""(k) The cost of a batch, a limit and a rate: no-op jobs with and without them, one worker process."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.jsworker_processes import workers
from benchmarks.measures.load import is_false, new_client, publish_all, until
from benchmarks.measures.sample_processors import HighlyRated, LimitedTo1000, Noop, OneAtATime
from benchmarks.runs import order, rate
from benchmarks.servers import Servers, running_servers
from benchmarks.systems.database import tidy
from jsworker import JobClient, JobProcessor

LETTER: Final = "k"
TITLE: Final = "batches, limits and rates"

_PLAIN: Final = "plain"
_UNFINISHED = """
SELECT EXISTS (SELECT FROM jsworker.jobs WHERE status IN ('scheduled', 'queued', 'processing'))
  OR EXISTS (SELECT FROM jsworker.batches WHERE finished_at IS NULL)
"""
_FINISHED = """
SELECT extract(epoch FROM finished_at)::double precision FROM (
  SELECT finished_at FROM jsworker.jobs UNION ALL SELECT finished_at FROM jsworker.batches
) AS ended ORDER BY finished_at
"""


async def _enqueue(client: JobClient, processor: type[JobProcessor], jobs: int) -> None:
    await client.enqueue_many(processor, _payloads(jobs))


async def _enqueue_batch(client: JobClient, processor: type[JobProcessor], jobs: int) -> None:
    async with client.workflow("bench") as flow:
        flow.batch(processor, _payloads(jobs))


def _payloads(jobs: int) -> list[dict[str, object]]:
    return [{"n": n, "tenant": "acme"} for n in range(jobs)]


@dataclass(frozen=True, slots=True)
class _Load:
    """Jobs of one sort; their number is ``share`` times that of the plain jobs."""

    processor: type[JobProcessor]
    enqueue: Callable[[JobClient, type[JobProcessor], int], Awaitable[None]] = _enqueue
    share: float = 1.0


_LOADS: Final[Mapping[str, _Load]] = {
    _PLAIN: _Load(Noop),
    "members of one batch, to its end": _Load(Noop, _enqueue_batch),
    "limit of 1,000 on one key": _Load(LimitedTo1000),
    "rate of 1,000,000/s on one key": _Load(HighlyRated),
    "limit of 1 on one key": _Load(OneAtATime, share=0.1),
}


def measure(rounds: int, show: Callable[[str], None], *, jobs: int = 100_000) -> list[Figure]:
    """Measure the rate from 5 % done to all done, of a preloaded backlog, each on a database of its own.

    Args:
        rounds: the number of rounds; each has every load once, in another order.
        show: called with what is going on.
        jobs: the jobs of each load, at most 100,000; a tenth of them for the limit of 1.
    """
    rates: dict[str, list[float]] = {name: [] for name in _LOADS}
    with running_servers() as servers:
        for turn in range(rounds):
            for name in order(list(_LOADS), turn):
                show(f"round {turn + 1} of {rounds}: {name}")
                rates[name].append(_rate(servers, _LOADS[name], jobs))
    return _figures(rates)


def _rate(servers: Servers, load: _Load, jobs: int) -> float:
    variables = servers.new_jsworker()
    url = variables["JSWORKER_DATABASE_URL"]
    asyncio.run(_preload(variables, load, max(2, round(jobs * load.share))))
    tidy(url)
    target = f"{load.processor.__module__}:{load.processor.__name__}"
    with workers(1, [target], variables):
        asyncio.run(until(lambda: is_false(url, _UNFINISHED)))
    with psycopg.connect(url) as connection:
        return rate([float(row[0]) for row in connection.execute(_FINISHED)])


async def _preload(variables: Mapping[str, str], load: _Load, jobs: int) -> None:
    async with new_client(variables) as client:
        await load.enqueue(client, load.processor, jobs)
    await publish_all(variables)


def _figures(rates: Mapping[str, Sequence[float]]) -> list[Figure]:
    figures: list[Figure] = []
    for name, values in rates.items():
        figures.append(Figure(LETTER, f"no-op jobs, {name}", JSWORKER, "jobs/s", tuple(values)))
        if name != _PLAIN:
            ratios = tuple(own / plain for own, plain in zip(values, rates[_PLAIN], strict=True))
            figures.append(Figure(LETTER, f"no-op jobs, {name} ÷ {_PLAIN}", JSWORKER, "×", ratios))
    return figures
