"""Listings that are shown again and again on the terminal, until Ctrl-C."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from jsworker.cli.output import console
from jsworker.cli.selection import connected_database
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import cell
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import readers_right

T = TypeVar("T")
Look = Callable[[Database], Awaitable[T]]


def watch(look: Look[T], picture: Callable[[T], RenderableType], *, interval: float, as_json: bool) -> None:
    """Show the picture of what ``look`` returns, every ``interval`` seconds, as much of it as fits.

    While PostgreSQL cannot be reached the last picture stays, with the time at which it was true.
    """
    if as_json:
        raise WrongUsage("--watch shows a table: it goes without --json")
    if not sys.stdout.isatty():
        raise WrongUsage("--watch needs a terminal")
    with readers_right():
        asyncio.run(_watch(look, picture, interval))


async def _watch(look: Look[T], picture: Callable[[T], RenderableType], interval: float) -> None:
    async with connected_database() as database:
        with Live(console=console(), auto_refresh=False, vertical_overflow="ellipsis") as live:
            shown: RenderableType = ""
            seen_at = ""
            while True:
                now = f"{datetime.now().astimezone():%H:%M:%S}"
                try:
                    shown, seen_at = picture(await look(database)), now
                    line = Text(f"{now}, every {interval:g} s; Ctrl-C ends", "dim")
                except DatabaseUnavailable as error:
                    line = Text(f"{now}, as it was at {seen_at or '-'}: {cell(error)}", "red")
                live.update(Group(line, shown), refresh=True)
                await asyncio.sleep(interval)
