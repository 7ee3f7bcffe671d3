"""The jobs of measures e to n: they do nothing, tell when they were started, wait, or compute."""

import asyncio
import time
from typing import Any

from jsworker import Job, JobProcessor, Limit, Rate

NOOP = "benchmarks.measures.sample_processors:Noop"
STAMP = "benchmarks.measures.sample_processors:Stamp"
HOLD = "benchmarks.measures.sample_processors:Hold"
COMPUTE = "benchmarks.measures.sample_processors:Compute"
LATENESS = "benchmarks.measures.sample_processors:Lateness"

_STEPS = 500_000
_TIMER_SECONDS = 0.02


def compute(number: int) -> float:
    """Compute in plain Python, for some 30 ms, and return the milliseconds that it took."""
    began = time.perf_counter()
    total = number
    for step in range(_STEPS):
        total = total * 31 % 65_521 + step
    return 1000 * (time.perf_counter() - began)


class Noop(JobProcessor):
    """Does nothing."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class Stamp(JobProcessor):
    """Tells how long ago its producer called ``enqueue``."""

    async def process(self, job: Job[dict[str, Any]]) -> float:
        """Return the seconds since ``at`` of the payload, on the machine's monotonic clock."""
        return time.monotonic() - float(job.payload["at"])


class Hold(JobProcessor):
    """Runs until it is stopped, and needs nothing meanwhile."""

    async def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- the base class's signature
        """Wait for what never happens."""
        await asyncio.Event().wait()


class LimitedTo1000(JobProcessor):
    """Does nothing, a thousand at once of each tenant."""

    limit = Limit(1_000, key="tenant")

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class OneAtATime(JobProcessor):
    """Does nothing, one at once of each tenant."""

    limit = Limit(1, key="tenant")

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class HighlyRated(JobProcessor):
    """Does nothing, at a rate of each tenant that no machine reaches."""

    rate = Rate(1_000_000, key="tenant")

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class FiftyASecond(JobProcessor):
    """Does nothing, fifty times a second."""

    rate = Rate(50)

    async def process(self, job: Job[dict[str, Any]]) -> None:
        """Return at once."""


class Compute(JobProcessor[int]):
    """Computes, in an isolated process."""

    isolation = "process"

    def process(self, job: Job[int]) -> float:
        """Call the same function as the process pool."""
        return compute(job.payload)


class Lateness(JobProcessor[float]):
    """Watches the event loop of its worker, for as many seconds as its payload says."""

    async def process(self, job: Job[float]) -> list[float]:
        """Return by how many milliseconds each timer was late."""
        ends_at, late = time.monotonic() + job.payload, []
        while (due_at := time.monotonic() + _TIMER_SECONDS) < ends_at:
            await asyncio.sleep(_TIMER_SECONDS)
            late.append(1000 * max(0.0, time.monotonic() - due_at))
        return late
