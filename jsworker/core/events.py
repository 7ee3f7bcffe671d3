"""Events and their listeners. Logs and metrics are listeners like any other."""

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import current_thread, main_thread
from typing import Any, Final, Literal, TypeAlias, get_args

EventName: TypeAlias = Literal[
    "isolated.ended",
    "job.claimed",
    "job.started",
    "job.skipped",
    "job.held",
    "job.progress",
    "job.completed",
    "job.error",
    "job.failed",
    "job.cancelled",
    "job.fenced",
    "job.released",
    "job.step",
    "job.snoozed",
    "job.stalled",
    "job.stop_ignored",
    "job.lost",
    "job.cleared",
    "jobs.expired",
    "jobs.pruned",
    "jobs.woken",
    "limit.changed",
    "limit.paused",
    "limit.resumed",
    "stale.detected",
    "stale.recovered",
    "reconcile.completed",
    "recovery.off",
    "heartbeat.failed",
    "batch.finished",
    "database.changed",
    "prune.failed",
    "message.dead",
    "message.refused",
    "message.republished",
    "row.refused",
    "schedule.fired",
    "schedule.refused",
    "schedule.skipped",
    "setup.slow",
    "stream.changed",
    "worker.started",
    "worker.draining",
    "worker.status",
    "worker.stopped",
    "worker.degraded",
    "worker.restored",
    "workflow.finished",
]
EVENT_NAMES: Final[frozenset[EventName]] = frozenset(get_args(EventName))


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        name: what happened.
        fields: what belongs to it, for example ``job_id``, ``kind``, ``fencing_token``; never a payload.
        exception: of ``job.error`` and ``job.failed``: what the processor raised, with its traceback, for an
            error tracker; None where nothing was raised in this process. It may hold payloads;
            ``repr`` leaves it out.
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
        """Return whether the event has listeners; hot paths need not build it otherwise."""
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
                    raise  # Ctrl-C, which happened to come here
                sys.stderr.write(_complaint(listener, name, error))


def _complaint(listener: Listener, name: EventName, error: BaseException) -> str:
    function = getattr(listener, "__qualname__", type(listener).__qualname__)
    module = getattr(listener, "__module__", type(listener).__module__)
    says = f"listener {module}.{function} of event {name} raised {type(error).__name__}\n"
    return says + traceback.format_exc() if isinstance(error, Exception) else says
