"""Processors made of a function, which note what the worker told them."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor

KIND = "scripted"
AT_ONCE = Backoff(first=0.0)
LATER = Backoff(first=3600.0, longest=3600.0)


class Scripted(JobProcessor):
    """Does each job as a function says, and keeps what its hooks were told."""

    def __init__(self) -> None:
        self.failed: list[tuple[Job[Any], BaseException]] = []
        self.lost: list[Job[Any]] = []

    async def on_failed(self, job: Job[Any], error: BaseException) -> None:
        self.failed.append((job, error))

    async def on_lost(self, job: Job[Any]) -> None:
        self.lost.append(job)


def scripted(process: Callable[[Job[Any]], Any], *, kind: str = KIND, **attributes: Any) -> Scripted:
    """Return a processor that does its jobs as ``process`` does, a coroutine function or a plain one.

    Args:
        process: gets the job.
        kind: what its jobs are called.
        attributes: further class attributes, for example ``max_attempts``.
    """

    async def coroutine(_self: Scripted, job: Job[Any]) -> Any:
        return await process(job)

    def plain(_self: Scripted, job: Job[Any]) -> Any:
        return process(job)

    method = coroutine if inspect.iscoroutinefunction(process) else plain
    body = {"process": method, "kind": kind, "backoff": AT_ONCE, "__module__": __name__, **attributes}
    made: Scripted = type("Made", (Scripted,), body)()
    return made


class Gate:
    """A processor's function that stops at a gate: a test meets each job there and lets all through."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[Job[Any]] = asyncio.Queue()
        self._opened = asyncio.Event()

    async def process(self, job: Job[Any]) -> Any:
        """Wait at the gate, then return the payload."""
        self._arrived.put_nowait(job)
        await self._opened.wait()
        return job.payload

    async def met(self) -> Job[Any]:
        """Wait for the next job that arrives and return it."""
        async with asyncio.timeout(60.0):
            return await self._arrived.get()

    @property
    def waiting(self) -> int:
        """How many jobs have arrived and were not met."""
        return self._arrived.qsize()

    def open(self) -> None:
        """Let every job pass from now on."""
        self._opened.set()


async def echo(job: Job[Any]) -> Any:
    """Return the payload."""
    return job.payload
