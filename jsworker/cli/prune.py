"""``jsworker prune``: deletes ended jobs now, rather than leave it to the workers."""

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Literal
from uuid import UUID

from jsworker.cli.interruption import on_interrupt, run_in_batches
from jsworker.cli.options import Json, OnlyKind, flag, new_app, option
from jsworker.cli.output import print_json, print_line, progress_bar, progress_wanted, remark
from jsworker.cli.selection import connected_database
from jsworker.core.errors import DatabaseTimeout, SettingsError
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import check_kind, printable
from jsworker.core.settings import load_settings, variable_of
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import Refused, needed_right
from jsworker.ownership.transitions import prune as pruning
from jsworker.ownership.transitions.audit import prune_actions
from jsworker.ownership.transitions.prune import FIRST_LIMIT, Ended
from jsworker.ownership.transitions.refused_rows import RefusedRow, RefusedRows

app = new_app()


@dataclass(slots=True)
class _Done:
    """Numbers of what was deleted so far, or counted; None: not known yet.

    ``kept``, ``kept_workflows``: jobs and workflows that PostgreSQL refuses to delete; ``actions``: rows
    (parts of entries) of the audit.
    """

    jobs: int | None = None
    entries: int | None = None
    kept: int = 0
    kept_workflows: int = 0
    actions: int = 0


@app.command()
def prune(
    *,
    older_than: Annotated[
        str | None,
        option("SECONDS", "Jobs that ended longer ago than this; default: JSWORKER_RETENTION."),
    ] = None,
    status: Annotated[
        Literal["completed", "failed", "cancelled"] | None,
        option("STATUS", "Only jobs of this status: completed, failed or cancelled."),
    ] = None,
    kind: OnlyKind = None,
    dry_run: Annotated[bool, flag("Only count them.", "--dry-run")] = False,
    as_json: Json = False,
) -> None:
    """Delete ended jobs, with their timelines: completed, failed and cancelled ones.

    Workers do this by themselves, gently, for jobs older than JSWORKER_RETENTION; this command does it at
    once. It deletes in small transactions, and Ctrl-C ends it after the present one. Jobs that wait or run
    are never touched. Without --status and --kind it also deletes workflows, each with all of its jobs, and
    what `jsworker audit` lists, when that is 400 days old; with one of them, jobs of workflows stay.

    Example: `jsworker prune --older-than 604800 --status completed --dry-run`
    """
    if kind is not None:
        check_kind(kind)
    seconds, done = _seconds(older_than), _Done()
    right = (
        ("SELECT on jsworker.jobs", "jsworker_reader")
        if dry_run
        else ("DELETE on jsworker.jobs, job_events and audit", "jsworker_worker")
    )
    try:
        shows_progress = progress_wanted(as_json=as_json)
        with needed_right("prune", *right):
            run_in_batches(
                _prune(seconds, status, kind, done, dry_run=dry_run, shows_progress=shows_progress)
            )
    finally:  # what was deleted is reported, whatever came after it
        if done.jobs is not None:
            jobs = f"{done.jobs} job" if done.jobs == 1 else f"{done.jobs} jobs"
            if as_json:
                found = {"jobs": done.jobs, "timeline_entries": done.entries, "kept": done.kept}
                found |= {"kept_workflows": done.kept_workflows, "audit_entries": done.actions}
                print_json({**found, "older_than": seconds, "dry_run": dry_run})
            elif dry_run:
                print_line(f"{jobs} would be deleted")
            else:
                kept = f"; kept because PostgreSQL refuses: {done.kept}" if done.kept else ""
                if done.kept_workflows:
                    kept += f"; workflows kept, with their jobs: {done.kept_workflows}"
                actions = f"; old entries of the audit: {done.actions}" if done.actions else ""
                print_line(f"{jobs} deleted; timeline entries: {done.entries}{actions}{kept}")


def _seconds(older_than: str | None) -> float:
    """Return from which age jobs are deleted; --older-than is checked by the rules of JSWORKER_RETENTION."""
    if older_than is None:
        seconds = load_settings().retention
    else:
        try:
            seconds = load_settings(retention=older_than).retention
        except SettingsError as error:
            raise SettingsError(str(error).replace(variable_of("retention"), "--older-than")) from None
    if seconds is None:
        raise WrongUsage(
            "prune needs --older-than SECONDS: JSWORKER_RETENTION is none, which keeps jobs for ever"
        )
    return seconds


async def _prune(
    older_than: float,
    status: str | None,
    kind: str | None,
    done: _Done,
    *,
    dry_run: bool,
    shows_progress: bool,
) -> None:
    async with connected_database() as database:
        # Read once: jobs that reach this age while the command runs are left for the next run.
        before = await pruning.cutoff(database, older_than=older_than)
        ended = Ended(before, kind=kind, status=status)
        if dry_run:
            done.jobs = await pruning.count_old(database, ended)
            return
        interrupted = on_interrupt("what is deleted stays deleted")
        total = await _count(database, ended) if shows_progress else 0
        since, limit = None, FIRST_LIMIT
        refused_rows = RefusedRows(database, worker_id=None, tell=_print_refused)
        done.jobs = done.entries = 0
        if status is None and kind is None:
            kept = await pruning.prune_workflows(database, before)
            done.kept_workflows = len(kept)
            _print_refused_workflows(kept)
        with progress_bar("deleted", total) as advance:
            while not interrupted.is_set():
                began = time.monotonic()
                try:
                    batch = await pruning.prune(
                        database, ended, since=since, limit=limit, refused_rows=refused_rows
                    )
                except DatabaseTimeout:
                    if limit == 1:
                        raise
                    limit = max(limit // 4, 1)
                    await database.end_given_up()
                    continue
                done.jobs += batch.jobs
                done.entries += batch.events
                advance(batch.jobs)
                if batch.is_last:
                    break
                since = batch.last
                limit = pruning.next_limit(limit, seconds=time.monotonic() - began)
        if status is None and kind is None and not interrupted.is_set():
            done.actions = await prune_actions(database)
        done.kept = len(await refused_rows.among("prune"))
    if interrupted.is_set():
        raise asyncio.CancelledError


async def _count(database: Database, ended: Ended) -> int | None:
    """Return how many jobs are to be deleted, for the progress bar; None if counting takes too long."""
    try:
        return await pruning.count_old(database, ended)
    except DatabaseTimeout:
        await database.end_given_up()
        return None


def _print_refused(row: RefusedRow) -> None:
    _print_kept(f"job {row.job_id}", row.jobs, row.sqlstate, row.constraint)


def _print_refused_workflows(refused: Refused[UUID]) -> None:
    by_reason: defaultdict[tuple[str | None, str | None], list[UUID]] = defaultdict(list)
    for workflow, error in refused:
        by_reason[error.sqlstate, error.constraint].append(workflow)
    for reason, workflows in by_reason.items():
        _print_kept(f"workflow {workflows[0]}", len(workflows), *reason)


def _print_kept(first: str, number: int, sqlstate: str | None, constraint: str | None) -> None:
    others = f" and {number - 1:,} others" if number > 1 else ""
    named = "" if constraint is None else f", constraint {printable(constraint, 200)}"
    remark(f"{first}{others} kept: PostgreSQL refuses to delete, SQLSTATE {sqlstate}{named}")
