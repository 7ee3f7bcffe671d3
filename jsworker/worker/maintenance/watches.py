"""What may change below a worker: the database, its schema and clock, the stream, the files that are left."""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from jsworker.core.clock import boottime
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable, MigrationMissing
from jsworker.core.names import is_kind
from jsworker.core.open_files import NO_FILES
from jsworker.ownership.database import DatabaseHistory, check_level, read_history, upgrade_advice
from jsworker.ownership.queries import job_report
from jsworker.ownership.transitions import clock_ahead, republish
from jsworker.stream.api import StreamState
from jsworker.stream.message import is_literal
from jsworker.stream.topology import EnsuredConsumer
from jsworker.worker.context import WorkerContext

SHAPE_SECONDS: Final = 30.0
LOOK_SECONDS: Final = 600.0
CLOCK_SECONDS: Final = 60.0

_REMOVAL: Final = "removal of messages that no consumer takes"
_LEFT_SECONDS: Final = 3600.0
"""A subject without a consumer is purged after so long: its worker may just be starting."""
_MOST_KINDS: Final = 200
"""The most kinds of other workers whose consumers are looked for by name."""
_ASKED_AT_ONCE: Final = 500  # kinds, whether jobs of them are queued
_MOST_REMOVED: Final = 500  # subjects in one look, each with a request and a log line of its own

FILES_SECONDS: Final = 5.0
FILES_EXHAUSTED: Final = f"{NO_FILES}: it claims no jobs until a tenth of them is closed"
_FILES: Final = "open files"
_NO_FILES_SECONDS: Final = 15.0
"""A worker without jobs ends after so long, because a new process has few files open."""

_WAIT_FOR_STANDBY: Final = (
    "PostgreSQL answers no commit until a synchronous standby has it: start the standby, or take it out of "
    "synchronous_standby_names and reload; do not end the sessions that wait"
)


class DatabaseWatch:
    """Compares the database with what this process saw last, and its schema with this version's own.

    It looks again and again, not only after an outage: a standby may take over between two statements, and
    a pooler may hide it altogether. A failover may have lost commits. Nothing is repaired from here: claims,
    heartbeats and sweeps find rows that went back to an earlier state as they do after a crash.
    """

    def __init__(self, context: WorkerContext, *, on_failover: Callable[[], None]) -> None:
        self._context = context
        self._on_failover = on_failover
        self._last: DatabaseHistory | None = None

    @property
    def schema_mismatch(self) -> str | None:
        """Why this version cannot work with the schema, and what to do; None if it can."""
        try:
            check_level(self._context.database.revision)
        except MigrationMissing as missing:
            return str(missing)
        return None

    async def step(self) -> None:
        """Look once; if the database does not answer, what is known stays."""
        if self._context.health.up:
            with self._context.noting("watch over the database's history"):
                self._compare(await read_history(self._context.database))
        # Also while the database counts as silent: so does one that refuses statements for want of tables.
        with suppress(DatabaseUnavailable, DatabaseRefused):  # heartbeats fail likewise, and report it
            advice = upgrade_advice(await self._context.database.migrated_to())
            self._context.complaints.note("schema", self.schema_mismatch or advice)
            hidden = await self._context.database.hidden_tables()
            self._context.complaints.note("row-level security", _hides(hidden) if hidden else None)
            waits = await self._context.database.waits_for_standby()
            self._context.complaints.note("commits", _WAIT_FOR_STANDBY if waits else None)

    def _compare(self, found: DatabaseHistory) -> None:
        last, self._last = self._last, found
        if last is None:
            return
        if found.system_identifier != last.system_identifier:
            self._report_failover("system identifier", last.system_identifier, found.system_identifier)
        elif found.timeline is None:  # a standby, which accepts no writes
            self._last = replace(found, timeline=last.timeline)
        elif last.timeline not in (None, found.timeline):
            self._report_failover("timeline", last.timeline, found.timeline)

    def _report_failover(self, what: str, was: object, now: object) -> None:
        self._context.events.emit("database.changed", **{"what": what, "was": was, "is": now})
        self._on_failover()


def _hides(tables: Sequence[str]) -> str:
    disable = "; ".join(f'ALTER TABLE jsworker."{name}" DISABLE ROW LEVEL SECURITY' for name in tables)
    return f"row-level security hides every row of {', '.join(tables)} from this login: {disable}"


async def follow_the_clock(context: WorkerContext) -> None:
    """Bring back once what lies ahead of the database's clock, which was ahead before it was corrected."""
    if context.health.up:
        with context.noting("instants ahead of the database's clock"):
            await clock_ahead.bring_back(context.database, kinds=list(context.kinds))
        for what in clock_ahead.OTHERS:
            with context.noting(f"{what} ahead of the database's clock"):
                await clock_ahead.bring_back_others(context.database, what)


