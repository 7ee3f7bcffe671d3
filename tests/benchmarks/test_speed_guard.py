"""A regression guard: how fast jsworker is beside the raw loop, in one run. No absolute times."""

import statistics
from typing import Final

import pytest

from benchmarks.figures import JSWORKER, RAW
from benchmarks.runs import drain, order
from benchmarks.servers import Servers

LEAST_RATIO: Final = 0.1
"""Of jsworker's no-op jobs per second to the raw loop's, which is as fast as we can write it; about 0.2 on
two idle cores. Generous: machines of other people are busy."""

ROUNDS: Final = 3
JOBS: Final = 15_000


@pytest.mark.thorough
@pytest.mark.timeout(600)  # two attempts on a machine that is busy with something else
def test_jsworker_keeps_up_with_the_raw_loop(bench: Servers) -> None:
    told = []
    for attempt in ("first", "second"):  # a machine that was busy once gets another chance
        rates = _rounds(bench)
        ratio = statistics.median(ours / raw for ours, raw in zip(rates[JSWORKER], rates[RAW], strict=True))
        told.append(
            f"{attempt}: {ratio:.2f} = {_words(rates[JSWORKER])} of jsworker / {_words(rates[RAW])} raw"
        )
        if ratio >= LEAST_RATIO:
            return
    raise AssertionError(f"jobs/s below {LEAST_RATIO} of the raw loop; " + "; ".join(told))


def _rounds(bench: Servers) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {JSWORKER: [], RAW: []}
    for turn in range(ROUNDS):
        for system in order(list(rates), turn):
            rates[system].append(drain(bench, system, JOBS, seconds=30.0))
    return rates


def _words(rates: list[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)
