"""Events and their listeners. Logs and metrics are listeners like any other."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import current_thread, main_thread
from typing import Any, Final, Literal, TypeAlias, get_args

from jsworker.core.tracebacks import traceback_of

EventName: TypeAlias = Literal[
    "isolated.ended",  # a child process for jobs of isolated kinds has ended, and why (`cause`)
    "job.claimed",  # a worker owns a job
    "job.started",  # the processor of a job is called
    "job.skipped",  # a message was answered without a run: its job has an owner, or has ended
    "job.held",  # a job waits for a limit, a rate or the end of a pause (`held_by`, `key`)
    "job.progress",  # a run reported its progress
    "job.completed",  # a job has completed
    "job.error",  # an attempt failed, another follows; or a hook raised
    "job.failed",  # a job has failed for good
    "job.cancelled",  # a job has ended as cancelled
    "job.fenced",  # a worker stopped a run, because heartbeats were not answered
    "job.released",  # a worker handed a job back: it drains, or the run was interrupted
    "job.step",  # a step of a job has completed
    "job.snoozed",  # a job was snoozed, or sleeps
    "job.stalled",  # a run was taken back, because its owner is silent or dead
    "job.stop_ignored",  # a run continues although its stop was requested
    "job.lost",  # an outcome was refused: another run owns the job, or PostgreSQL refuses to write it
    "job.cleared",  # a job was taken back and is queued again
    "jobs.expired",  # jobs that had not started in time were cancelled
    "jobs.pruned",  # ended jobs were deleted after `JSWORKER_RETENTION`
    "jobs.woken",  # held jobs of a kind may start
    "limit.changed",  # the limits of a class were written when its worker started
    "limit.paused",  # a worker learned that a kind is paused, or a job paused its key
    "limit.resumed",  # a worker learned that a kind is resumed
    "stale.detected",  # owners are silent, and jobs of theirs are due to be taken back
    "stale.recovered",  # jobs were taken back together: owners, cause, how many counted
    "reconcile.completed",  # a worker has checked at its start for jobs of previous processes
    "recovery.off",  # recovery rules are disabled
    "heartbeat.failed",  # PostgreSQL did not answer a heartbeat (debug from the second `in_a_row` on)
    "loop.blocked",  # code has held the event loop of a worker for long, so that nothing else in it runs
    "batch.finished",  # the last job of a workflow's node has ended
    "database.changed",  # PostgreSQL is another server than before: a failover, or a restore
    "prune.failed",  # ended jobs could not be deleted
    "message.dead",  # messages could not be used, and were set aside: `jsworker dead-messages`
    "message.refused",  # a message did not come from JetStream
    "message.republished",  # messages were lost, and published again
    "row.refused",  # PostgreSQL refuses to write a row
    "schedule.fired",  # a schedule enqueued a job
    "schedule.refused",  # a schedule cannot be fired
    "schedule.skipped",  # due times of a schedule were skipped (`scheduled_for` is the first), and why
    "setup.slow",  # `setup()`, a constructor or an import takes long
    "stream.changed",  # a stream or consumer was corrected, or unclaimed messages were removed
    "worker.started",  # a worker has started
    "worker.drained",  # a worker claims no more jobs, by an operator's request, until `worker.undrained`
    "worker.undrained",  # a drained worker claims jobs again
    "worker.draining",  # a worker stops: it claims no more jobs, and waits for running ones
    "worker.status",  # what a worker does: runs, jobs claimed ahead, jobs done since the last such line
    "worker.stopped",  # a worker has stopped
    "worker.degraded",  # something does not work (`what`, `reason`)
    "worker.restored",  # it works again (`what`)
    "workflow.finished",  # the last node of a workflow has finished
]
EVENT_NAMES: Final[frozenset[EventName]] = frozenset(get_args(EventName))


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        name: what happened.
        fields: the event's details, for example ``job_id``, ``kind``, ``fencing_token``; never a payload.
        exception: for ``job.error`` and ``job.failed`` the error that the processor raised, with its
            traceback, for an error tracker; TimeoutError if it was cancelled for a time limit; None where
            nothing was raised in this process. It may hold payloads; ``repr`` leaves it out.
    """

    name: EventName
    fields: dict[str, Any] = field(default_factory=dict)
    exception: BaseException | None = field(default=None, repr=False)


Listener = Callable[[Event], None]


class Events:
    """Listeners by event name. A listener that raises is reported on stderr and never harms a job."""

    def __init__(self) -> None:
        self._by_name: dict[EventName, list[Listener]] = {}
        self._all: list[Listener] = []

    def on(self, name: EventName | Literal["*"], listener: Listener) -> None:
        """Call ``listener`` with every event of this name; ``*`` means every event.

        Raises:
            ValueError: no event has this name.
        """
        if name == "*":
            self._all.append(listener)
        elif name in EVENT_NAMES:
            self._by_name.setdefault(name, []).append(listener)
        else:
            raise ValueError(f"event {name!r} must be one of: *, {', '.join(sorted(EVENT_NAMES))}")

    def wants(self, name: EventName) -> bool:
        """Return whether the event has listeners; if not, hot paths need not build it."""
        return bool(self._all) or name in self._by_name

    def emit(self, name: EventName, exception: BaseException | None = None, /, **fields: Any) -> None:
        """Call the listeners of this name in the order of registration, then those of every event."""
        listeners = [*self._by_name.get(name, ()), *self._all]
        if not listeners:
            return
        event = Event(name, fields, exception)
        for listener in listeners:
            try:
                listener(event)
            except BaseException as error:  # foreign code; a job must not pay for it
                if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                    raise  # Ctrl-C, which happened to arrive while the listener ran
                with suppress(Exception):  # a daemon may have no stderr, a job may have closed or replaced it
                    sys.stderr.write(_complaint(listener, name, error))


def _complaint(listener: Listener, name: EventName, error: BaseException) -> str:
    function = getattr(listener, "__qualname__", type(listener).__qualname__)
    module = getattr(listener, "__module__", type(listener).__module__)
    says = f"listener {module}.{function} of event {name} raised {type(error).__name__}\n"
    return says + traceback_of(error) if isinstance(error, Exception) else says
