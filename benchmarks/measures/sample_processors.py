"""The jobs of measures e to m: they do nothing, limited or not, tell when they were started, or wait."""

import asyncio
import time
from typing import Any

from jsworker import Job, JobProcessor, Limit, Rate

NOOP = "benchmarks.measures.sample_processors:Noop"
STAMP = "benchmarks.measures.sample_processors:Stamp"
HOLD = "benchmarks.measures.sample_processors:Hold"


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
