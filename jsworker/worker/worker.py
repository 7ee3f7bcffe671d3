"""The worker: what an application or the command line starts, watches and stops."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.codec import Codec
from jsworker.core.contents import Contents
from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseUnavailable,
    JsworkerError,
    SettingsError,
    StreamUnavailable,
)
from jsworker.core.events import EventName, Events, Listener
from jsworker.core.processor import JobProcessor, Middleware
from jsworker.core.settings import RECOVERY_RULES, Settings, check_timing
from jsworker.core.tracebacks import raised_at
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.refused_rows import RefusedRow, RefusedRows
from jsworker.stream.jetstream import Stream
from jsworker.telemetry.worker_status import Fleet, WorkerStatus
from jsworker.worker.components import HEARTBEAT, Components
from jsworker.worker.context import Complaints, DatabaseHealth, PublishingHealth, WorkerContext
from jsworker.worker.figure_counts import FigureCounts
from jsworker.worker.forked_copies import ended_in_copies
from jsworker.worker.isolation.isolated_process import NotReady
from jsworker.worker.lifecycle import Loop
from jsworker.worker.maintenance.admissions import write_limits
from jsworker.worker.maintenance.scheduler import write_schedules
from jsworker.worker.pipeline.kinds import (
    Kind,
    call_hook,
    check_isolated,
    declared_limits,
    resolve_kinds,
    shown_settings,
    without_timeout,
)
from jsworker.worker.pipeline.outcomes import headline
from jsworker.worker.recovery.earlier_lives import identify, refuse_live_duplicate
from jsworker.worker.supervision import DeadOwner, Supervision
from jsworker.worker.watchdog import reported_while_slow

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_CONNECT_AGAIN_SECONDS = 0.25
_TEARDOWN_SECONDS = 5.0
_WATCH_SECONDS = 1.0


class WorkerDied(JsworkerError):
    """A loop of the worker ended in an error; the worker has stopped, its jobs are handed back."""


class SetupFailed(JsworkerError):
    """A processor could not be set up; the worker has not started."""


class Worker:
    """Claims and runs jobs until it is stopped.

    ``async with Worker([MyProcessor], settings):`` runs it inside an application; ``await worker.run()``
    runs it until ``stop`` is called or one of its loops dies.
    """

    def __init__(
        self,
        processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
        settings: Settings,
        *,
        connect_seconds: float | None = _CONNECT_SECONDS,
        supervision: Supervision | None = None,
        surveys: bool = False,
        middleware: Sequence[Middleware] = (),
        codec: Codec | None = None,
    ) -> None:
        """Wire a worker of these processors, one for each kind; nothing connects yet.

        Args:
            connect_seconds: how long ``start`` waits for servers that do not answer; None: for ever.
            supervision: supervises this process; None: nothing does.
            surveys: whether it asks now and then what waits in the table and in the stream, for ``fleet``.
            middleware: async context managers around ``process`` of all kinds, the first one outermost;
                within those of JSWORKER_MIDDLEWARE.
            codec: encodes what jobs hold, instead of what the settings say. Processes in which jobs run alone
                cannot make it: with JSWORKER_CODEC they can.

        Raises:
            InvalidTarget: something is no processor or no middleware, or two processors share a kind.
            SettingsError: a kind's stale threshold breaks a timing rule, or the codec cannot be made.
        """
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._supervision = supervision
        self._surveys = surveys
        self._contents = Contents.of(settings, codec)
        self._kinds = resolve_kinds(processors, settings, middleware, self._contents)
        check_isolated(self._kinds.values(), self._contents)
        check_timing(settings, {name: kind.limits.stale_after for name, kind in self._kinds.items()})
        self._me = replace(
            identify(settings, sorted(self._kinds)),
            kinds_without_timeout=without_timeout(self._kinds),
            limits=declared_limits(self._kinds),
            kind_settings=shown_settings(self._kinds),
            supervisor_pid=None if supervision is None else os.getppid(),
        )
        self.siblings: set[str] = set()
        """Workers whose jobs the supervisor of this process takes back itself, for it knows more."""
        self.events = Events()
        self._complaints = Complaints(self.events)
        self._stopping = asyncio.Event()
        self._error: JsworkerError | None = None
        self._opened = AsyncExitStack()
        self._starting = asyncio.Lock()
        self._closing: asyncio.Task[int] | None = None
        self._forced = asyncio.Event()

    @property
    def id(self) -> str:
        """This worker's id, new in every life."""
        return self._me.id

    def on(self, name: EventName | Literal["*"], listener: Listener) -> None:
        """Call ``listener`` with every event of this name or, for ``*``, of any; ValueError: no such name."""
        self.events.on(name, listener)

    def status(self) -> WorkerStatus | None:
        """Return how this worker is; None before it has started and after it has stopped."""
        if self._closing is None or self._closing.done():
            return None
        return self._components.status(draining=self._stopping.is_set())

    def fleet(self) -> Fleet | None:
        """Return what the last survey found; None: no surveys, or no answer within the last minute."""
        return None if self._closing is None else self._components.survey.latest

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self.close(force=kind is not None)
        if self._error is not None and error is None:
            raise self._error

    async def run(self) -> None:
        """Work until ``stop`` is called.

        Raises:
            JsworkerError: it could not start, or one of its loops died.
        """
        async with self:
            await self._stopping.wait()

    def stop(self, *, force: bool = False) -> None:
        """Begin to stop: drain, or with ``force`` hand every job back at once. May be called twice.

        During ``start``, ``force`` ends the start at once. Without it the start goes on to its end, unless a
        server does not answer.
        """
        if force:
            self._forced.set()
        self._stopping.set()

    async def start(self) -> None:
        """Connect, check both servers, and begin to work. If ``stop`` ends the start, this just returns.

        Raises:
            DatabaseUnavailable, DatabaseRefused, MigrationMissing: PostgreSQL cannot be used.
            StreamUnavailable, StreamRefused: NATS cannot be used.
            SetupFailed: a processor's ``setup`` raised.
            SettingsError: another live worker has the worker id that was set.
            RuntimeError: it was started before.
        """
        async with self._starting:
            if self._closing is not None:
                raise RuntimeError("a worker starts once; make a new one for another life")
            try:
                self._opened.enter_context(ended_in_copies(asyncio.get_running_loop()))
                async with self._until_forced():
                    await self._connect()
                    await self._open_processors()
                    await self._begin()
            except BaseException as error:
                await self._opened.aclose()
                if isinstance(error, TimeoutError) and self._forced.is_set():
                    return
                raise
            self._report_rules_off()
            self.events.emit(
                "worker.started",
                worker_id=self.id,
                kinds=list(self._kinds),
                kinds_without_timeout=without_timeout(self._kinds),
                event_loop=_name_of(asyncio.get_running_loop()),
            )
            self._closing = asyncio.create_task(self._close_once_stopped(), name="jsworker close")

    def take_back(self, dead: DeadOwner) -> None:
        """Take back the jobs of a worker that is proven to have ended, without waiting for it."""
        if self._closing is not None and not self._stopping.is_set():
            self._components.dead_owners.begin(dead)

    def wake_relay(self) -> None:
        """Publish what waits now: jobs were put back into the queue by another process."""
        if self._closing is not None:
            self._context.requeued.notify()

    async def close(self, *, force: bool = False) -> int:
        """Stop working and hand back what has not ended; with ``force`` without waiting for running jobs.

        Returns how many runs did not end; their jobs are taken back by others, by the stale rule.
        """
        self.stop(force=force)
        async with self._starting:  # a worker that is just starting is closed as soon as it has started
            closing = self._closing
        if closing is None:
            return 0
        await asyncio.wait({closing})
        return closing.result()

    @asynccontextmanager
    async def _until_forced(self) -> AsyncIterator[None]:
        """Cancel the block, and raise TimeoutError, when a stop is forced."""
        async with asyncio.timeout(None) as limit:

            async def end() -> None:
                await self._forced.wait()
                limit.reschedule(0.0)

            ending = asyncio.create_task(end(), name="jsworker end of start")
            try:
                yield
            finally:
                ending.cancel()
                await asyncio.wait({ending})

    async def _connect(self) -> None:
        def report_refused(row: RefusedRow) -> None:
            self.events.emit("row.refused", **asdict(row) | {"job_id": str(row.job_id)})

        settings = self._settings
        self._database = Database(settings.current_database_dsn, statement_timeout=settings.statement_timeout)
        self._opened.push_async_callback(self._database.close)
        await self._once_answered(self._database.check_usable)
        sessions = Sessions(
            self._database,
            worker_id=self.id,
            size=settings.concurrency,
            lock_seconds=settings.statement_timeout,
        )
        self._opened.push_async_callback(sessions.close)
        self._stream = Stream(
            settings,
            installation_id=await self._once_answered(lambda: workers.installation_id(self._database)),
            events=self.events,
            client_name=f"jsworker {self.id}",
        )
        self._opened.push_async_callback(self._stream.close)
        await self._once_answered(self._connect_stream)
        self._context = WorkerContext(
            settings=settings,
            contents=self._contents,
            kinds=self._kinds,
            me=self._me,
            database=self._database,
            sessions=sessions,
            stream=self._stream,
            events=self.events,
            supervision=self._supervision,
            health=DatabaseHealth(self.events),
            publishing=PublishingHealth(self.events),
            complaints=self._complaints,
            refused_rows=RefusedRows(self._database, worker_id=self.id, tell=report_refused),
            died=self._died,
            counts=FigureCounts(self.events),
        )
        self._components = Components(self._context, siblings=self.siblings, surveys=self._surveys)

    async def _connect_stream(self) -> None:
        await self._stream.connect(self._connect_seconds or _CONNECT_SECONDS)
        await self._stream.ensure(list(self._kinds), dict.fromkeys(self._kinds, self._settings.ack_wait))

    async def _open_processors(self) -> None:
        isolated = self._components.pipeline.isolated_runner
        self._opened.push_async_callback(isolated.close)
        try:
            await isolated.begin()
        except NotReady as error:
            raise SetupFailed(f"an isolated process {error}") from error
        for kind in self._kinds.values():
            if kind.is_isolated:  # its processor works in other processes
                continue
            what = f"setup of kind {kind.name}"
            whose = f"{what} ({type(kind.processor).__qualname__})"
            try:
                with reported_while_slow(partial(self.events.emit, "setup.slow"), what=whose):
                    await call_hook(kind.processor.setup)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                if _is_cancelled(error):
                    raise
                raise SetupFailed(f"{what} raised {headline(error)} ({raised_at(error)})") from error
            self._opened.push_async_callback(self._tear_down, kind)

    async def _tear_down(self, kind: Kind) -> None:
        try:
            async with asyncio.timeout(_TEARDOWN_SECONDS):
                await call_hook(kind.processor.teardown)
        except BaseException as error:
            if _is_cancelled(error):
                raise
            # The jobs have ended; the rest is still to be closed.
            self.events.emit("worker.degraded", what=f"teardown of kind {kind.name}", reason=headline(error))

    async def _begin(self) -> None:
        """Register, beat, and only then ask for messages."""
        components, supervision = self._components, self._supervision
        # Proven before it is registered: also an owner that dies in its first seconds is found by witnesses.
        await components.presence.step()
        await self._once_answered(components.heartbeat.seen)
        if supervision is not None:
            supervision.registered(self.id)
        context, presence = self._context, components.presence
        try:
            if (name := self._settings.worker_id) is not None:
                await self._once_answered(
                    partial(refuse_live_duplicate, context, name=name, presence=presence)
                )
            await self._once_answered(partial(write_schedules, context))
        except SettingsError:
            await self._once_answered(lambda: components.heartbeat.seen("stopped"))
            raise
        await self._once_answered(partial(write_limits, context))
        await self._once_answered(components.relay_look.look)
        self._opened.callback(components.scheduler.close)
        self._opened.callback(components.admissions.close)
        self._opened.push_async_callback(components.watchdog.stop)
        components.watchdog.start(supervised=supervision is not None)
        for loop in components.before_pulling:
            self._opened.push_async_callback(loop.stop)
            loop.start()
        self._opened.push_async_callback(components.stop_pullers)
        components.start_pullers()
        watch = Loop("pull loop", components.join_pullers, interval=_WATCH_SECONDS, died=self._died)
        self._opened.push_async_callback(watch.stop)
        watch.start()

    def _report_rules_off(self) -> None:
        off = [rule for rule, is_on in self._settings.recovers_by().items() if not is_on]
        if off:
            rest = "" if len(off) < len(RECOVERY_RULES) else "; no worker takes back what a dead one holds"
            reason = f"by JSWORKER_RECOVERY={self._settings.recovery}{rest}: jsworker clear does, by hand"
            if self._settings.recovery == "on":
                reason = "by JSWORKER_RECOVER_ON_START=false"
            self.events.emit("recovery.off", rules=off, reason=reason)

    async def _close_once_stopped(self) -> int:
        await self._stopping.wait()
        self.events.emit("worker.draining", worker_id=self.id, in_hand=len(self._context.in_flight.runs))
        try:
            left = await self._components.end(
                forced=self._forced, stops_runs=self._stops_runs, by_error=self._error is not None
            )
        finally:
            await self._opened.aclose()
        self.events.emit("worker.stopped", worker_id=self.id, left=left)
        return left

    def _stops_runs(self) -> None:
        if self._supervision is not None:
            self._supervision.stops_runs(self._error)

    def _died(self, name: str, error: BaseException) -> None:
        if name == HEARTBEAT:  # a drain without heartbeats would look like a death
            self._forced.set()
        if self._error is None:
            self._error = WorkerDied(f"{name} ended in {type(error).__name__}: {error}")
            self._error.__cause__ = error
            self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")
        self._stopping.set()

    async def _once_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for a server that is just starting; one that refuses raises at once."""
        answered_at, most = boottime(), self._connect_seconds
        while True:
            try:
                answer = await ask()
            except (DatabaseUnavailable, StreamUnavailable) as error:
                what = "nats" if isinstance(error, StreamUnavailable) else "postgresql"
                # The end of this worker would end its supervisor, and free no connection, nor any disk space.
                if self._supervision is not None and isinstance(error, DatabaseBusy):
                    answered_at = boottime()
                    what = "start"
                # Who gives up says so once, as its error.
                if what == "start" or most is None:
                    self._complaints.report(what, str(error))
                # The stream's connection has waited for so long itself.
                waited = math.inf if isinstance(error, StreamUnavailable) else boottime() - answered_at
                if most is not None and waited >= most:
                    raise
                if self._stopping.is_set():  # nothing has begun that could be drained
                    self._forced.set()
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)
            else:
                for what in ("start", "postgresql", "nats"):
                    self._complaints.end(what)
                return answer


def _name_of(loop: asyncio.AbstractEventLoop) -> str:
    is_asyncios = isinstance(loop, asyncio.SelectorEventLoop)
    return "asyncio" if is_asyncios else type(loop).__module__.partition(".")[0]


def _is_cancelled(error: BaseException) -> bool:
    """Return whether it is this task that was cancelled, not one of a processor for which it waits."""
    task = asyncio.current_task()
    return issubclass(type(error), asyncio.CancelledError) and task is not None and task.cancelling() > 0
