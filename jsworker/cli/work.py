"""A worker in this process, from the parent's arguments to the exit code."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import structlog

from jsworker.cli.event_loop import loop_factory
from jsworker.cli.failures import DONE, code_of, exit_code_of, lines_of, report
from jsworker.cli.process_exit import LEAVE_SECONDS, leave_now, leave_within
from jsworker.cli.targets import load_processor
from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError, SettingsError
from jsworker.core.events import Event
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, load_settings
from jsworker.supervisor.child_link import Link
from jsworker.supervisor.child_start import ChildStart
from jsworker.telemetry.logs import configure_logs, log_events
from jsworker.worker.recovery.dead_owners import Death
from jsworker.worker.watchdog import reported_while_slow
from jsworker.worker.worker import Worker, WorkerDied

if TYPE_CHECKING:
    from jsworker.supervisor.child_reports import Reporter

_LEAVING_SECONDS: Final = 2 * LEAVE_SECONDS
"""The event loop's end and the interpreter's."""


def work(targets: Sequence[str], start: ChildStart) -> int:
    """Work on these targets until the parent says stop, and return the exit code."""
    link = Link(start.open_link(), parent=start.parent, begun=start.take_over_begun())
    with ExitStack() as last, ExitStack() as loop:
        # The error is told in here, for behind this line a thread may keep the process from going on.
        code = exit_code_of(lambda: _work(targets, start, link, loop))
        last.callback(leave_within(LEAVE_SECONDS, code))
    return code


def _work(targets: Sequence[str], start: ChildStart, link: Link, loop: ExitStack) -> int:
    try:
        settings = load_settings()
        runner = loop.enter_context(asyncio.Runner(loop_factory=loop_factory(settings.event_loop)))
        asyncio.set_event_loop(runner.get_loop())  # of whoever asks for it while processors are loaded
        configure_logs(format=settings.log_format, level=settings.log_level)
        processors = [_load(target) for target in targets]
        runner.run(_run(processors, settings, start, link))
    except JsworkerError as error:
        if not link.last_words("\n".join(lines_of(error))):  # the parent shows it once for all its children
            report(error)
        return code_of(error)
    return DONE


def _load(target: str) -> JobProcessor[Any] | type[JobProcessor[Any]]:
    with reported_while_slow(_tell_slow, what=f"import of {target}"):
        return load_processor(target)


def _tell_slow(**facts: object) -> None:
    structlog.get_logger().warning("setup.slow", **facts)


async def _run(
    processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
    settings: Settings,
    start: ChildStart,
    link: Link,
) -> None:
    is_watched = settings.http_port is not None
    with reported_while_slow(_tell_slow, what=f"constructor of {', '.join(map(_name_of, processors))}"):
        worker = Worker(
            processors,
            settings,
            connect_seconds=start.connect_seconds,
            supervision=link,
            surveys=is_watched and start.number == 1,  # the same for all, so one of them asks
        )
    log_events(worker.events, worker_id=worker.id)
    running = asyncio.create_task(worker.run(), name="jsworker run")
    life = _Life(worker, link, running)
    link.open(
        watchdog_timeout=settings.watchdog_timeout,
        statement_timeout=settings.statement_timeout,
        on_stop=life.stop,
        on_wake=worker.wake_relay,
        on_bury=lambda told: worker.bury(
            Death(told.worker_id, told.reason, counted=told.counted, culprits=told.culprits)
        ),
        on_sibling=worker.siblings.add,
    )
    reporter = _reporter(worker, link) if is_watched else None
    try:
        await running
    except asyncio.CancelledError:
        if not life.told_to_stop:
            raise
    except SettingsError:
        life.refused = True
        raise
    except WorkerDied as died:
        if not isinstance(died.__cause__, JsworkerError):  # an error that nobody expected: where it was
            structlog.get_logger().error("worker.died", exc_info=died.__cause__)
        raise
    finally:
        if reporter is not None:
            reporter.stop()
        life.tell_end()
        link.close()
    if life.left:
        leave_now(DONE)


def _name_of(processor: JobProcessor[Any] | type[JobProcessor[Any]]) -> str:
    return (processor if isinstance(processor, type) else type(processor)).__qualname__


def _reporter(worker: Worker, link: Link) -> "Reporter":
    from jsworker.supervisor.child_reports import Reporter  # noqa: PLC0415 -- who is not watched need not load it

    reporter = Reporter(worker, link)
    reporter.start()
    return reporter


class _Life:
    """Tells the parent how far the worker is, and the worker when the parent says stop."""

    def __init__(self, worker: Worker, link: Link, running: asyncio.Task[None]) -> None:
        self.told_to_stop = False
        self.refused = False
        self.left = 0
        self._worker = worker
        self._link = link
        self._running = running
        self._started = False
        self._stopped = False
        self._without_database = False
        worker.on("worker.started", self._note_start)
        worker.on("worker.stopped", self._note_end)
        worker.on("worker.degraded", self._note_health)
        worker.on("worker.restored", self._note_health)

    def tell_end(self) -> None:
        """Tell what is left to bury; without a word the parent expects the worst."""
        if self._stopped and not self._without_database:
            self._link.stopped(holds_jobs=self.left > 0)
        elif self.refused:
            self._link.stopped(holds_jobs=False)
        self._link.quiet_until(boottime() + _LEAVING_SECONDS)

    def stop(self, force: bool) -> None:  # noqa: FBT001 -- the shape of the link's callback
        """Drain, or hand everything back at once; a worker that has not started just ends."""
        self.told_to_stop = True
        self._worker.stop(force=force)
        if not self._started:
            self._running.cancel()

    def _note_start(self, event: Event) -> None:
        self._started = True
        self._link.ready(event.fields["kinds"])

    def _note_health(self, event: Event) -> None:
        if event.fields["what"] == "postgresql":
            self._without_database = event.name == "worker.degraded"

    def _note_end(self, event: Event) -> None:
        self._stopped = True
        self.left = event.fields["left"]
