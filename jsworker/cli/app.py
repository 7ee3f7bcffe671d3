"""The command ``jsworker``: its table of contents, and how a command is found and called."""

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.main import get_command

import jsworker
from jsworker.cli.options import Group, flag, new_app
from jsworker.cli.options import arguments as present_arguments
from jsworker.core import exit_codes
from jsworker.supervisor.process_exit import EXIT_SECONDS, exit_within

_START, _JOBS, _CARE = "To begin with", "Jobs", "Servers and workers"


class _Entry(NamedTuple):
    module: str
    panel: str
    summary: str


_COMMANDS = {
    "dev": _Entry("dev", _START, "Start NATS and PostgreSQL for development, or run a command with them."),
    "run": _Entry("run", _START, "Run a worker for your processors."),
    "enqueue": _Entry("enqueue", _START, "Enqueue jobs and print their ids."),
    "status": _Entry(
        "status", _JOBS, "Show waiting, running and failed jobs of each kind, and their workers."
    ),
    "jobs": _Entry("jobs", _JOBS, "List jobs, the newest first."),
    "job": _Entry("jobs", _JOBS, "Show one job: every column and its timeline."),
    "retry": _Entry("control", _JOBS, "Put failed or cancelled jobs back into the queue."),
    "cancel": _Entry("control", _JOBS, "Cancel jobs; running ones are asked to stop."),
    "clear": _Entry("control", _JOBS, "Take running jobs from their workers and queue them again."),
    "priority": _Entry("waiting_jobs", _JOBS, "Change the priority of waiting jobs."),
    "reschedule": _Entry("waiting_jobs", _JOBS, "Change the due time of waiting jobs."),
    "dead-messages": _Entry(
        "dead_messages", _JOBS, "List, replay or drop messages that no worker could use."
    ),
    "schedules": _Entry("schedules", _JOBS, "Schedules of recurring jobs: list, add, pause, run now."),
    "limits": _Entry("limits", _JOBS, "Limits and rates of jobs: list, set, reset."),
    "pause": _Entry("pausing", _JOBS, "Start no more jobs of a kind or a key."),
    "resume": _Entry("pausing", _JOBS, "Resume a paused kind or key."),
    "workflow": _Entry("workflow", _JOBS, "Show a workflow as a tree; list, cancel or retry workflows."),
    "prune": _Entry("prune", _CARE, "Delete jobs that ended long ago, with their timelines."),
    "dashboard": _Entry("dashboard", _CARE, "Serve the dashboard: see jobs and workers, and act on them."),
    "audit": _Entry("audit", _CARE, "List who did what to jobs, kinds and schedules."),
    "workers": _Entry("workers", _CARE, "List workers, the last seen first."),
    "drain": _Entry("pausing", _CARE, "Let a worker claim no more jobs; its running jobs continue."),
    "undrain": _Entry("pausing", _CARE, "Let a drained worker claim jobs again."),
    "db": _Entry("db_and_stream", _CARE, "Create or migrate jsworker's tables."),
    "stream": _Entry("db_and_stream", _CARE, "Create the stream and its consumers, or correct them."),
    "doctor": _Entry("doctor", _CARE, "Check settings, servers, tables and streams, and say what to do."),
}


class _Commands(Group):
    """Lists the commands from the table above; a command's module is imported when it is called.

    SQLAlchemy and NATS take most of a second to import, which ``--help`` need not wait for.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        module = importlib.import_module(f"jsworker.cli.{_COMMANDS[str(name)].module}")
        if ctx.obj is not None:
            ctx.obj()
        found = get_command(module.app)
        return name, getattr(found, "commands", {}).get(name, found), rest


app = new_app(cls=_Commands, no_args_is_help=True, add_completion=True)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 -- the shape of an option's callback
    if wanted:
        with exit_codes.writing_stdout():
            typer.echo(f"jsworker {jsworker.__version__}")
        raise typer.Exit


@app.callback()
def _jsworker(
    *,
    version: Annotated[
        bool, flag("Show the version.", "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Jobs that must not get lost: NATS JetStream delivers them, PostgreSQL decides who owns each one.

    Settings are environment variables, JSWORKER_DATABASE_URL and JSWORKER_NATS_URL first of all; `jsworker
    run --help` lists them. Exit codes: 0 done, 1 failed, 2 wrong usage or settings.
    """


def _stand_in() -> None:
    """Take a command's place in the list of commands; the real one is loaded when it is called."""


for _name, _entry in _COMMANDS.items():
    app.command(_name, help=_entry.summary, rich_help_panel=_entry.panel)(_stand_in)


def run_command(arguments: Sequence[str], *, loaded: Callable[[], None] | None = None) -> int:
    """Run ``jsworker`` with these arguments, report errors on stderr and return the exit code.

    ``loaded`` is called when the command's module is loaded, before the command runs.
    """
    present_arguments.set(tuple(arguments))
    options: dict[str, Any] = {"prog_name": "jsworker", "standalone_mode": False, "obj": loaded}
    return exit_code_of(lambda: get_command(app).main(args=list(arguments), **options))


def main() -> NoReturn:
    """Run ``jsworker`` with the arguments of this process, whichever standard streams it was started with."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was started with this stream closed
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 -- lasts as long as the process
    # A job's text may contain characters that the terminal's encoding lacks.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stream here
    # Errors are reported in one line, without logs of libraries. A worker sets up its own logs.
    logging.getLogger().addHandler(logging.NullHandler())
    # Modules make no garbage as they load; passes that look for it take up to half of a command's time.
    gc.disable()
    code = run_command(sys.argv[1:], loaded=_collect_from_here_on)
    exit_within(EXIT_SECONDS, code)
    sys.exit(code)


def _collect_from_here_on() -> None:
    gc.freeze()
    gc.enable()


def exit_code_of(command: Callable[[], Any]) -> int:
    """Run a command, report its error, and return its exit code; None is 0."""
    return exit_codes.exit_code_of(command, on_unexpected=_report_unexpected)


def _report_unexpected(error: Exception) -> int:
    if not isinstance(error, typer.TyperException):
        return exit_codes.show_traceback(error)
    line = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    context = getattr(error, "ctx", None)
    if line:  # empty if there were no arguments: then the help has been shown
        see = " See" if line.endswith("?") else "; see"
        typer.echo(f"{line}{see} {context.command_path} --help" if context else line, err=True)
    return error.exit_code
