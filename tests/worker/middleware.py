"""Middleware that another process can import, and processors that run within it."""

import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Self

from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor

seen: list[str] = []
"""What middleware of this process has noted."""


@asynccontextmanager
async def noting(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    seen.append(f"noting {job.kind} of {type(processor).__name__} in {os.getpid()}")
    yield


@asynccontextmanager
async def labelled(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    seen.append("labelled")
    yield


class Threaded(AbstractAsyncContextManager[None], AbstractContextManager[None]):
    """Enters the thread of a plain function."""

    def __init__(self, job: Job[Any], processor: JobProcessor[Any]) -> None:  # noqa: ARG002 -- as it is called
        self._token = job.fencing_token

    async def __aenter__(self) -> None:
        seen.append(f"async {threading.current_thread().name}")

    async def __aexit__(self, *_: object) -> None:
        seen.append("async end")

    def __enter__(self) -> None:
        seen.append(f"plain {threading.current_thread().name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seen.append(f"plain end of {kind.__name__ if kind else None}")


class Labels:
    """Middleware made with an argument."""

    def __init__(self, label: str) -> None:
        self.label = label

    @asynccontextmanager
    async def __call__(self, job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[Self]:  # noqa: ARG002 -- as it is called
        seen.append(self.label)
        yield self


LABELS = Labels("at module level")


class Alone(JobProcessor):
    """Always in quarantine, because no stall is left to it."""

    max_stalls = 1
    middleware = (labelled,)

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:  # noqa: ARG002 -- as it is called
        return {"pid": os.getpid(), "seen": seen[:]}
