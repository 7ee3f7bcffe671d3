"""Processors that worker processes import, with side effects in a file that a variable names."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from jsworker import Job, JobProcessor


def effect(text: str) -> str:
    """Append a line to the file of effects."""
    with Path(os.environ["EFFECTS"]).open("a") as file:
        file.write(f"{text}\n")
    return text


class Effects(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> str:
        effect("begun")
        await job.update_progress(progress=0.5)
        effect("half")
        await job.update_progress(progress=1.0)
        effect("done")
        return "result"


class Stepwise(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> list[str]:
        return [await job.step(name, effect, name) for name in ("first", "second", "third")]


class Apart(Stepwise):
    isolation = "process"


class InTransaction(JobProcessor):
    """Completes in its own transaction."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction(result="committed"):
            effect("done")


class Slow(JobProcessor):
    """Plain; waits in its first run alone."""

    def process(self, job: Job[dict[str, Any]]) -> str:
        effect("begun")
        if not job.cleared:
            time.sleep(600)
        return job.clear_reason or ""


class Quick(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.update_progress(progress=0.1)


class Late(Quick):
    """Has expired before a worker can start."""

    expires_in = 0.001


class Stuck(JobProcessor):
    """Never ends."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.update_progress(progress=0.1)
        await asyncio.Event().wait()


class Named(JobProcessor):
    """Made with an argument, at the top level."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def process(self, job: Job[dict[str, Any]]) -> str:
        return effect(f"{self.name} of {job.kind}")


NAMED = Named("an instance")
