"""The worker: what an application or the command line starts, watches and stops."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseUnavailable,
    JsworkerError,
    SettingsError,
    StreamUnavailable,
)
from jsworker.core.events import Events, Listener
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import RECOVERY_RULES, Settings, check_timing
from jsworker.core.tracebacks import raised_at
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.stream.jetstream import Stream
from jsworker.telemetry.worker_status import Fleet, WorkerStatus
from jsworker.worker.components import HEARTBEAT, Components
from jsworker.worker.context import DatabaseHealth, PublishingHealth, WorkerContext, report_refused_row
from jsworker.worker.maintenance.scheduler import write_schedules
from jsworker.worker.pipeline.kinds import Kind, resolve_kinds, stale_thresholds, without_timeout
from jsworker.worker.pipeline.outcomes import headline
from jsworker.worker.recovery.earlier_lives import identify, refuse_live_duplicate
from jsworker.worker.shutdown import Shutdown
from jsworker.worker.supervision import DeadOwner, Supervision
from jsworker.worker.watchdog import reported_while_slow

T = TypeVar("T")

_CONNECT_SECONDS = 10.0
_CONNECT_AGAIN_SECONDS = 0.25
_TEARDOWN_SECONDS = 5.0


class WorkerDied(JsworkerError):
    """A loop of the worker ended in an error; the worker has stopped, its jobs are handed back."""


class SetupFailed(JsworkerError):
    """A processor could not be set up; the worker has not started."""


class Worker:
    """Claims and runs jobs until it is stopped.

    ``async with Worker([MyProcessor], settings):`` runs it inside an application; ``await worker.run()``
    runs it until ``stop`` is called or one of its loops dies.

    Attributes:
        siblings: workers whose jobs the supervisor of this process takes back itself, for it knows more.
    """

    def __init__(
        self,
        processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
        settings: Settings,
        *,
        connect_seconds: float | None = _CONNECT_SECONDS,
        supervision: Supervision | None = None,
        surveys: bool = False,
    ) -> None:
        """Wire a worker; nothing connects yet.

        Args:
            processors: what it works on, one for each kind.
            settings: limits, intervals and servers.
            connect_seconds: how long ``start`` waits for servers that do not answer; None: for ever.
            supervision: supervises this process; None: nothing does.
            surveys: whether it asks now and then what waits in the table and in the stream, for ``fleet``.

        Raises:
            InvalidTarget: something is no processor, or two share a kind.
            SettingsError: a kind's stale threshold breaks a timing rule.
        """
        self._settings = settings
        self._connect_seconds = connect_seconds
        self._supervision = supervision
        self._surveys = surveys
        self._kinds = resolve_kinds(processors, settings)
        check_timing(settings, stale_thresholds(self._kinds))
        self._me = identify(settings, sorted(self._kinds), without_timeout(self._kinds))
        self.siblings: set[str] = set()
        self.events = Events()
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

    def on(self, name: str, listener: Listener) -> None:
        """Call ``listener`` with every event of this name; ``*`` means every event.

        Raises:
            ValueError: no event has this name.
        """
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Begin to stop: drain, or with ``force`` hand every job back at once. May be called twice."""
        if force:
            self._forced.set()
        self._stopping.set()

    async def start(self) -> None:
        """Connect, check both servers, and begin to work.

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
                await self._connect()
                self._wire()
                await self._open_processors()
                await self._begin()
            except BaseException:
                await self._opened.aclose()
                raise
            self._report_rules_off()
            loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
            self.events.emit(
                "worker.started",
                worker_id=self.id,
                kinds=list(self._kinds),
                kinds_without_timeout=without_timeout(self._kinds),
                event_loop=loop,
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
        """Stop working and hand back what has not ended.

        Args:
            force: do not wait for running jobs.

        Returns:
            How many runs did not end; their jobs are taken back by others, by the stale rule.
        """
        self.stop(force=force)
        async with self._starting:  # a worker that is just starting is closed as soon as it has started
            closing = self._closing
        return 0 if closing is None else await asyncio.shield(closing)

    async def _connect(self) -> None:
        settings = self._settings
        self._database = Database(settings.database_dsn(), statement_timeout=settings.statement_timeout)
        self._opened.push_async_callback(self._database.close)
        self._migration = await self._once_answered(self._database.check_migrated)
        self._sessions = Sessions(self._database.url, worker_id=self.id, size=settings.concurrency)
        self._opened.push_async_callback(self._sessions.close)
        self._stream = Stream(
            settings,
            installation_id=await self._once_answered(lambda: workers.installation_id(self._database)),
            events=self.events,
            client_name=f"jsworker {self.id}",
        )
        self._opened.push_async_callback(self._stream.close)
        await self._connect_stream()

    async def _connect_stream(self) -> None:
        ack_waits = dict.fromkeys(self._kinds, self._settings.ack_wait)
        while True:
            try:
                await self._stream.connect(self._connect_seconds or _CONNECT_SECONDS)
                return await self._stream.ensure(list(self._kinds), ack_waits)
            except StreamUnavailable:
                if self._connect_seconds is not None:
                    raise
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)

    def _wire(self) -> None:
        self._context = WorkerContext(
            settings=self._settings,
            kinds=self._kinds,
            me=self._me,
            database=self._database,
            sessions=self._sessions,
            stream=self._stream,
            events=self.events,
            supervision=self._supervision,
            health=DatabaseHealth(self.events),
            publishing=PublishingHealth(self.events),
            refused_rows=RefusedRows(
                self._database, worker_id=self.id, tell=partial(report_refused_row, self.events)
            ),
            died=self._died,
        )
        self._components = Components(
            self._context, migration=self._migration, siblings=self.siblings, surveys=self._surveys
        )
        self._shutdown = Shutdown(self._context, self._components, forced=self._forced)

    async def _open_processors(self) -> None:
        for kind in self._kinds.values():
            what = f"setup of kind {kind.name} ({type(kind.processor).__qualname__})"
            try:
                with reported_while_slow(partial(self.events.emit, "setup.slow"), what=what):
                    await kind.processor.setup()
            except Exception as error:
                place = raised_at(error)
                raise SetupFailed(f"setup of kind {kind.name} raised {headline(error)} ({place})") from error
            self._opened.push_async_callback(self._tear_down, kind)

    async def _tear_down(self, kind: Kind) -> None:
        try:
            async with asyncio.timeout(_TEARDOWN_SECONDS):
                await kind.processor.teardown()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 -- the jobs have ended; the rest is still to be closed
            what = f"teardown of kind {kind.name}"
            self.events.emit("worker.degraded", what=what, reason=headline(error))

    async def _begin(self) -> None:
        """Register, beat, and only then ask for messages."""
        components = self._components
        # Proven before it is registered: also an owner that dies in its first seconds is found by witnesses.
        await components.presence.step()
        await self._once_answered(components.heartbeat.seen)
        await self._once_answered(partial(write_schedules, self._context))
        self._opened.callback(components.scheduler.close)
        if self._supervision is not None:
            self._supervision.registered(self.id)
        if (name := self._settings.worker_id) is not None:
            await self._once_answered(lambda: self._refuse_duplicate(name))
        self._opened.push_async_callback(components.lag.stop)
        components.lag.start()
        if self._supervision is None:  # else the supervisor watches, and kills
            self._opened.push_async_callback(components.watchdog.stop)
            components.watchdog.start()
        for loop in components.before_pulling:
            self._opened.push_async_callback(loop.stop)
            loop.start()
        for puller in components.pipeline.pullers:
            self._opened.push_async_callback(self._shutdown.stop_puller, puller)
            await puller.start()
        self._watch = asyncio.create_task(self._watch_pullers(), name="jsworker watch")

    def _report_rules_off(self) -> None:
        off = [rule for rule, is_on in self._settings.recovers_by().items() if not is_on]
        if off:
            rest = "" if len(off) < len(RECOVERY_RULES) else "; nobody takes back what a dead worker holds"
            reason = f"by JSWORKER_RECOVERY={self._settings.recovery}{rest}: jsworker clear does, by hand"
            if self._settings.recovery == "on":
                reason = "by JSWORKER_RECOVER_ON_START=false"
            self.events.emit("recovery.off", rules=off, reason=reason)

    async def _refuse_duplicate(self, name: str) -> None:
        components = self._components
        try:
            await refuse_live_duplicate(self._context, name=name, presence=components.presence)
        except SettingsError:
            await components.heartbeat.seen("stopped")
            raise

    async def _watch_pullers(self) -> None:
        try:
            await asyncio.gather(*(puller.join() for puller in self._components.pipeline.pullers))
        except Exception as error:  # noqa: BLE001 -- reported to the worker, which stops
            self._died("pull loop", error)

    async def _close_once_stopped(self) -> int:
        await self._stopping.wait()
        self.events.emit("worker.draining", worker_id=self.id, in_hand=len(self._context.in_flight.runs))
        self._watch.cancel()
        await asyncio.wait({self._watch})
        try:
            left = await self._shutdown.work()
        finally:
            await self._opened.aclose()
        self.events.emit("worker.stopped", worker_id=self.id, left=left)
        return left

    def _died(self, name: str, error: BaseException) -> None:
        if name == HEARTBEAT:  # a drain without heartbeats would look like a death
            self._forced.set()
        if self._error is None:
            self._error = WorkerDied(f"{name} ended in {type(error).__name__}: {error}")
            self._error.__cause__ = error
            self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")
        self._stopping.set()

    async def _once_answered(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Wait for a database that is just starting; one that refuses raises at once.

        A supervised worker waits as long as it takes for a server that is there and has no connection free:
        its end would end the supervisor, and another one would find no connection either.
        """
        heard_at, waits = boottime(), False
        while True:
            try:
                answer = await ask()
            except DatabaseUnavailable as error:
                if self._supervision is not None and isinstance(error, DatabaseBusy):
                    heard_at = boottime()
                    if not waits:
                        waits = True
                        self.events.emit("worker.degraded", what="start", reason=str(error))
                if self._connect_seconds is not None and boottime() - heard_at >= self._connect_seconds:
                    raise
                await asyncio.sleep(_CONNECT_AGAIN_SECONDS)
            else:
                if waits:
                    self.events.emit("worker.restored", what="start")
                return answer
