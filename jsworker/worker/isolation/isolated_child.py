"""``… isolated_child PARENT LIFELINE FD``, a process of its own: runs its owner's jobs, one at a time."""

import gc

if __name__ == "__main__":
    gc.disable()  # the modules below make no garbage as they load, and load a quarter faster

from jsworker.telemetry import lean_structlog  # noqa: F401, I001 -- before all other imports of structlog

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn

from jsworker.core import tracing
from jsworker.core.clock import boottime
from jsworker.core.contents import Contents
from jsworker.core.events import Event, Events
from jsworker.core.job import kinds_of_slot
from jsworker.core.message_link import MessageLink
from jsworker.core.open_files import are_files_scarce
from jsworker.core.targets import import_modules
from jsworker.core.tracebacks import raised_at
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.telemetry.logs import configure_logs, drain_logs, speaking_worker
from jsworker.worker.forked_copies import ended_in_copies
from jsworker.worker.isolation import isolated_messages as wire
from jsworker.worker.isolation.parent_death_signal import follow_parent, leave_to_parent
from jsworker.worker.lifecycle import Loop
from jsworker.worker.pipeline.attempt import judge, open_job, process_job
from jsworker.worker.pipeline.in_flight import Phase, Run, StopReason
from jsworker.worker.pipeline.kinds import Kind, call_hook, flushes_of, named_at, processor_at, resolve_kinds
from jsworker.worker.pipeline.outcomes import (
    Outcome,
    failed,
    headline,
    missing_thread,
    shown_headline,
    stopped,
)
from jsworker.worker.pipeline.run_writes import LeaseServices
from jsworker.worker.stacks import of_run, within_bounds

FLUSH_SECONDS: Final = 2.0
TEARDOWN_SECONDS: Final = 5.0
_TICKS_A_TIMEOUT: Final = 4
_CONNECTIONS: Final = 2
"""Of each pool for statements: one job runs at a time."""


def main() -> None:
    """Run what the owner orders. The process ends with its owner, however that ends."""
    gc.freeze()
    gc.enable()
    follow_parent(int(sys.argv[1]), signal.SIGKILL, int(sys.argv[2]))
    # For the owner, which decides what becomes of the job.
    leave_to_parent((signal.SIGINT, signal.SIGHUP, signal.SIGTERM))
    end = socket.socket(fileno=int(sys.argv[3]))
    os.set_inheritable(end.fileno(), False)
    with asyncio.Runner() as runner, ended_in_copies(runner.get_loop()):
        runner.run(_work(end))


async def _work(end: socket.socket) -> NoReturn:
    messages: asyncio.Queue[wire.FromOwner] = asyncio.Queue()
    link = MessageLink(
        end,
        wire.FROM_OWNER,
        on_message=messages.put_nowait,
        on_end=_end,
        on_invalid=_end,  # an owner of another version
        longest_line=sys.maxsize,
    )
    link.open()
    owner = await messages.get()
    if not isinstance(owner, wire.Introduction):
        _end()
    configure_logs(format=owner.settings.log_format, level=owner.settings.log_level)
    speaking_worker.set(owner.worker_id)
    sys.path[:] = owner.path
    work = _Work(owner, link.send)

    async def tick() -> None:
        if not link.unsent:
            work.send_state()

    ticks = Loop("tick", tick, interval=owner.settings.watchdog_timeout / _TICKS_A_TIMEOUT, died=_end)
    ticks.start()
    while (message := await messages.get()) != wire.Request(what="end"):
        work.obey(message)
    await work.tear_down()
    await _flush(work.flushes())
    await link.flush()
    os._exit(0)  # threads of jobs may never end, and nothing waits for them here


def _end(*_: object) -> NoReturn:
    """End at once: the owner has gone, and with it the right to go on, or it cannot be reached."""
    os._exit(1)


def _end_if_failed(report: asyncio.Task[None]) -> None:
    """End if the end of the job cannot be reported, as without memory: the owner would wait for ever."""
    if report.cancelled() or report.exception() is not None:
        _end()


async def _flush(of_middleware: Iterable[Callable[[float], object]]) -> None:
    """Write out what jobs have printed, logged and traced; what no reader takes within seconds is left."""

    def flush_output() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # a job may have closed or replaced it
                stream.flush()

    own = ThreadPoolExecutor()  # the event loop's may be full of threads of jobs that never end
    holding = [tracing.flush, drain_logs, *of_middleware]
    tasks: list[Callable[[], object]] = [*(partial(each, FLUSH_SECONDS) for each in holding), flush_output]
    flushing = [asyncio.get_running_loop().run_in_executor(own, task) for task in tasks]
    await asyncio.wait(flushing, timeout=FLUSH_SECONDS)


