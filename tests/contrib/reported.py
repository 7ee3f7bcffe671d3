"""Processors whose failures are reported to Sentry, by a transport that writes events to a file or a list."""

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from jsworker.contrib.sentry import sentry_scope
from jsworker.core.errors import Fail, Retry, Snooze
from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor


class Collecting(Transport):
    """Keeps events until it is flushed, as one that sends them in the background does."""

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        super().__init__(options)
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        if (event := envelope.get_event()) is not None:
            self.events.append(json.loads(json.dumps(event, default=str)))

    def flush(self, timeout: float, callback: Any = None) -> None:  # noqa: ARG002 -- Sentry's
        if path := os.environ.get("SENTRY_FILE"):
            Path(path).write_text(json.dumps(self.events))


class Failing(JobProcessor):
    """Fails as the payload says."""

    middleware = (sentry_scope,)
    backoff = Backoff(first=3600.0, longest=3600.0)

    async def process(self, job: Job[dict[str, Any]]) -> None:
        secret = job.payload["secret"]
        match job.payload["does"]:
            case "raise":
                raise ValueError("wrong")
            case "raise as a database":
                raise ValueError(f"duplicate key\nDETAIL: Key (name)=({secret}) already exists.")
            case "raise with the secret":
                raise ValueError(f"no {secret}") from KeyError(secret)
            case "fail":
                raise Fail("for good")
            case "retry":
                raise Retry(after=3600)
            case "snooze":
                raise Snooze(after=3600)
            case "snooze in a group":
                raise ExceptionGroup("of a TaskGroup", [Snooze(after=3600), Retry(after=60)])
            case "log":
                logging.getLogger("shop").error("card refused", stack_info=job.payload["stack_info"])
            case "wait":
                await asyncio.Event().wait()


class FailingPlainly(JobProcessor):
    """Fails in a thread."""

    middleware = (sentry_scope,)
    backoff = Backoff(first=3600.0, longest=3600.0)

    def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        sentry_sdk.set_tag("set by", "the job")
        raise ValueError(f"of {sentry_sdk.get_isolation_scope()._transaction}")


class FailingAlone(Failing):
    """Fails in quarantine."""

    max_stalls = 1

    async def setup(self) -> None:
        sentry_sdk.init(dsn="https://public@sentry.example/1", transport=Collecting)
