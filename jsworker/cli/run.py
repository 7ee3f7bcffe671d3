"""``jsworker run``: the parent of worker processes, from its settings to its exit code."""

from jsworker.telemetry import lean_structlog  # noqa: F401, I001 -- before all other imports of structlog

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import structlog
import typer

import jsworker
from jsworker.cli.options import new_app
from jsworker.cli.setting_options import with_setting_options
from jsworker.telemetry.logs import configure_logs, is_terminal, write_line
from jsworker.supervisor.parent import Ending, Supervisor
from jsworker.core.settings import Settings, load_settings, unknown_variables, variable_of

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
    """Run workers for your processors until SIGTERM or Ctrl-C.

    PROCESSES workers run, each in a process of its own; one that dies is started again, and its jobs go back
    to the others at once. Modules are imported with the working directory on the path. On the first signal
    the workers take no more jobs, let running ones end (at most SHUTDOWN_TIMEOUT seconds) and hand the rest
    back; a second signal hands everything back at once.

    Every option is also an environment variable: --ack-wait is JSWORKER_ACK_WAIT, and so on. The option wins.
    Secrets can also be read from files: JSWORKER_NATS_TOKEN_FILE. Durations are seconds.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    loaded = load_settings(**given)
    configure_logs(format=loaded.log_format, level=loaded.log_level)
    _leave_no_core_dumps()
    for line in unknown_variables():
        structlog.get_logger().warning("setting.unknown", reason=line)
    ending = asyncio.run(_supervise(loaded, targets, _environment(given)))
    if ending.words:
        write_line(ending.words)
    return ending.code


async def _supervise(settings: Settings, targets: Sequence[str], environment: Mapping[str, str]) -> Ending:
    shows_work = settings.log_format == "console" and is_terminal(sys.stderr)
    return await Supervisor(
        settings, command=_command(targets), environment=environment, shows_work=shows_work
    ).run()


def _leave_no_core_dumps() -> None:
    """Keep payloads and passwords out of files; children inherit it. A job may lift the limit for itself."""
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))


def _command(targets: Sequence[str]) -> list[str]:
    """Return the command of a child: this interpreter, with its flags."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 -- nothing public tells them
    # A file of the working directory must not pass for one of Python's, unless jsworker lies there too.
    safe = [] if Path(jsworker.__file__).parents[1] == Path.cwd() or "-P" in flags else ["-P"]
    return [sys.executable, *flags, *safe, "-m", "jsworker.supervisor.child_main", *targets]


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the children's environment, in which options have become variables."""
    environment = dict(os.environ)
    for name, value in given.items():
        environment[variable_of(name)] = value
        environment.pop(f"{variable_of(name)}_FILE", None)
    return environment