class _Work:
    """The processors of this process, and the run that one of them has in hand."""

    def __init__(self, owner: wire.Introduction, send: Callable[..., None]) -> None:
        settings = owner.settings.with_files(owner.from_files)
        self._settings = settings
        self._contents = Contents.of(settings)
        self._send = send
        self._kinds: dict[str, Kind] = {}
        self._run: Run | None = None
        self._lacks_threads = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._wanted: frozenset[str] = frozenset()
        database = Database(
            settings.current_database_dsn,
            statement_timeout=settings.statement_timeout,
            pool_size=_CONNECTIONS,
        )
        events = Events()
        events.on("job.progress", self._forward)
        events.on("job.step", self._forward)
        self._services = LeaseServices(
            worker_id=owner.worker_id,
            settings=settings,
            contents=self._contents,
            database=database,
            sessions=Sessions(
                database, worker_id=owner.worker_id, size=1, lock_seconds=settings.statement_timeout
            ),
            events=events,
            loop=asyncio.get_running_loop(),
            on_quiet=self.send_state,
            on_sign=self.send_state,
            on_added=partial(send, wire.JobsAdded()),
            kinds=owner.kinds,
        )

    def flushes(self) -> list[Callable[[float], object]]:
        """Return what writes out what middleware holds back."""
        return flushes_of(self._kinds)

    def send_state(self) -> None:
        """Tell the owner that the event loop ticks, and how the run is."""
        if (run := self._run) is None:
            self._send(wire.IdleTick())
            return
        self._send(
            wire.RunState(sign_at=run.sign_at, quiet_seconds=run.quiet_seconds, quiet_until=run.quiet_until)
        )

    def obey(self, message: wire.FromOwner) -> None:
        """Do what the owner wants; what comes for a run that has just ended is too late."""
        match message:
            case wire.Preparation(origin=origin):
                self._start(self._prepare(origin, message.middleware), f"set up {origin}")
            case wire.Order():
                self._start_run(message)
            case wire.Request(what="drain") if self._run is not None:
                self._run.drain()
            case wire.Request(reason=StopReason() as reason) if self._run is not None:
                self._run.signal(reason)
            case wire.Request(what="ask stacks"):
                stacks = [] if self._run is None else of_run(self._run)
                self._send(wire.RunStacks(stacks=within_bounds(stacks)))

    async def tear_down(self) -> None:
        for kind in self._kinds.values():
            try:
                async with asyncio.timeout(TEARDOWN_SECONDS):
                    await call_hook(kind.processor.teardown)
            except BaseException as error:  # noqa: BLE001 -- the jobs have ended; the others are still to be closed
                self._send(wire.TeardownFailed(kind=kind.name, reason=headline(error)))

    async def _prepare(self, origin: str, middleware: Iterable[str]) -> None:
        what = f"making {origin} in another process"
        try:
            import_modules(self._settings.preload)
            processor = processor_at(origin)
            around = [named_at(each) for each in middleware]
            [kind] = resolve_kinds([processor], self._settings, around, self._contents).values()
            what = f"setup of kind {kind.name} ({type(processor).__qualname__})"
            await call_hook(processor.setup)
        except BaseException as error:  # noqa: BLE001 -- the user's code; the owner ends this process
            self._send(wire.Prepared(error=f"{what} raised {headline(error)} ({raised_at(error)})"))
            return
        self._kinds[kind.name] = kind
        self._send(wire.Prepared(error=None))

    def _start_run(self, order: wire.Order) -> None:
        self._wanted = order.wanted
        now = boottime()
        run = Run(order.claimed, self._kinds[order.claimed.kind], None, beaten_at=now, now=now)
        self._run = run
        self.send_state()  # it has begun
        ended: asyncio.Future[Outcome] = self._services.loop.create_future()
        run.task = self._start(self._attempt(run, ended), "the job")
        report = self._start(self._report_end(run, run.task, ended), "report the end of the job")
        report.add_done_callback(_end_if_failed)

    async def _attempt(self, run: Run, ended: "asyncio.Future[Outcome]") -> None:
        # Only from here on may a signal cancel the task: one that never began would have no outcome.
        run.phase = Phase.RUNNING
        kinds_of_slot.set(self._services.kinds)

        try:
            outcome = await self._process(run)
        except GeneratorExit:  # the event loop is gone
            raise
        except BaseException as raised:  # sys.exit() in a job, too, is an end of the job alone
            if (judged := judge(run, raised)) is None:
                raise
            outcome = judged
            self._lacks_threads = missing_thread(raised) is not None
        run.phase = Phase.SETTLING  # threads that the job has left behind can enqueue no more
        ended.set_result(outcome)

    async def _process(self, run: Run) -> Outcome:
        if run.stop is not None:
            return stopped(run)
        run.job = open_job(run, self._services)
        with tracing.within(TraceContext(run.claimed.traceparent, run.claimed.tracestate)):
            return await process_job(run, run.job, self._services)

    async def _report_end(self, run: Run, task: asyncio.Task[None], ended: "asyncio.Future[Outcome]") -> None:
        await asyncio.wait({task})  # it may end cancelled by what the job has left behind
        self._run = None
        child_jobs = [] if run.child_jobs is None else run.child_jobs.jobs
        if not ended.done():
            error = None if task.cancelled() else task.exception()
            why = "it was cancelled" if error is None else shown_headline(run, error)
            ended.set_result(failed(run, f"the run ended without an outcome: {why}"))
        ended_run = wire.RunEnded(
            outcome=ended.result(),
            completed=run.completed,
            child_jobs=child_jobs,
            lacks="threads" if self._lacks_threads else "files" if are_files_scarce() else None,
        )
        self._send(ended_run)

    def _forward(self, event: Event) -> None:
        if event.name in self._wanted:
            self._send(wire.RunEvent.model_validate({"name": event.name, "fields": event.fields}))

    def _start(self, steps: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(steps, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


if __name__ == "__main__":
    main()
