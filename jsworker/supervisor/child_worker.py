"""A worker in this process, from the parent's arguments to the exit code."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final

from jsworker.core import tracing
from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError, SettingsError
from jsworker.core.events import Event
from jsworker.core.exit_codes import DONE, FAILED, code_of, exit_code_of, lines_of, show
from jsworker.core.garbage import collect_every_second
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, load_settings
from jsworker.core.targets import import_modules, load_processors, unfinished_processors
from jsworker.supervisor.child_link import ChildLink
from jsworker.supervisor.child_start import ChildStart
from jsworker.supervisor.event_loops import loop_factory
from jsworker.supervisor.messages import FromParent, Ready, Registered, Stopped, StopWorker, TakeBack, Wake
from jsworker.supervisor.process_exit import EXIT_SECONDS, exit_now, exit_within, flushes
from jsworker.telemetry.logs import configure_logs, log_events, own_logger
from jsworker.telemetry.worker_status import MOST_KINDS
from jsworker.worker.pipeline.kinds import flushes_of
from jsworker.worker.watchdog import reported_while_slow
from jsworker.worker.worker import Worker, WorkerDied

Given = JobProcessor[Any] | type[JobProcessor[Any]]

_EXIT_SECONDS: Final = 2 * EXIT_SECONDS
"""The event loop's end and the interpreter's."""


def work(targets: Sequence[str], start: ChildStart) -> int:
    """Work on these targets until the parent requests a stop, and return the exit code."""
    with socket.socket(fileno=start.link) as end, ExitStack() as last, ExitStack() as loop:
        link = ChildLink(start, end)
        # The error is shown in here, for behind this line a thread may keep the process from going on.
        code = exit_code_of(lambda: _work(targets, start, link, loop))
        last.callback(exit_within(EXIT_SECONDS, code))
    return code


def _work(targets: Sequence[str], start: ChildStart, link: ChildLink, loop: ExitStack) -> int:
    try:
        settings = load_settings()
        runner = loop.enter_context(asyncio.Runner(loop_factory=loop_factory(settings.event_loop)))
        asyncio.set_event_loop(runner.get_loop())  # of code that asks for it while processors are loaded
        configure_logs(format=settings.log_format, level=settings.log_level)
        with _reported_while_slow(f"import of {settings.preload}"):
            import_modules(settings.preload)
        processors: list[Given] = []
        for target in targets:
            with _reported_while_slow(f"import of {target}"):
                processors += load_processors(target)
        if start.number == 1:  # all children would say the same
            for line in (line for target in targets for line in unfinished_processors(target)):
                own_logger().warning("processor.left_out", reason=line)
        try:
            runner.run(_run(processors, settings, start, link))
        except JsworkerError:
            raise
        except BaseException as error:  # noqa: BLE001 -- a stopped event loop raises RuntimeError
            # A job has ended the event loop: it stopped the loop, cancelled all tasks, or raised SystemExit
            # or KeyboardInterrupt in a task or callback of its own. The process ends without cancelling its
            # jobs, so that the parent counts a stall for each that had begun: if they were handed back
            # uncounted, the same job would end one process after another.
            own_logger().error("worker.died", exc_info=error)
            exit_now(FAILED)
    except JsworkerError as error:
        if not link.last_words("\n".join(lines_of(error))):  # the parent shows it once for all its children
            show(error)
        return code_of(error)
    return DONE


async def _run(processors: Sequence[Given], settings: Settings, start: ChildStart, link: ChildLink) -> None:
    names = ", ".join((each if isinstance(each, type) else type(each)).__qualname__ for each in processors)
    with _reported_while_slow(f"constructor of {names}"):
        worker = Worker(
            processors,
            settings,
            connect_seconds=start.connect_seconds,
            supervision=link,
            # What a survey finds is the same for all, so one child makes it.
            surveys=settings.http_port is not None and start.number == 1,
        )
    flushes.extend([tracing.flush, *flushes_of(worker._kinds)])  # noqa: SLF001 -- not part of the public interface
    log_events(worker.events, worker_id=worker.id)
    life = _Life(worker, link, asyncio.create_task(worker.run(), name="jsworker run"))
    link.open(settings, obey=life.obey)
    collecting = asyncio.create_task(collect_every_second(), name="jsworker garbage")
    with ExitStack() as last:
        last.callback(collecting.cancel)
        last.callback(link.close)
        last.callback(life.report_end)
        if settings.http_port is not None:
            from jsworker.supervisor.child_reports import Reporter  # noqa: PLC0415 -- only where it is wanted

            reporter = Reporter(worker, link)
            reporter.start()
            last.callback(reporter.stop)
        await life.wait()
    if life.left:
        exit_now(DONE)


def _reported_while_slow(what: str) -> AbstractContextManager[None]:
    return reported_while_slow(partial(own_logger().warning, "setup.slow"), what=what)


class _Life:
    """Reports to the parent how far the worker is, and does what the parent wants."""

    def __init__(self, worker: Worker, link: ChildLink, running: asyncio.Task[None]) -> None:
        self.left: int | None = None  # how many jobs the worker still held when it had stopped
        self._worker = worker
        self._link = link
        self._running = running
        self._stop_requested = False
        self._refused = False
        self._started = False
        self._without_database = False
        for name in ("worker.started", "worker.stopped", "worker.degraded", "worker.restored"):
            worker.on(name, self._note)

    async def wait(self) -> None:
        try:
            await self._running
        except asyncio.CancelledError:
            if not self._stop_requested:
                raise
        except SettingsError:
            self._refused = True
            raise
        except WorkerDied as died:
            if not isinstance(died.__cause__, JsworkerError):  # an unexpected error: where it was
                own_logger().error("worker.died", exc_info=died.__cause__)
            raise

    def report_end(self) -> None:
        """Report whether jobs are left to be taken back; without a report the parent expects it."""
        if self._refused or (self.left is not None and not self._without_database):
            self._link.send(Stopped(holds_jobs=bool(self.left)))
        self._link.quiet_until(boottime() + _EXIT_SECONDS)

    def obey(self, message: FromParent) -> None:
        """Do what the parent wants; a worker that has not started just ends when it is to stop."""
        match message:
            case StopWorker(force=force):
                # The parent asks twice, and a second cancellation would cut short what ``teardown`` closes.
                is_first, self._stop_requested = not self._stop_requested, True
                self._worker.stop(force=force)
                if not self._started and (is_first or force):
                    self._running.cancel()
            case Wake():
                self._worker.wake_relay()
            case TakeBack(dead=dead):
                self._worker.take_back(dead)
            case Registered(worker_id=worker_id):
                self._worker.siblings.add(worker_id)

    def _note(self, event: Event) -> None:
        match event.name:
            case "worker.started":
                self._started = True
                self._link.send(Ready(kinds=event.fields["kinds"][:MOST_KINDS]))
            case "worker.stopped":
                self.left = event.fields["left"]
            case _ if event.fields["what"] == "postgresql":
                self._without_database = event.name == "worker.degraded"
