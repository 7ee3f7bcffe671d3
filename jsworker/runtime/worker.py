"""The worker: one constructor wires everything, start and stop are lists of steps."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from jsworker.errors import DatabaseUnavailable, JsworkerError
from jsworker.events import Events, Listener
from jsworker.ownership import registry
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.processor import JobProcessor
from jsworker.runtime.answers import Answers
from jsworker.runtime.consumer import Consumer
from jsworker.runtime.dead_letters import DeadLetters
from jsworker.runtime.executor import Executor
from jsworker.runtime.health import DatabaseHealth
from jsworker.runtime.heartbeat import Heartbeat
from jsworker.runtime.identity import identify
from jsworker.runtime.kinds import Kind, resolve_kinds, stale_thresholds
from jsworker.runtime.lease import LeaseServices
from jsworker.runtime.lifecycle import Loop
from jsworker.runtime.outcome import headline
from jsworker.runtime.relay import Relay
from jsworker.runtime.run import Hand, Run, Stop
from jsworker.runtime.settler import Settler
from jsworker.runtime.slots import Slots
from jsworker.runtime.sweeper import Sweeper
from jsworker.settings import Settings, check_timing
from jsworker.stream.jetstream import Stream
from jsworker.stream.pull import Puller

T = TypeVar("T")

_PROBE_SECONDS = 0.5
_FIRST_CONNECT_SECONDS = 10.0
_CONNECT_AGAIN_SECONDS = 0.25
_TEARDOWN_SECONDS = 5.0

_SCAN_JITTER = 0.2


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
        self, processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]], settings: Settings
    ) -> None:
        """Wire a worker; nothing connects yet.

        Args:
            processors: what it works on, one for each kind.
            settings: limits, intervals and servers.

        Raises:
            InvalidTarget: something is no processor, or two share a kind.
            SettingsError: a kind's stale threshold breaks a timing rule.
        """
        self._settings = settings
        self._kinds = resolve_kinds(processors, settings)
        check_timing(settings, stale_thresholds(self._kinds))
        self._me = identify(settings, sorted(self._kinds))
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
            self.events.emit("worker.started", worker_id=self.id, kinds=list(self._kinds))
            self._closing = asyncio.create_task(self._close_once_stopped(), name="jsworker close")

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
        await _patiently(self._database.check_migrated)
        self._sessions = Sessions(self._database.url, worker_id=self.id, size=settings.concurrency)
        self._opened.push_async_callback(self._sessions.close)
        self._stream = Stream(
            settings,
            installation_id=await _patiently(lambda: registry.installation_id(self._database)),
            events=self.events,
            client_name=f"jsworker {self.id}",
        )
        self._opened.push_async_callback(self._stream.close)
        await self._stream.connect()
        await self._stream.ensure(list(self._kinds), dict.fromkeys(self._kinds, settings.ack_wait))

    def _wire(self) -> None:
        settings, database, events, died = self._settings, self._database, self.events, self._died
        self._hand = Hand()
        self._health = DatabaseHealth(events)
        self._answers = Answers(died)
        self._slots = Slots(settings.concurrency, len(self._kinds), self._launch)
        self._settler = Settler(worker_id=self.id, database=database, health=self._health, died=died)
        self._dead_letters = DeadLetters(
            database=database, health=self._health, answers=self._answers, events=events, died=died
        )
        self._heartbeat = Heartbeat(
            worker=self._me,
            statement_timeout=settings.statement_timeout,
            ack_wait=settings.ack_wait,
            database=database,
            health=self._health,
            hand=self._hand,
            settler=self._settler,
            answers=self._answers,
            events=events,
            on_requeued=self._wake_relay,
        )
        self._executor = Executor(
            slots=self._slots,
            services=LeaseServices(
                worker_id=self.id,
                max_result_bytes=settings.max_payload_bytes,
                database=database,
                sessions=self._sessions,
                events=events,
                loop=asyncio.get_running_loop(),
            ),
            hand=self._hand,
            settler=self._settler,
            answers=self._answers,
            events=events,
            on_room=self._wake_pullers,
            on_requeued=self._wake_relay,
            died=died,
        )
        sweeper = Sweeper(
            worker_id=self.id,
            heartbeat_interval=settings.heartbeat_interval,
            database=database,
            health=self._health,
            heartbeat=self._heartbeat,
            events=events,
            on_requeued=self._wake_relay,
        )
        relay = Relay(database=database, health=self._health, stream=self._stream)
        self._beats = Loop(
            "heartbeat", self._beat, interval=settings.heartbeat_interval, died=self._heart_died
        )
        self._probes = Loop("probe", self._probe, interval=_PROBE_SECONDS, died=died)
        self._relay = Loop("relay", relay.step, interval=settings.relay_interval, died=died)
        self._scans = Loop(
            "scan", sweeper.step, interval=settings.scan_interval, jitter=_SCAN_JITTER, died=died
        )
        self._consumers = [self._consumer(name) for name in self._kinds]
        self._pullers = [
            Puller(
                self._stream,
                consumer.kind.name,
                deliver=consumer.deliver,
                undecodable=consumer.undecodable,
                room=consumer.room,
            )
            for consumer in self._consumers
        ]
        self._health.on_change(lambda _: self._wake_pullers())

    def _consumer(self, name: str) -> Consumer:
        return Consumer(
            self._kinds[name],
            worker_id=self.id,
            statement_timeout=self._settings.statement_timeout,
            database=self._database,
            health=self._health,
            hand=self._hand,
            slots=self._slots,
            answers=self._answers,
            dead_letters=self._dead_letters,
            events=self.events,
            on_room=self._wake_pullers,
            died=self._died,
        )

    async def _open_processors(self) -> None:
        for kind in self._kinds.values():
            try:
                await kind.processor.setup()
            except Exception as error:
                raise SetupFailed(f"setup of kind {kind.name} raised {headline(error)}") from error
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
        """Heartbeat first: whatever is claimed from here on is renewed."""
        await _patiently(lambda: registry.seen(self._database, self._me, state="running"))
        for loop in (self._beats, self._probes, self._relay, self._scans):
            self._opened.push_async_callback(loop.stop)
            loop.start()
        for puller in self._pullers:
            self._opened.push_async_callback(self._stop_puller, puller)
            await puller.start()
        self._watch = asyncio.create_task(self._watch_pullers(), name="jsworker watch")

    async def _watch_pullers(self) -> None:
        try:
            await asyncio.gather(*(puller.join() for puller in self._pullers))
        except Exception as error:  # noqa: BLE001 -- told to the worker, which stops
            self._died("pull loop", error)

    async def _close_once_stopped(self) -> int:
        await self._stopping.wait()
        self.events.emit("worker.draining", worker_id=self.id, in_hand=len(self._hand.runs))
        self._heartbeat.state = "draining"
        try:
            await self._stop_pulling()
            await self._drain()
            left = await self._hand_back()
            await self._publish_the_rest()
            await self._end_loops()
        finally:
            await self._opened.aclose()
        self.events.emit("worker.stopped", worker_id=self.id, left=left)
        return left

    async def _stop_pulling(self) -> None:
        """What was delivered and not claimed goes back at once; claims on their way are still decided."""
        self._slots.close()
        self._watch.cancel()
        await asyncio.wait({self._watch})
        # All at once: each waits for seconds when NATS has frozen.
        await asyncio.gather(*(self._stop_puller(puller) for puller in self._pullers))
        for consumer in self._consumers:
            await consumer.flush()
        for run in self._slots.take_waiting():
            self._executor.hand_back(run, "the worker was stopped before the job began")

    async def _stop_puller(self, puller: Puller) -> None:
        try:
            await puller.stop()
        except Exception as error:  # noqa: BLE001 -- what killed its loop; the rest is still to be stopped
            self._died("pull loop", error)

    async def _drain(self) -> None:
        """Tell every run to stop and wait for its end, at most the shutdown time-out."""
        for run in self._hand.runs.values():
            run.should_stop = True
        forced = asyncio.create_task(self._forced.wait())
        drained = asyncio.create_task(self._executor.wait(self._settings.shutdown_timeout))
        await asyncio.wait({forced, drained}, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (forced, drained):
            waiting.cancel()
        await asyncio.gather(forced, drained, return_exceptions=True)

    async def _hand_back(self) -> int:
        """Cancel what still runs, release what has really ended, and leave the rest to the stale rule."""
        for run in self._hand.runs.values():
            run.signal(Stop.SHUTDOWN)
        # The time that the rule about GRACE_PERIOD leaves for it.
        await self._executor.wait(2 * self._settings.statement_timeout)
        return await self._executor.abandon()

    async def _publish_the_rest(self) -> None:
        """Send released jobs to the others now, not with their next relay tick."""
        await self._scans.stop()
        # Cut short, a round would keep what it has taken from the others for five seconds.
        await self._relay.finish(2 * self._settings.statement_timeout)
        try:
            await Relay(database=self._database, health=self._health, stream=self._stream).step()
        except Exception as error:  # noqa: BLE001 -- what killed its loop, perhaps; other workers publish too
            self._died("relay", error)
        await self._dead_letters.flush()
        await self._answers.flush()
        await self._stream.flush()

    async def _end_loops(self) -> None:
        """Heartbeat last: a long drain must not look like a death."""
        for consumer in self._consumers:
            await consumer.close()
        await self._dead_letters.close()
        await self._settler.close()
        await self._answers.close()
        await self._probes.stop()
        await self._beats.stop()
        if self._health.up:
            await self._sign_off()

    async def _sign_off(self) -> None:
        try:
            await registry.seen(self._database, self._me, state="stopped")
        except JsworkerError as error:
            self._health.failed(error)

    async def _beat(self) -> None:
        await self._heartbeat.step()
        self._give_back_overdue()

    def _give_back_overdue(self) -> None:
        """Release what was claimed ahead and got no slot after all, so that others may run it."""
        for run in self._slots.take_waiting(older_than=max(1.0, self._settings.heartbeat_interval)):
            self._executor.hand_back(run, "claimed ahead, but no job slot fell free")

    async def _probe(self) -> None:
        await self._health.probe(lambda: registry.seen(self._database, self._me, state=self._heartbeat.state))

    def _launch(self, run: Run) -> None:
        self._executor.launch(run)

    def _wake_pullers(self) -> None:
        for puller in self._pullers:
            puller.wake()

    def _wake_relay(self) -> None:
        self._relay.wake()

    def _heart_died(self, name: str, error: BaseException) -> None:
        self._forced.set()  # a drain without heartbeats would look like a death
        self._died(name, error)

    def _died(self, name: str, error: BaseException) -> None:
        if self._error is None:
            self._error = WorkerDied(f"{name} ended in {type(error).__name__}: {error}")
            self._error.__cause__ = error
            self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")
        self._stopping.set()


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Wait for a database that is just starting; one that refuses is told at once."""
    async for attempt in AsyncRetrying(
        retry=retry_if_exception_type(DatabaseUnavailable),
        stop=stop_after_delay(_FIRST_CONNECT_SECONDS),
        wait=wait_fixed(_CONNECT_AGAIN_SECONDS),
        reraise=True,
    ):
        with attempt:
            return await ask()
    raise AssertionError("unreachable: the last attempt raises")
