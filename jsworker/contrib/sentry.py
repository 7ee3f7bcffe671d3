"""Sentry: ``sentry_scope`` is middleware that reports failed attempts, each in a scope of its own.

The application calls ``sentry_sdk.init``, in a module that its workers import. Events have the job's kind, id
and attempt, but no payload: local variables of frames are left out, and so are values of rows in the messages
of database errors. With a codec, messages of all errors are left out.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import sentry_sdk
from sentry_sdk.types import Event, Hint
from sentry_sdk.utils import current_stacktrace, iter_event_frames

from jsworker.core.errors import Retry, Snooze
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.worker.pipeline.concealment import LEFT_OUT
from jsworker.worker.pipeline.outcomes import clean, raised_in

_NO_FAILURES: Final = (Retry, Snooze, GeneratorExit)
_NO_STACK_ADDED: Final = {"type", "exception", "stacktrace", "threads"}
"""What an event holds to which Sentry adds no stack; only events other than errors have a type."""


class SentryScope:
    """Middleware: give each run an isolation scope, and capture in it the error that the run raises.

    A run that is cancelled for its time limit is captured as a TimeoutError. ``Retry``, ``Snooze`` and other
    cancellations are not failures and are not captured.
    """

    @asynccontextmanager
    async def __call__(self, job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        """Run a job in a scope of its own."""
        facts = {"kind": job.kind, "id": str(job.id), "attempt": job.attempt}
        with sentry_sdk.isolation_scope() as scope:
            scope.set_transaction_name(job.kind, source="task")
            scope.set_context("job", {**facts, "processor": type(processor).__qualname__})
            scope.set_tag("jsworker.kind", job.kind)
            scope.set_tag("jsworker.job_id", str(job.id))
            conceals = job._ownership.conceals  # noqa: SLF001 -- not part of the public interface
            scope.add_event_processor(partial(_without_values, conceals=conceals))
            try:
                yield
            except asyncio.CancelledError as error:
                if limit := job._ownership.passed_limit:  # noqa: SLF001 -- as above
                    sentry_sdk.capture_exception(TimeoutError(limit).with_traceback(error.__traceback__))
                raise
            except BaseException as error:
                if not all(isinstance(each, _NO_FAILURES) for each in raised_in(error)):
                    sentry_sdk.capture_exception(error)
                raise

    def flush(self, seconds: float) -> None:
        """Send what was captured, before a process ends without ``atexit``."""
        sentry_sdk.flush(seconds)


sentry_scope: Final = SentryScope()


def _without_values(event: Event, _hint: Hint, *, conceals: bool) -> Event:
    for error in (event.get("exception") or {}).get("values", ()):
        if conceals:
            error["value"] = LEFT_OUT
        elif error.get("value"):
            error["value"] = clean(error["value"])
    # Sentry would add the stack later, with the variables.
    if sentry_sdk.get_client().options["attach_stacktrace"] and not _NO_STACK_ADDED & event.keys():
        stack = current_stacktrace(include_local_variables=False)
        stack["frames"].pop()  # this function
        event["threads"] = {"values": [{"stacktrace": stack, "crashed": False, "current": True}]}
    for frame in iter_event_frames(event):
        frame.pop("vars", None)
    return event
