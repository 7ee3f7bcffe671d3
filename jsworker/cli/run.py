"""``jsworker run``: a worker in this process, from its settings to its exit code."""

import asyncio
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import structlog
import typer

from jsworker.cli.failures import exit_code_of
from jsworker.cli.leaving import LEAVE_SECONDS, leave_now, leave_within
from jsworker.cli.options import new_app
from jsworker.cli.setting_options import with_setting_options
from jsworker.cli.targets import load_processor
from jsworker.errors import JsworkerError, SettingsError
from jsworker.observe.logs import configure_logs, log_events
from jsworker.processor import JobProcessor
from jsworker.runtime.worker import Worker, WorkerDied
from jsworker.settings import Settings, load_settings, unknown_variables

app = new_app()


@app.command()
@with_setting_options
def run(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="MODULE:CLASS", help="Processors, for example my_jobs:AnalyzeRepo.", show_default=False
        ),
    ],
    **settings: str | None,
) -> int:
    """Run a worker for your processors until SIGTERM or Ctrl-C.

    Modules are imported with the working directory on the path. On the first signal the worker takes no more
    jobs, lets running ones end (at most SHUTDOWN_TIMEOUT seconds) and hands the rest back; a second signal
    hands everything back at once.

    Every option is also an environment variable: --ack-wait is JSWORKER_ACK_WAIT, and so on. The option wins.
    Secrets can also be read from files: JSWORKER_NATS_TOKEN_FILE. Durations are seconds.
    """
    loaded = load_settings(**{name: value for name, value in settings.items() if value is not None})
    if loaded.processes > 1:
        raise SettingsError(
            f"JSWORKER_PROCESSES={loaded.processes} must be 1: several processes come with the supervisor; "
            "start several workers instead"
        )
    configure_logs(format=loaded.log_format, level=loaded.log_level)
    for line in unknown_variables():
        structlog.get_logger().warning("setting.unknown", reason=line)
    processors = [load_processor(target) for target in targets]
    with ExitStack() as last, asyncio.Runner() as runner:
        # The error is reported in here, for behind this line a thread may keep the process from going on.
        code = exit_code_of(lambda: runner.run(_work(processors, loaded)))
        last.callback(leave_within(LEAVE_SECONDS, code))
    return code


async def _work(processors: Sequence[JobProcessor[Any]], settings: Settings) -> None:
    worker = Worker(processors, settings)
    log_events(worker.events, worker_id=worker.id)
    stop = _Stop(worker)
    running = asyncio.create_task(worker.run(), name="jsworker run")
    stop.on_signals(running)
    try:
        await running
    except asyncio.CancelledError:
        if not stop.asked:
            raise
    except WorkerDied as died:
        if not isinstance(died.__cause__, JsworkerError):  # an error that nobody expected: where it was
            structlog.get_logger().error("worker.died", exc_info=died.__cause__)
        raise
    if stop.left:
        leave_now(0)


class _Stop:
    """Turns signals into a stop: the first drains, the second forces."""

    def __init__(self, worker: Worker) -> None:
        self.asked = False
        self.left = 0
        self._worker = worker
        self._started = False
        worker.on("worker.started", lambda _: self._note_start())
        worker.on("worker.stopped", lambda event: self._note_end(event.fields["left"]))

    def on_signals(self, running: asyncio.Task[None]) -> None:
        """Listen to SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ask, running)

    def _ask(self, running: asyncio.Task[None]) -> None:
        self._worker.stop(force=self.asked)
        self.asked = True
        if not self._started:
            running.cancel()

    def _note_start(self) -> None:
        self._started = True

    def _note_end(self, left: int) -> None:
        self.left = left
