"""Options that several commands share."""

from typing import Annotated, Any, Literal, get_args
from uuid import UUID

import typer

Status = Literal["scheduled", "queued", "processing", "completed", "failed", "cancelled"]

Json = Annotated[
    bool,
    typer.Option("--json", metavar="", help="Print JSON, field names = column names.", show_default=False),
]
Limit = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="Show at most so many.")]
After = Annotated[
    UUID | None,
    typer.Option("--after", metavar="ID", help="Go on behind this job.", show_default=False),
]
Stack = Annotated[
    bool,
    typer.Option(
        "--stack",
        metavar="",
        help="Show where it is at this moment: file, line, function.",
        show_default=False,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask.", show_default=False)]
OnlyStatus = Annotated[
    Status | None,
    typer.Option(
        metavar="STATUS", help=f"Only jobs of this status: {', '.join(get_args(Status))}.", show_default=False
    ),
]
OnlyKind = Annotated[
    str | None, typer.Option(metavar="KIND", help="Only jobs of this kind.", show_default=False)
]
StaleFor = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Only running jobs whose worker gave no heartbeat for so long: it is dead or cut off.",
        show_default=False,
    ),
]
RunningFor = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Only running jobs whose run began so long ago.", show_default=False
    ),
]
NoProgressFor = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Only running jobs that reported no progress and saved no checkpoint for so long.",
        show_default=False,
    ),
]
JobIds = Annotated[list[UUID] | None, typer.Argument(metavar="ID", help="The jobs' ids.", show_default=False)]


def new_app(**options: Any) -> typer.Typer:
    """Return a typer application like all others of this command line."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", **options)
