"""(l) How plain jobs are affected by many held ones: of a paused key, or of batches with open needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.filling import fill_held_by_key, fill_held_by_needs
from benchmarks.measures.load import backlog_rate, p50_and_p99, paced_latencies
from benchmarks.runs import order
from benchmarks.servers import running_servers

LETTER: Final = "l"
TITLE: Final = "plain jobs beside held ones"

_KIND: Final = "held"
_NONE: Final = "no held rows"
_PER_SECOND: Final = 200.0


@dataclass(slots=True)
class _Measured:
    """Values of one table, one for each round."""

    rates: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    p99s: list[float] = field(default_factory=list)


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    rows: int = 1_000_000,
    jobs: int = 100_000,
    latency_seconds: float = 30.0,
) -> list[Figure]:
    """Compare tables with held rows with one that has none, on the same server, in interleaved rounds.

    Args:
        rounds: the number of rounds; each has every table once, in another order.
        show: called with what is going on.
        rows: held jobs, of a kind that the worker does not serve.
        jobs: of the preloaded backlog that measures the rate.
        latency_seconds: how long the latency is measured at 200 jobs/s; it spans several scans.
    """
    by_key, by_needs = f"{rows:,} rows held by a key", f"{rows:,} rows held by needs"
    measured = {table: _Measured() for table in (_NONE, by_key, by_needs)}
    with running_servers() as servers:
        tables = {table: servers.new_jsworker() for table in measured}
        fill_held_by_key(tables[by_key]["JSWORKER_DATABASE_URL"], rows, kind=_KIND, show=show)
        fill_held_by_needs(tables[by_needs]["JSWORKER_DATABASE_URL"], rows, kind=_KIND, show=show)
        for turn in range(rounds):
            for table in order(list(tables), turn):
                values = measured[table]
                show(f"round {turn + 1} of {rounds}: {table}, no-op rate")
                values.rates.append(backlog_rate(tables[table], jobs))
                show(f"round {turn + 1} of {rounds}: {table}, latency at {_PER_SECOND:g} jobs/s")
                found = paced_latencies(tables[table], per_second=_PER_SECOND, seconds=latency_seconds)
                p50, p99 = p50_and_p99(found)
                values.medians.append(p50)
                values.p99s.append(p99)
    return _figures(measured)


def _figures(measured: Mapping[str, _Measured]) -> list[Figure]:
    figures: list[Figure] = []
    without = measured[_NONE]
    for table, values in measured.items():
        for name, unit, own, reference in (
            ("no-op jobs", "jobs/s", values.rates, without.rates),
            (f"start p50 at {_PER_SECOND:g}/s", "ms", values.medians, without.medians),
            (f"start p99 at {_PER_SECOND:g}/s", "ms", values.p99s, without.p99s),
        ):
            more = unit == "jobs/s"
            what = f"{name}, {table}"
            figures.append(Figure(LETTER, what, JSWORKER, unit, tuple(own), more_is_better=more))
            if values is not without:
                figures.append(_ratio(f"{name}, {table} ÷ {_NONE}", own, reference, more_is_better=more))
    return figures


def _ratio(name: str, own: Sequence[float], reference: Sequence[float], *, more_is_better: bool) -> Figure:
    ratios = tuple(ours / theirs for ours, theirs in zip(own, reference, strict=True))
    return Figure(LETTER, name, JSWORKER, "×", ratios, more_is_better=more_is_better)
