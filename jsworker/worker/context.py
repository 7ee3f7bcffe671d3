"""The worker context: what all components share, and among it what is known of PostgreSQL and JetStream."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.contents import Contents
from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseRefused,
    DatabaseUnavailable,
    JsworkerError,
    LockTimeout,
    StreamRefused,
    StreamUnavailable,
)
from jsworker.core.events import Events
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
"""Longer than a refused statement waits for its next try; other statements are answered meanwhile."""
_OF_THE_STATEMENT: Final = "42"
"""The class of SQLSTATE of a missing right, table or column."""


class Notifier(list[Callable[[], None]]):
    """What is called, in this order, when something has happened; each returns at once."""

    def notify(self) -> None:
        """Call all of them."""
        for subscriber in self:
            subscriber()


class TouchedBatches:
    """Batches of which a member has ended here; ``changed`` is notified of each that was not known to be."""

    def __init__(self) -> None:
        self._touched: set[UUID] = set()
        self.changed = Notifier()

    def touch(self, batch: UUID) -> None:
        """Have a batch looked after."""
        if batch not in self._touched:
            self._touched.add(batch)
            self.changed.notify()

    def take(self) -> set[UUID]:
        """Return those that were touched since the last call."""
        taken, self._touched = self._touched, set()
        return taken

    def put_back(self, batches: set[UUID]) -> None:
        """Keep batches for the next call, without notifying: what has failed would fail again at once."""
        self._touched |= batches


class DatabaseHealth:
    """Whether the database answers, as its users report it; ``changed`` is notified of both.

    A refused statement is tried again like one that was not answered. Until it has not been refused for a
    while the worker is reported as degraded, although other statements are answered.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._up = asyncio.Event()
        self._up.set()
        self.changed = Notifier()
        self._failed_at = -math.inf
        self._refused_at = -math.inf
        self._refusals: set[str] = set()
        self._reported: set[str] = set()
        self.refusal: str | None = None
        """PostgreSQL's reason for refusing a statement lately; None: it did not, or has been silent since."""

    @property
    def up(self) -> bool:
        """Whether the last statement was answered."""
        return self._up.is_set()

    @property
    def degraded(self) -> bool:
        """Whether the database is reported as not answering, or as refusing a statement."""
        return bool(self._reported)

    def failed_within(self, seconds: float) -> bool:
        """Return whether a statement went unanswered lately."""
        return boottime() - self._failed_at < seconds

    def failed(self, error: JsworkerError) -> None:
        """Note that a statement was not answered; a refused row is an answer, and reported once a reason."""
        if isinstance(error, RowRefused):
            if str(error) not in self._refusals:
                self._refusals.add(str(error))
                facts = {"job_id": None, "sqlstate": error.sqlstate, "constraint": error.constraint}
                self._events.emit("row.refused", **facts)
            return
        self._failed_at = boottime()
        refused = isinstance(error, DatabaseRefused) and (error.sqlstate or "").startswith(_OF_THE_STATEMENT)
        if refused:
            self._refused_at = self._failed_at
            self.refusal = str(error).rpartition(" refused a statement: ")[2]
        elif isinstance(error, DatabaseUnavailable):
            self.refusal = None
        was_up = self.up
        self._up.clear()
        if (was_up or refused) and (reason := str(error)) not in self._reported:
            self._reported.add(reason)
            self._events.emit("worker.degraded", what="postgresql", reason=reason)
        if was_up:
            self.changed.notify()

    def answered(self) -> None:
        """Note that a statement was answered."""
        was_up = self.up
        self._up.set()
        if self.refusal is not None and boottime() - self._refused_at >= _REFUSES_SECONDS:
            self.refusal = None
        if self._reported and self.refusal is None:
            self._reported.clear()
            self._events.emit("worker.restored", what="postgresql")
        if not was_up:
            self.changed.notify()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of the database inside and go on behind the block: the next round tries again."""
        try:
            yield
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self.failed(error)

    async def until_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until the database answers; may take as long as an outage lasts."""
        while True:
            await self.wait_until_up()
            with self.noting():
                return await ask()

    async def wait_until_up(self) -> None:
        """Wait until the database answers again."""
        await self._up.wait()

    async def probe(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask the database for anything, if it was last known to be silent."""
        if not self.up:
            try:
                await ask()
            except JsworkerError:
                return
            self.answered()


class Complaints:
    """Troubles beside those that have a health of their own: reported once, and again for another reason."""

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
        """Report why something does not work, or with None that it does."""
        if reason is None:
            self.end(what)
        else:
            self.report(what, reason)

    @contextmanager
    def of_stream(self, what: str) -> Iterator[None]:
        """Report what JetStream refuses inside; pullers and publishers report when it does not answer."""
        try:
            yield
        except StreamRefused as error:
            self.report(what, str(error))
        except StreamUnavailable:
            return


class PublishingHealth:
    """Whether JetStream stores what is published, or answers and refuses; ``changed`` is notified of both.

    A stream that is full stores a message now and then, as others are acknowledged: trials of it become rarer
    the sooner it refuses again.
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
        """Whether it should be tried whether messages are stored again."""
        return boottime() >= self._try_at

    def failed(self, reason: str) -> None:
        """Note that messages are not stored."""
        now = boottime()
        again = self.refused or now - self._stored_at < _CALM_SECONDS
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS) if again else _FIRST_PAUSE_SECONDS
        self._try_at = now + self._pause * random.uniform(0.75, 1.25)  # noqa: S311 -- spreads load, hides nothing
        if not self.refused:
            self.refused = True
            self._events.emit("worker.degraded", what="publishing", reason=reason)
            self.changed.notify()

    def put_off(self) -> None:
        """Note that there was nothing to try with."""
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
    """What every component may use.

    Attributes:
        me: this worker's row of the registry.
        died: called with the name and the error of a component that ended in an error; the worker stops.
        requeued: notified when a job went back to the queue and waits to be published.
        room: notified when more jobs may be claimed.
        held: notified when a job was held that time alone makes due again.
        batches: those of which a member has ended.
        counts: what was done since it was last written down.
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

    @property
    def worker_id(self) -> str:
        """The owner of everything that is in flight."""
        return self.me.id

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Note an error of the database inside, as one of ``what`` alone where it refuses a statement."""
        with self.health.noting():
            try:
                yield
            except DatabaseRefused as error:
                if error.sqlstate is None:
                    raise
                self.complaints.report(what, str(error))

    async def unanswered(self, error: DatabaseUnavailable | DatabaseRefused) -> None:
        """Note that a statement that may wait for a lock was not answered, unless the database answers.

        Noted without asking: busy, for the heartbeats' connection is open already and would answer; and what
        was refused for another reason than a lock.
        """
        with self.health.noting():
            if isinstance(error, DatabaseBusy) or not isinstance(error, DatabaseUnavailable | LockTimeout):
                raise error
            await self.database.ping()