async def look_at_files(context: WorkerContext) -> None:
    """Report once that no further file can be opened.

    Raises OSError if that stays so although no job runs, and a supervisor starts another process.
    """
    files, were_exhausted = context.files, context.files.are_exhausted
    files.look()
    context.complaints.note(_FILES, FILES_EXHAUSTED if files.are_exhausted else None)
    if were_exhausted and not files.are_exhausted:
        context.room.notify()
    is_of_no_use = files.exhausted_seconds > _NO_FILES_SECONDS and not context.in_flight.runs
    if is_of_no_use and context.supervision is not None:
        raise OSError(errno.EMFILE, f"{NO_FILES}, and its jobs, which have ended, left them open")


async def keep_in_shape(context: WorkerContext, lanes: Callable[[], Sequence[str]]) -> None:
    """Compare stream and consumers once with the settings, and correct them.

    Each consumer by itself: one that cannot be used does not keep the others from being corrected. Those of
    ``lanes``, the consumers of other priorities, come last.
    """
    if not context.stream.connected:
        return
    with context.complaints.of_stream("stream settings"):
        await context.stream.ensure([], timeout=0.0)
        context.complaints.end("stream settings")
        context.complaints.note("lanes", context.stream.lacks_lanes_because)
        for consumer in (*context.kinds, *lanes()):
            what = f"settings of consumer {consumer}"
            with context.complaints.of_stream(what):
                kept = await context.stream.keep_consumer_in_shape(consumer)
                context.complaints.note(what, _starts_late(context, consumer, kept))


def _starts_late(context: WorkerContext, consumer: str, kept: EnsuredConsumer) -> str | None:
    """Return why jobs of a consumer's kind start late; None if they do not."""
    late = "jobs start late, from the table, until"
    if kept.is_paused:
        return f"it is paused: {late} `nats consumer resume {context.stream.name} {consumer}`"
    if kept.had_prefix is None:
        return None
    own = context.settings.subject_prefix
    return (
        f"it took the messages of JSWORKER_SUBJECT_PREFIX={kept.had_prefix}, not of {own}: {late} "
        "all processes that use this database have the same"
    )


class Unconsumed:
    """Removes messages that no consumer will ever take and that the stream would keep for ever.

    What is removed was stored before the subject was first seen without a consumer, at least an hour ago,
    while no job of its kind is queued. So no job waits for it: each entry into the queue has a message of its
    own. Should one lose it all the same, it is published again. Every worker does this; twice does no harm.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._seen: dict[str, tuple[float, StreamState]] = {}
        """When a subject was first seen without a consumer, and the state of the stream then."""

    async def step(self) -> None:
        """Look once, and remove messages of subjects that had no consumer for long enough."""
        if self._context.health.up and self._context.stream.is_own:
            with self._context.health.noting(), self._context.complaints.of_stream(_REMOVAL):
                await self._look()

    async def _look(self) -> None:
        stream, now = self._context.stream, boottime()
        own = list(self._context.kinds)
        others = await job_report.served(self._context.database, besides=own, most=_MOST_KINDS)
        kinds = [*own, *filter(is_kind, others)]
        state, without = await stream.state(), await stream.unconsumed(kinds)
        known = {kind: seen for kind, seen in self._seen.items() if seen[1].created == state.created}
        self._seen = {kind: known.get(kind, (now, state)) for kind in without}
        due = {
            place: then.last_seq
            for place, (seen_at, then) in self._seen.items()
            if now - seen_at >= _LEFT_SECONDS and is_literal(place)
        }
        kind_of = {place: place.partition(".")[0] for place in due}
        names = sorted({kind for kind in kind_of.values() if is_kind(kind)})
        waiting: set[str] = set()
        for first in range(0, len(names), _ASKED_AT_ONCE):
            asked = names[first : first + _ASKED_AT_ONCE]
            waiting |= await republish.queued_kinds(self._context.database, kinds=asked)
        removed: list[str] = []
        for kind in [each for each in due if kind_of[each] not in waiting][:_MOST_REMOVED]:
            if not stream.is_own:  # the connection was lost since the look
                break
            with self._context.complaints.of_stream(_REMOVAL):  # others can still be removed
                await stream.remove(kind, up_to=due[kind])
                del self._seen[kind]
                removed.append(kind)
        left = await stream.unconsumed(kinds) if removed else {}
        for kind in removed:
            what = f"messages of {stream.subject_of(kind)}, which no consumer takes and no job waits for"
            facts = {"what": what, "setting": "messages", "was": without[kind], "is": left.get(kind, 0)}
            self._context.events.emit("stream.changed", **facts)
