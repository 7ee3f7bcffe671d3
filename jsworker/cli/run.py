"""``jsworker run``: the parent of worker processes, from its settings to its exit code."""

from jsworker.telemetry import lean_structlog  # noqa: F401, I001 -- before all other imports of structlog

import asyncio
import inspect
import os
import re
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

import jsworker
from jsworker.cli.options import argument, flag, new_app
from jsworker.telemetry.logs import configure_logs, is_terminal, own_logger, write_line
from jsworker.supervisor.parent import Supervisor
from jsworker.core.settings import Settings, changed_environment, load_settings, unknown_variables
from jsworker.core.targets import working_directory

_ALIASES = {"watchdog_timeout": ["--heartbeat-timeout"]}
_MARKDOWN = re.compile(r"[\\`*_<]")
_PANELS = {
    "database_url": "Servers and logins (better as variables: ps shows options)",
    "stream": "Stream",
    "concurrency": "Jobs",
    "heartbeat_interval": "Recovery",
    "max_attempts": "Jobs",
    "worker_id": "Who this worker is",
    "http_host": "Health and logs",
}
"""Panels of the help, by the first setting of each; the settings that follow it are in the same panel."""

app = new_app()


def with_setting_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting to the signature of a command with ``**settings``, which typer reads.

    The command gets every value as text, None for an option that was not given. The settings' own rules check
    the values, and their errors name the variable.
    """
    signature = inspect.signature(command)
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    options, panel = [], ""
    for name, field in Settings.model_fields.items():
        panel = _PANELS.get(name, panel)
        names = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, [])]
        option = typer.Option(
            *names,
            metavar=_metavar(name, field),
            help=_help(field),
            rich_help_panel=panel,
            autocompletion=_completion(field),
        )
        kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[str | None, option]
        options.append(inspect.Parameter(name, kind, default=None, annotation=annotation))
    command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]  # inspect reads it
    return command


def _help(field: FieldInfo) -> str:
    """Return a setting's description, with its default, unless that is None or computed at the start."""
    description = _MARKDOWN.sub(r"\\\g<0>", str(field.description))
    default = field.default
    if field.is_required() or field.default_factory or default is None:
        return description
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{description} [default: {default}]"


def _metavar(name: str, field: FieldInfo) -> str:
    if choices := _values_of(field):
        return "|".join(choices) if len(choices) < 4 else "LEVEL"
    wanted = _plain(field.annotation)
    if name.endswith("_url"):
        return "URL"
    by_type = {int: "NUMBER", float: "SECONDS", Path: "PATH", SecretStr: "SECRET"}
    return by_type.get(wanted, "NAME")


def _values_of(field: FieldInfo) -> tuple[str, ...]:
    """Return all values of a setting; empty if its type does not list them."""
    wanted = _plain(field.annotation)
    if wanted is bool:
        return "true", "false"
    return get_args(wanted) if get_origin(wanted) is Literal else ()


def _completion(field: FieldInfo) -> Callable[[str], list[str]] | None:
    """Return the function that completes a value in a shell; None if the values are not listed."""
    values = _values_of(field)

    def complete(incomplete: str) -> list[str]:
        return [each for each in values if each.startswith(incomplete)]

    return complete if values else None


def _plain(annotation: Any) -> Any:
    """Return a type without None and without its rules."""
    if get_origin(annotation) in {Annotated, Union, types.UnionType}:
        return _plain(next(each for each in get_args(annotation) if each is not types.NoneType))
    return annotation


@app.command()
@with_setting_options
def run(
    targets: Annotated[
        list[str],
        argument("MODULE:CLASS", "Processors: my_jobs:AnalyzeRepo, or my_jobs for all that it defines."),
    ],
    *,
    reload: Annotated[
        bool,
        flag("For development: restart when a Python file here changes; running jobs end first.", "--reload"),
    ] = False,
    **settings: str | None,
) -> int:
    """Run workers for your processors until SIGTERM or Ctrl-C.

    PROCESSES workers run, each in a process of its own; one that dies is started again, and its jobs go back
    to the others at once. Modules are imported with the working directory on the path. On the first signal
    the workers take no more jobs, let running ones end (at most SHUTDOWN_TIMEOUT seconds) and hand the rest
    back; a second signal hands everything back at once.

    A module or a package without a class stands for all processors that are defined in it, and in the
    modules of the package; those that it imports are among them if its `__all__` names them. --reload needs
    the extra "reload": pip install 'jsworker[reload]'.

    Every option is also an environment variable: --ack-wait is JSWORKER_ACK_WAIT, and so on. The option wins.
    Secrets can also be read from files: JSWORKER_NATS_TOKEN_FILE. Durations are seconds.

    Example: `jsworker run my_jobs:AnalyzeRepo --processes 4 --http-port 8080`
    """
    given = {name: value for name, value in settings.items() if value is not None}
    loaded = load_settings(**given)
    if reload:
        from jsworker.cli.reload import run_reloading  # noqa: PLC0415 -- for development alone

        return run_reloading([*_python("jsworker"), "run", *targets], changed_environment(os.environ, given))
    configure_logs(format=loaded.log_format, level=loaded.log_level)
    # Core dumps would hold payloads and passwords. Children inherit the limit; a job may lift it for itself.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for line in unknown_variables():
        own_logger().warning("setting.unknown", reason=line)
    supervisor = Supervisor(
        loaded,
        command=_command(targets),
        environment=changed_environment(os.environ, given),
        shows_work=loaded.log_format == "console" and is_terminal(sys.stderr),
    )
    code, words = asyncio.run(supervisor.run())
    if words:
        write_line(words)
    return code


def _command(targets: Sequence[str]) -> list[str]:
    return [*_python("jsworker.supervisor.child_main"), *targets]


def _python(module: str) -> list[str]:
    """Return the command that runs a module as this process runs its own."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no public function
    # -P: no file in the working directory replaces a module of Python's. Not if jsworker is imported from it.
    safe = [] if Path(jsworker.__file__).parents[1] == working_directory() or "-P" in flags else ["-P"]
    return [sys.executable, *flags, *safe, "-m", module]
