"""``jsworker job ID``: everything about one job."""

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import typer
from rich.table import Column, Table
from rich.text import Text

from jsworker.cli.connection import connected_database
from jsworker.cli.jobs import COLOURS, refusal
from jsworker.cli.options import Json, Stack, new_app
from jsworker.cli.output import console, iso, print_json, print_line, print_table
from jsworker.cli.runs import runs_in_words
from jsworker.cli.words import cell, headline, since, until
from jsworker.errors import JobNotFound
from jsworker.names import printable
from jsworker.ownership import listing
from jsworker.ownership.refused_rows import marks_of

_LONGEST_VALUE = 100_000

app = new_app()


@app.command()
def job(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", help="The job's id.", show_default=False)],
    *,
    stack: Stack = False,
    as_json: Json = False,
) -> None:
    """Show one job: every column that is set, payload and result too, and its timeline.

    The timeline holds what is out of the ordinary: claims after the first one, errors, resets, late writes
    that were refused, retries, cancellations. Below it stands, for each run of a job that ran more than once,
    how it ended. With --json, the object has every column, the timeline under "timeline", and under "refused"
    what PostgreSQL refuses to do with the job's row.

    --stack asks the worker that runs it over NATS, with the login of a worker, and shows instead at which
    places of your code its run is at this moment: the coroutine that waits, and the tasks that it waits for,
    or the thread of a plain function.
    """
    if stack:
        from jsworker.cli.stack import show_run  # noqa: PLC0415 -- nobody else needs NATS here

        show_run(job_id, as_json=as_json)
        return
    found = asyncio.run(_job(job_id))
    if as_json:
        print_json(found)
        return
    timeline, refused = found.pop("timeline"), found.pop("refused")
    _print_columns(found)
    if refused:
        print_line("")
    for mark in refused:
        again = f"first {since(mark.first_at)} ago, tries: {mark.tries}, again in {until(mark.retry_at)}"
        print_line(f"{refusal(mark)}; {again}")
    if timeline:
        print_line("")
        _print_timeline(timeline)
    if found["fencing_token"] > 1:
        print_line("")
        for line in runs_in_words(found, timeline):
            print_line(line)


async def _job(job_id: UUID) -> dict[str, Any]:
    async with connected_database() as database:
        found = await listing.get_job(database, job_id)
        if found is None:
            raise JobNotFound(f"no job has id {job_id}")
        marks = await marks_of(database, [job_id])
        timeline = await listing.timeline(database, job_id)
        return found | {"refused": marks.get(job_id, []), "timeline": timeline}


def _print_columns(found: Mapping[str, Any]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in found.items():
        if value is not None:
            style = COLOURS[value] if name == "status" else ""
            grid.add_row(name, Text(_in_words(value), style))
    console().print(grid)


def _print_timeline(timeline: list[dict[str, Any]]) -> None:
    columns = [
        Column("AT", no_wrap=True),
        Column("EVENT", no_wrap=True),
        Column("TOKEN", justify="right"),
        Column("WORKER", overflow="fold"),
        Column("DETAIL", overflow="fold", min_width=20),
    ]
    print_table(columns, map(_timeline_row, timeline))


def _timeline_row(event: Mapping[str, Any]) -> list[str]:
    detail = event["detail"] or {}
    parts = [headline(event["error"]), *(f"{cell(name)}={cell(value)}" for name, value in detail.items())]
    return [
        iso(event["at"])[:23],
        cell(event["event"]),
        cell(event["fencing_token"]),
        cell(event["worker_id"]),
        ", ".join(part for part in parts if part),
    ]


def _in_words(value: Any) -> str:
    match value:
        case datetime():
            return iso(value)
        case timedelta():
            return f"{value.total_seconds():g} s"
        case bool() | dict() | list():
            text = json.dumps(value, ensure_ascii=False, indent=2)
        case _:
            text = str(value)
    # Line by line: a traceback keeps its shape, and nobody's text steers the terminal.
    return "\n".join(printable(line, _LONGEST_VALUE) for line in text.split("\n"))
