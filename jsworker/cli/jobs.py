"""``jsworker jobs``: the newest jobs, one row each."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from uuid import UUID

from rich.table import Column
from rich.text import Text

from jsworker.cli.connection import connected_database
from jsworker.cli.options import (
    After,
    Json,
    Limit,
    NoProgressFor,
    OnlyKind,
    OnlyStatus,
    RunningFor,
    StaleFor,
    new_app,
)
from jsworker.cli.output import print_json, print_table
from jsworker.cli.remarks import tell
from jsworker.cli.selection import choose_age, choose_statuses
from jsworker.cli.words import cell, headline, seconds_in_words, since, until
from jsworker.core.names import check_kind
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.listing import Page
from jsworker.ownership.queries.run_age import RunAge
from jsworker.ownership.schema import STATUSES
from jsworker.ownership.transitions.refused_rows import Mark, marks_of

_PATIENCE_SECONDS = 2.0

COLOURS = {
    "scheduled": "blue",
    "queued": "yellow",
    "processing": "cyan",
    "completed": "green",
    "failed": "red",
    "cancelled": "magenta",
}

app = new_app()


@app.command()
def jobs(
    *,
    status: OnlyStatus = None,
    kind: OnlyKind = None,
    stale_for: StaleFor = None,
    running_for: RunningFor = None,
    no_progress_for: NoProgressFor = None,
    limit: Limit = 50,
    after: After = None,
    as_json: Json = False,
) -> None:
    """List jobs, the newest first; of scheduled ones the next one due, of queued ones the last queued.

    Running jobs that are chosen by their age come the oldest first: by the time since their last progress,
    since their claim, or since the last heartbeat of their worker.

    All jobs of a kind, and completed ones, are searched for from the newest on, for two seconds at most.
    --after goes on where that ended, as it does behind the last job of a list.

    TRY is attempts/max_attempts, AGE the time since the job was enqueued. `jsworker job ID` shows a job with
    its payload, its result and all that happened to it.
    """
    if kind is not None:
        check_kind(kind)
    age = choose_age(stale_for, running_for, no_progress_for)
    choose_statuses("jobs", status, STATUSES, age)
    page = asyncio.run(_jobs(status, kind, limit, after, age))
    if as_json:
        print_json(page.jobs)
        if len(page.jobs) < limit:  # who has as many as wanted goes on behind the last one
            _tell_rest(page)
        return
    columns = [
        Column("ID", no_wrap=True, min_width=36),
        Column("KIND", no_wrap=True, max_width=20),
        Column("STATUS", no_wrap=True, min_width=10),
        Column("TRY", no_wrap=True),
        Column("AGE", no_wrap=True, justify="right"),
        Column("DETAIL", overflow="fold", min_width=12),
    ]
    print_table(columns, map(_row, page.jobs))
    _tell_rest(page)


def _tell_rest(page: Page) -> None:
    if page.after is not None:
        tell(f"there may be more: --after {page.after} goes on, --limit shows more at once")


async def _jobs(status: str | None, kind: str | None, limit: int, after: UUID | None, age: RunAge) -> Page:
    async with connected_database() as database:
        page = await listing.list_jobs(
            database,
            status=status,
            kind=kind,
            limit=limit,
            after=after,
            seconds=_PATIENCE_SECONDS,
            age=age,
        )
        marks = await marks_of(database, [job["id"] for job in page.jobs])
    return replace(page, jobs=[job | {"refused": marks.get(job["id"], [])} for job in page.jobs])


def _row(job: Mapping[str, Any]) -> list[Text | str]:
    most = job["max_attempts"]
    return [
        str(job["id"]),
        cell(job["kind"]),
        Text(job["status"], COLOURS[job["status"]]),
        f"{job['attempts']}/{'-' if most is None else most}",
        since(job["created_at"]),
        Text(", ".join(part for part in [*map(refusal, job["refused"]), *_detail(job)] if part)),
    ]


def refusal(mark: Mark) -> str:
    """Tell what PostgreSQL refuses to do with a job's row."""
    constraint = "" if mark.constraint_name is None else f" {cell(mark.constraint_name)}"
    return f"PostgreSQL refuses to {mark.attempted}: SQLSTATE {mark.sqlstate}{constraint}"


def _detail(job: Mapping[str, Any]) -> Iterator[str]:
    """Tell what matters about a job of its status."""
    match job["status"]:
        case "scheduled":
            yield f"due in {until(job['run_at'])}"
            yield headline(job["last_error"])
        case "queued" if job["cleared"]:
            yield f"taken back: {headline(job['clear_reason'])}"
        case "processing":
            yield cell(job["worker_id"])
            yield f"running for {since(job['claimed_at'])}, heartbeat {since(job['last_activity_at'])} ago"
            if job["progress_at"] is not None and job["progress_at"] >= job["claimed_at"]:
                yield f"progress {since(job['progress_at'])} ago"
            yield from progress(job)
            if job["cancel_requested"]:
                yield "asked to stop"
        case "completed":
            if job["claimed_at"] and job["finished_at"]:
                took = (job["finished_at"] - job["claimed_at"]).total_seconds()
                yield f"took {seconds_in_words(took)}" if took >= 1 else f"took {took * 1000:.0f}ms"
        case "failed":
            yield ": ".join(
                part for part in (cell(job["failure_reason"]), headline(job["last_error"])) if part
            )
        case _:
            return


def progress(job: Mapping[str, Any]) -> Iterator[str]:
    """Tell how far a job says it is: stage and share, then its own words."""
    share = None if job["progress"] is None else f"{job['progress']:.0%}"
    yield " ".join(part for part in (cell(job["stage"]), share) if part)
    yield cell(job["message"])
