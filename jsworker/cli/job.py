"""``jsworker job ID``: everything about one job."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final

import typer
from rich.table import Column, Table
from rich.text import Text

from jsworker.cli.connection import connected_database
from jsworker.cli.jobs import COLOURS, progress, refusal
from jsworker.cli.options import Json, Stack, new_app
from jsworker.cli.output import console, iso, print_json, print_line, print_table
from jsworker.cli.selection import find_job
from jsworker.cli.timeline import entry_in_words, runs_in_words
from jsworker.cli.words import cell, headline, moment, since, until
from jsworker.core.errors import JobNotFound
from jsworker.core.names import printable
from jsworker.core.tracebacks import from_users_code, last_place
from jsworker.ownership.queries import listing
from jsworker.ownership.transitions.refused_rows import marks_of

_LONGEST_VALUE: Final = 100_000

_FAILURES: Final = {
    "attempts": "no attempt is left",
    "stalled": "it stalled too often",
    "permanent": "the processor said so",
    "payload": "its payload does not fit its processor",
    "result": "its result cannot be stored",
}

app = new_app()


@app.command()
def job(
    job_id: Annotated[
        str, typer.Argument(metavar="ID", help="The job's id, or its last eight digits.", show_default=False)
    ],
    *,
    all_columns: Annotated[
        bool, typer.Option("--all", metavar="", help="Show every column that is set.", show_default=False)
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option("--traceback", metavar="", help="Show the last error's traceback.", show_default=False),
    ] = False,
    full_traceback: Annotated[
        bool,
        typer.Option(
            "--full-traceback",
            metavar="",
            help="The same, from jsworker's own frames on.",
            show_default=False,
        ),
    ] = False,
    stack: Stack = False,
    as_json: Json = False,
) -> None:
    """Show one job: how it stands and why, its error, payload and result; then its runs and its timeline.

    There is a line for each run, numbered by its fencing token. The timeline holds what is out of the
    ordinary: claims after the first one, errors, resets, late writes that were refused, retries,
    cancellations. With --json, the object has every column, the timeline under "timeline", and under
    "refused" what PostgreSQL refuses to do with the job's row. A job that is named by its last digits is
    looked for among the newest.

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
    if traceback or full_traceback:
        _print_traceback(found, whole=full_traceback)
        return
    _print_grid(_columns(found) if all_columns else _summary(found))
    for mark in refused:
        again = f"first {since(mark.first_at)} ago, tries: {mark.tries}, again in {until(mark.retry_at)}"
        print_line(f"\n{refusal(mark)}; {again}")
    if runs := runs_in_words(found, timeline):
        print_line("")
        for line in runs:
            print_line(line)
    if timeline:
        print_line("")
        _print_timeline(timeline)


async def _job(named: str) -> dict[str, Any]:
    async with connected_database() as database:
        job_id = await find_job(database, named)
        found = await listing.get_job(database, job_id)
        if found is None:
            raise JobNotFound(f"no job has id {job_id}")
        marks = await marks_of(database, [job_id])
        timeline = await listing.timeline(database, job_id)
        return found | {"refused": marks.get(job_id, []), "timeline": timeline}


def _print_traceback(found: Mapping[str, Any], *, whole: bool) -> None:
    error = found["last_error"]
    if not error:
        print_line("there was no error")
        return
    print_line(_lines(error if whole else from_users_code(error)))


def _print_grid(rows: Iterator[tuple[str, Text]]) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    console().print(grid)


def _summary(found: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    """Yield what people ask first: what it is, how it stands and why, its error, and where it runs."""
    yield "job", Text(f"{cell(found['kind'])} {found['id']}")
    yield "status", Text(f"{found['status']}: {_standing(found)}", COLOURS[found["status"]])
    if found["status"] == "processing":
        heard = since(found["last_activity_at"])
        yield "worker", Text(f"{cell(found['worker_id'])}, last heartbeat {heard} ago")
    told = ", ".join(part for part in progress(found) if part)
    if told:
        yield "progress", Text(told)
    if found["last_error"]:
        place = last_place(found["last_error"])
        error = headline(found["last_error"]) + (f" at {cell(place)}" if place else "")
        yield "error", Text(error, "red" if found["status"] == "failed" else "")
    yield "attempts", Text(_attempts(found))
    yield "enqueued", Text(f"{moment(found['created_at'])}, {since(found['created_at'])} ago")
    if found["finished_at"] is not None:
        yield "finished", Text(f"{moment(found['finished_at'])}, {since(found['finished_at'])} ago")
    if found["unique_key"] is not None:
        yield "unique key", Text(cell(found["unique_key"]))
    for name in ("payload", "checkpoint", "result"):
        if found[name] is not None:
            yield name, Text(_in_words(found[name]))


def _standing(found: Mapping[str, Any]) -> str:
    """Return why the job is in its status, and until when."""
    match found["status"]:
        case "scheduled":
            begins = "runs again" if found["attempts"] or found["fencing_token"] else "due"
            return f"{begins} in {until(found['run_at'])}, at {moment(found['run_at'])}"
        case "queued":
            waits = (
                "its message waits to be published" if found["needs_publish"] else "waits for a free worker"
            )
            again = f"; taken back: {cell(found['clear_reason'])}" if found["cleared"] else ""
            return f"{waits} since {since(found['queued_at'])}{again}"
        case "processing":
            asked = ", asked to stop" if found["cancel_requested"] else ""
            return f"runs since {since(found['claimed_at'])}{asked}"
        case "failed":
            reason = str(found["failure_reason"])
            return f"{_FAILURES.get(reason, cell(reason))}; `jsworker retry` puts it back into the queue"
        case "completed":
            return f"by {cell(found['completed_by'])}" if found["completed_by"] else "done"
        case _:
            return "on request"


def _attempts(found: Mapping[str, Any]) -> str:
    most = "" if found["max_attempts"] is None else f" of {found['max_attempts']}"
    stalls = "" if found["max_stalls"] is None else f" of {found['max_stalls']}"
    return f"{found['attempts']}{most}; errors: {found['errors']}, stalls: {found['stalls']}{stalls}"


def _columns(found: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    for name, value in found.items():
        if value is not None:
            style = COLOURS[value] if name == "status" else ""
            yield name, Text(_in_words(value), style)


def _print_timeline(timeline: Sequence[Mapping[str, Any]]) -> None:
    columns = [
        Column("AT", no_wrap=True),
        Column("RUN", justify="right"),
        Column("WHAT HAPPENED", overflow="fold", min_width=20),
    ]
    rows = (
        [moment(event["at"], milliseconds=True), cell(event["fencing_token"]), entry_in_words(event)]
        for event in timeline
    )
    print_table(columns, rows)


def _in_words(value: Any) -> str:
    match value:
        case datetime():
            text = iso(value)
        case timedelta():
            text = f"{value.total_seconds():g} s"
        case bool() | dict() | list():
            text = json.dumps(value, ensure_ascii=False, indent=2)
        case _:
            text = str(value)
    return _lines(text)


def _lines(text: str) -> str:
    # Line by line: a traceback keeps its shape, and nobody's text steers the terminal.
    return "\n".join(printable(line, _LONGEST_VALUE) for line in text.split("\n"))
