"""The worker context: what the components of a worker share, opened before them and closed after them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.workers import WorkerRow
from jsworker.stream.jetstream import Stream
from jsworker.worker.health import DatabaseHealth, Notifier, PublishingHealth
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.run import InFlight
from jsworker.worker.supervision import Supervision


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What every component may use.

    Attributes:
        me: this worker's row of the registry.
        supervision: supervises this process; None: nothing does.
        in_flight: the jobs that this process has claimed.
        requeued: notified when a job went back to the queue and waits to be published.
        room: notified when more jobs may be claimed.
        died: called with the name and the error of a component that ended in an error; the worker stops.
    """

    settings: Settings
    kinds: Mapping[str, Kind]
    me: WorkerRow
    database: Database
    sessions: Sessions
    stream: Stream
    events: Events
    supervision: Supervision | None
    health: DatabaseHealth
    publishing: PublishingHealth
    refused_rows: RefusedRows
    died: Callable[[str, BaseException], None]
    in_flight: InFlight = field(default_factory=InFlight)
    requeued: Notifier = field(default_factory=Notifier)
    room: Notifier = field(default_factory=Notifier)

    @property
    def worker_id(self) -> str:
        """The owner of everything that is in flight."""
        return self.me.id
