"""Options that several commands share, and how each option is declared."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any, Literal, get_args
from uuid import UUID

import typer
from typer.core import TyperCommand, TyperGroup

from jsworker.core.exit_codes import WrongUsage, writing_stdout
from jsworker.core.names import shown
from jsworker.core.priorities import Priority

Status = Literal["scheduled", "queued", "processing", "completed", "failed", "cancelled"]


arguments: ContextVar[Sequence[str]] = ContextVar("jsworker_arguments", default=())
"""Arguments of the command that is running."""


# So Python keeps bytes of an argument that are not UTF-8.
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


class _Plain:
    """Shows --help without the type of a value, because it takes none; an error of stdout is one line."""

    def format_help(self, context: Any, formatter: Any) -> None:
        with writing_stdout():  # typer writes the help here, not when it is formatted
            super().format_help(context, formatter)  # type: ignore[misc] # of what this is mixed into

    def get_help_option(self, context: Any) -> Any:
        found: Any = super().get_help_option(context)  # type: ignore[misc] # of what this is mixed into
        if found is not None:
            found.metavar = ""
        return found


class _Command(_Plain, TyperCommand):
    """A command; it refuses text that PostgreSQL cannot store."""

    def invoke(self, context: Any) -> Any:
        # Options end where another program's command begins, whose arguments may be any bytes.
        for each in self.params if context.allow_interspersed_args else ():
            given = context.params.get(each.name)
            texts = given if isinstance(given, list | tuple) else (given,)
            if any(isinstance(text, str) and _NOT_UTF8.search(text) for text in texts):
                name = each.metavar if each.param_type_name == "argument" else each.opts[0]
                raise WrongUsage(f"{name} must be text in UTF-8")  # without the value, which may be a secret
        return super().invoke(context)


class Group(_Plain, TyperGroup):
    """A command with commands below it."""


class _App(typer.Typer):
    """Adds to each command that has --json the option --output, whose value json means the same."""

    def command(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        return _registering(super().command(*arguments, **{"cls": _Command, **options}))

    def callback(self, *arguments: Any, **options: Any) -> Callable[[Any], Any]:
        return _registering(super().callback(*arguments, **options))


def _registering(register: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def take(function: Any) -> Any:
        register(_with_output(function))
        return function

    return take


def _with_output(function: Any) -> Any:
    signature = inspect.signature(function)
    if "as_json" not in signature.parameters:
        return function

    @wraps(function)
    def command(*given: Any, as_json: bool, output: str | None, **options: Any) -> Any:
        if as_json and output == "table":
            raise WrongUsage("--json and --output table: one of them")
        return function(*given, as_json=as_json or output == "json", **options)

    kind = inspect.Parameter.KEYWORD_ONLY
    added = inspect.Parameter("output", kind, default=None, annotation=Output)
    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]  # inspect reads it
    return command


def new_app(*, add_completion: bool = False, **options: Any) -> typer.Typer:
    """Return a typer application with the settings that all commands share."""
    return _App(add_completion=add_completion, rich_markup_mode="markdown", **{"cls": Group, **options})


def argument(metavar: str, meaning: str, **rules: Any) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=meaning, show_default=False, **rules)


def option(metavar: str, meaning: str, **rules: Any) -> Any:
    """Declare an option that takes a value; its name is that of the parameter."""
    return typer.Option(metavar=metavar, help=meaning, show_default=False, **rules)


def flag(meaning: str, *names: str, **rules: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(*names, metavar="", help=meaning, show_default=False, **rules)


def in_options(error: str, *parameters: str) -> WrongUsage:
    """Return an error about these parameters, as in ``unique_for=5``, by the names of their options."""
    named = re.compile(rf"""'[^']*'|"[^"]*"|\b({"|".join(parameters)})\b(=?)""")  # what was given is quoted

    def option_of(found: re.Match[str]) -> str:
        return found[0] if found[1] is None else f"--{found[1].replace('_', '-')}{' ' * len(found[2])}"

    return WrongUsage(named.sub(option_of, error))


LAST_DIGITS = re.compile(r"[0-9a-f]{8}|[0-9a-f-]{9,35}")
"""The last digits of a job's id."""


def whole_id(given: str) -> UUID:
    """Return an id; raise ValueError if it is not a whole UUID."""
    try:
        return UUID(given)
    except ValueError:
        raise ValueError(f"{shown(given)} must be a whole id, a UUID") from None


def job_id(given: str) -> UUID:
    """Return a job's id; its last digits are refused: a command must not guess which job to change."""
    try:
        return whole_id(given)
    except ValueError as error:
        if not LAST_DIGITS.fullmatch(given.lower()):
            raise
        raise ValueError(f"{error}, which jsworker job {given} shows") from None


Output = Annotated[
    Literal["table", "json"] | None, option("table|json", "How it is printed: a table, or as with --json.")
]
Json = Annotated[bool, flag("Print JSON, field names = column names.", "--json")]
JsonObject = Annotated[bool, flag("Print a JSON object.", "--json")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Show at most so many.")]
After = Annotated[UUID | None, option("ID", "Continue the list after this job.", parser=job_id)]
Watch = Annotated[bool, flag("Show it again and again, until Ctrl-C.", "--watch", "-w")]
Interval = Annotated[
    float, typer.Option(min=0.2, max=3600.0, metavar="SECONDS", help="Between two looks of --watch.")
]
Stack = Annotated[bool, flag("Show where it is at this moment: file, line, function.", "--stack")]
Yes = Annotated[bool, flag("Do not ask.", "--yes", "-y")]
OnlyStatus = Annotated[
    Status | None, option("STATUS", f"Only jobs of this status: {', '.join(get_args(Status))}.")
]
OnlyKind = Annotated[str | None, option("KIND", "Only jobs of this kind.")]
OnlyError = Annotated[
    str | None, option("TEXT", "Only jobs whose last error holds this text, in capitals or not.")
]
OnlyKey = Annotated[str | None, option("KEY", "Only jobs of this limit key.")]
OnlyWorker = Annotated[str | None, option("ID", "Only jobs that this worker runs or has completed.")]
OnlyUniqueKey = Annotated[str | None, option("KEY", "Only jobs of this unique key, live or not.")]
Since = Annotated[
    str | None,
    option("TIME", "Only jobs that were enqueued then or later: ISO 8601, without a zone in this machine's."),
]
Until = Annotated[str | None, option("TIME", "Only jobs that were enqueued before.")]
OnlyPriority = Annotated[Priority | None, option("PRIORITY", "Only high, normal or low jobs.")]
StaleFor = Annotated[
    float | None,
    option("SECONDS", "Only running jobs whose worker gave no heartbeat for so long: it is dead or cut off."),
]
RunningFor = Annotated[float | None, option("SECONDS", "Only running jobs whose run began so long ago.")]
NoProgressFor = Annotated[
    float | None,
    option("SECONDS", "Only running jobs that reported no progress and saved no checkpoint for so long."),
]
JobIds = Annotated[list[UUID] | None, argument("ID", "The jobs' ids.", parser=job_id)]
