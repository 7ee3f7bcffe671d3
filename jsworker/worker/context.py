"""The worker context: what all components share, for example the health of PostgreSQL and JetStream."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from jsworker.core.clock import boottime, jittered
from jsworker.core.contents import Contents
from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseFailing,
    DatabaseRefused,
    DatabaseUnavailable,
    JsworkerError,
    LockTimeout,
    StreamRefused,
    StreamUnavailable,
    TooManyConnections,
    TooManyFiles,
)
from jsworker.core.events import Events
from jsworker.core.open_files import OpenFiles
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.ownership.transitions.workers import WorkerRow
from jsworker.stream.jetstream import Stream
from jsworker.worker.figure_counts import FigureCounts
from jsworker.worker.pipeline.in_flight import InFlight
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.supervision import Supervision

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_CALM_SECONDS: Final = 60.0
_REFUSES_SECONDS: Final = 30.0
"""After a refusal the worker stays degraded for so long: longer than any refused statement waits for its next
try, because other statements are answered meanwhile. So it does when it could open no connection for want of
files, because those that are open are used meanwhile."""
_OF_THE_STATEMENT: Final = "42"
"""The SQLSTATE class of missing rights, tables and columns."""


class Notifier(list[Callable[[], None]]):
    """Functions that are called, in this order, when something has happened; each returns at once."""

    def notify(self) -> None:
        """Call all of them."""
        for subscriber in self:
            subscriber()


class TouchedBatches:
    """Batches of which a member has ended here; ``changed`` is notified when a batch is added."""

    def __init__(self) -> None:
        self._touched: set[UUID] = set()
        self.changed = Notifier()

    def touch(self, batch: UUID) -> None:
        """Add a batch, to be checked for its end."""
        if batch not in self._touched:
            self._touched.add(batch)
            self.changed.notify()

    def take(self) -> set[UUID]:
        """Return the batches that were touched since the last call."""
        taken, self._touched = self._touched, set()
        return taken

    def put_back(self, batches: set[UUID]) -> None:
        """Keep batches for the next call, without notifying: what has failed would fail at once again."""
        self._touched |= batches


class DatabaseHealth:
    """Whether the database answers, as its users report it; ``changed`` is notified when that changes.

    A refused statement is tried again like an unanswered one. The worker is reported as degraded until no
    statement was refused for a while, even if other statements are answered. The same holds for connections
    that the server has not left, or for which this process could open no socket.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._up = asyncio.Event()
        self._up.set()
        self.changed = Notifier()
        self._failed_at = -math.inf
        self._refused_at = -math.inf
        self._no_connection_at = -math.inf
        self._refusals: set[str] = set()
        self._reported: set[str] = set()
        self.refusal: str | None = None
        """PostgreSQL's reason for a recent refusal; None if there was none, or it has been silent since."""
        self.silence: str | None = None
        """Why the last statement that was not answered got no answer; None once the worker is restored."""

    @property
    def up(self) -> bool:
        """Whether the last statement was answered."""
        return self._up.is_set()

    @property
    def degraded(self) -> bool:
        """Whether the database is reported as not answering, or as refusing a statement."""
        return bool(self._reported)

    def failed_within(self, seconds: float) -> bool:
        """Return whether a statement was unanswered within the last ``seconds``."""
        return boottime() - self._failed_at < seconds

    def failed(self, error: JsworkerError) -> None:
        """Note an unanswered statement. A refused row is an answer, reported once until the next outage."""
        if isinstance(error, RowRefused):
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                facts = {"job_id": None, "sqlstate": error.sqlstate, "constraint": error.constraint}
                self._events.emit("row.refused", **facts)
            return
        self._failed_at = boottime()
        refused = isinstance(error, DatabaseFailing) or (
            isinstance(error, DatabaseRefused) and (error.sqlstate or "").startswith(_OF_THE_STATEMENT)
        )
        if refused:
            self._refused_at = self._failed_at
            self.refusal = str(error).rpartition(" refused a statement: ")[2]
        elif isinstance(error, DatabaseUnavailable):
            self.refusal, self.silence = None, str(error)
            if isinstance(error, TooManyConnections | TooManyFiles):
                self._no_connection_at = self._failed_at
        was_up = self.up
        self._up.clear()
        reason = str(error)
        # The reason of a server that fails names another file or block each time.
        known_by = error.sqlstate if isinstance(error, DatabaseFailing) else reason
        # A login may be refused only after a while of silence.
        if (was_up or refused or isinstance(error, DatabaseRefused)) and known_by not in self._reported:
            self._reported.add(known_by)
            self._events.emit("worker.degraded", what="postgresql", reason=reason)
        if was_up:
            self.changed.notify()

    def answered(self) -> None:
        """Note that a statement was answered."""
        was_up = self.up
        self._up.set()
        if self.refusal is not None and boottime() - self._refused_at >= _REFUSES_SECONDS:
            self.refusal = None
        lately = boottime() - _REFUSES_SECONDS < self._no_connection_at
        if self.refusal is None and not lately:
            self.silence = None
            if self._reported:
                self._reported.clear()
                self._refusals.clear()
                self._events.emit("worker.restored", what="postgresql")
        if not was_up:
            self.changed.notify()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note a database error raised in the block and suppress it: the next round tries again."""
        try:
            yield
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self.failed(error)

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Call ``ask`` until the database answers; this may take as long as an outage."""
        while True:
            await self.wait_until_up()
            with self.noting():
                return await ask()

    async def wait_until_up(self) -> None:
        """Wait until the database answers again."""
        await self._up.wait()

    async def probe(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Call ``ask`` if the database did not answer the last statement."""
        if not self.up:
            try:
                await ask()
            except JsworkerError:
                return
            self.answered()


class Complaints:
    """Problems that ``DatabaseHealth`` does not know; each is reported once, and again for another reason."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._reasons: dict[str, str] = {}

    def report(self, what: str, reason: str) -> None:
        """Report why something does not work."""
        if self._reasons.get(what) != reason:
            self._reasons[what] = reason
            self._events.emit("worker.degraded", what=what, reason=reason)

    def end(self, what: str) -> None:
        """Report that something works again, if it did not."""
        if self._reasons.pop(what, None) is not None:
            self._events.emit("worker.restored", what=what)

    def note(self, what: str, reason: str | None) -> None:
        """Report why something does not work; with None, that it works."""
        if reason is None:
            self.end(what)
        else:
            self.report(what, reason)

    @contextmanager
    def of_stream(self, what: str) -> Iterator[None]:
        """Report a refusal of JetStream in the block; pullers and publishers report its silence."""
        try:
            yield
        except StreamRefused as error:
            self.report(what, str(error))
        except StreamUnavailable:
            return


class PublishingHealth:
    """Whether JetStream stores or refuses published messages; ``changed`` is notified when that changes.

    A full stream stores a message now and then, when others are acknowledged: if it refuses again soon, the
    next trials come later.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self.changed = Notifier()
        self._pause = _FIRST_PAUSE_SECONDS
        self._try_at = 0.0
        self._stored_at = -math.inf
        self.refused = False

    @property
    def is_trial_due(self) -> bool:
        """Whether it is time for a trial message."""
        return boottime() >= self._try_at

    def failed(self, reason: str) -> None:
        """Note that messages are not stored."""
        now = boottime()
        again = self.refused or now - self._stored_at < _CALM_SECONDS
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS) if again else _FIRST_PAUSE_SECONDS
        self._try_at = now + jittered(self._pause, 0.25)
        if not self.refused:
            self.refused = True
            self._events.emit("worker.degraded", what="publishing", reason=reason)
            self.changed.notify()

    def put_off(self) -> None:
        """Note that there was no message for a trial."""
        self._try_at = boottime() + _FIRST_PAUSE_SECONDS

    def stored(self) -> None:
        """Note that messages are stored."""
        if self.refused:
            self.refused = False
            self._stored_at = boottime()
            self._events.emit("worker.restored", what="publishing")
            self.changed.notify()


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The objects that every component may use.

    Attributes:
        me: this worker's row of the registry.
        died: called with the name and the error of a component that ended in an error; the worker stops.
        requeued: notified when a job was queued again and waits to be published.
        room: notified when more jobs may be claimed.
        held: notified when a job was held until a time, for example for a token of a rate.
        batches: batches of which a member has ended.
        counts: counts of finished work that are not written to the database yet.
        files: while they are exhausted, no jobs are claimed.
    """

    settings: Settings
    contents: Contents
    kinds: Mapping[str, Kind]
    me: WorkerRow
    database: Database
    sessions: Sessions
    stream: Stream
    events: Events
    supervision: Supervision | None
    health: DatabaseHealth
    publishing: PublishingHealth
    complaints: Complaints
    refused_rows: RefusedRows
    died: Callable[[str, BaseException], None]
    counts: FigureCounts
    in_flight: InFlight = field(default_factory=InFlight)
    requeued: Notifier = field(default_factory=Notifier)
    room: Notifier = field(default_factory=Notifier)
    held: Notifier = field(default_factory=Notifier)
    batches: TouchedBatches = field(default_factory=TouchedBatches)
    files: OpenFiles = field(default_factory=OpenFiles)

    @property
    def worker_id(self) -> str:
        """The id under which this worker owns jobs."""
        return self.me.id

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note a database error in the block; a refused statement is a problem of ``what`` only."""
        with self.health.noting():
            try:
                yield
            except DatabaseRefused as error:
                if error.sqlstate is None:
                    raise
                self.complaints.report(what, str(error))

    async def unanswered(self, error: DatabaseUnavailable | DatabaseRefused) -> None:
        """Note that a statement was not answered, unless a ping shows that it only waited for a lock.

        Two cases are noted without a ping: no free connection, disk space or the like, because the open
        connection of the heartbeats would answer the ping; and a refusal for another reason than a lock.
        """
        with self.health.noting():
            if isinstance(error, DatabaseBusy) or not isinstance(error, DatabaseUnavailable | LockTimeout):
                raise error
            await self.database.ping()
