"""Options that several commands share, and how each option is declared."""

from typing import Annotated, Any, Literal, get_args
from uuid import UUID

import typer

from jsworker.core.priorities import Priority

Status = Literal["scheduled", "queued", "processing", "completed", "failed", "cancelled"]


def new_app(**options: Any) -> typer.Typer:
    """Return a typer application like all others of this command line."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", **options)


def argument(metavar: str, meaning: str) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=meaning, show_default=False)


def option(metavar: str, meaning: str, **rules: Any) -> Any:
    """Declare an option that takes a value; its name is that of the parameter."""
    return typer.Option(metavar=metavar, help=meaning, show_default=False, **rules)


def flag(meaning: str, *names: str, **rules: Any) -> Any:
    """Declare an option without a value."""
    return typer.Option(*names, metavar="", help=meaning, show_default=False, **rules)


Json = Annotated[bool, flag("Print JSON, field names = column names.", "--json")]
JsonObject = Annotated[bool, flag("Print a JSON object.", "--json")]
Limit = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Show at most so many.")]
After = Annotated[UUID | None, option("ID", "Go on behind this job.")]
Stack = Annotated[bool, flag("Show where it is at this moment: file, line, function.", "--stack")]
Yes = Annotated[bool, flag("Do not ask.", "--yes", "-y")]
OnlyStatus = Annotated[
    Status | None, option("STATUS", f"Only jobs of this status: {', '.join(get_args(Status))}.")
]
OnlyKind = Annotated[str | None, option("KIND", "Only jobs of this kind.")]
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
JobIds = Annotated[list[UUID] | None, argument("ID", "The jobs' ids.")]
