"""``jsworker retry``, ``cancel`` and ``clear``: what an operator may do to jobs.

They need only the database: workers publish jobs that are queued again, within their relay interval.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated
from uuid import UUID

import typer

from jsworker.cli import options
from jsworker.cli.output import ActionOutcome, refused, remark, report
from jsworker.cli.selection import (
    age_options,
    check_choice,
    choose_age,
    choose_statuses,
    confirm,
    connected_database,
)
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import check_kind, shown
from jsworker.core.priorities import Priority, priority_number
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import ANY_AGE, RunAge
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import JobFilter, Selection
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions import control, reset
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.schedules import database_now

_BATCH = 500
_MOST_ASKED_FOR = 2_000
"""If a filter matches more jobs, the question does not count them, and they are searched for after it."""
_LONGEST_REASON = 1000
_FILTERS_OF_RUNS = "--status/--kind/--priority/--error/--stale-for/--running-for/--no-progress-for"

Found = Sequence[tuple[UUID, int | None]]
"""Jobs, each with the fencing token with which a filter found it; None: the job was named by its id."""

Action = Callable[[Database, Found, AuditEntry], AsyncIterator[ActionOutcome]]

app = options.new_app()


@app.command()
def retry(
    ids: options.JobIds = None,
    *,
    status: options.OnlyStatus = None,
    kind: options.OnlyKind = None,
    priority: options.OnlyPriority = None,
    error: options.OnlyError = None,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> int:
    """Put failed or cancelled jobs back into the queue, with their counters at zero.

    Name jobs by their ids, or choose failed ones by --kind or --error; cancelled ones are chosen by --status
    cancelled alone. All of them are queued at once, whatever time they were due at. What was cancelled
    because of what it needs waits again when that is retried.

    Example: `jsworker retry --kind count-words --error "connection refused"`
    """
    wanted = _filter("retry", ("failed", "cancelled"), status, kind, priority=priority, error=error)
    action = partial(_retry, statuses=wanted.statuses if wanted else None)
    return _perform("retry", action, ids, wanted, yes=yes, as_json=as_json)


@app.command()
def cancel(
    ids: options.JobIds = None,
    *,
    status: options.OnlyStatus = None,
    kind: options.OnlyKind = None,
    stale_for: options.StaleFor = None,
    running_for: options.RunningFor = None,
    no_progress_for: options.NoProgressFor = None,
    priority: options.OnlyPriority = None,
    error: options.OnlyError = None,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> int:
    """Cancel jobs: waiting ones at once, running ones are asked to stop.

    Name jobs by their ids, or choose them by --status or --kind, running ones also by their age. A running
    job learns of it with its worker's next heartbeat, and is cancelled when its run has ended.

    Example: `jsworker cancel --status queued --kind count-words`
    """
    age = choose_age(stale_for, running_for, no_progress_for)
    possible = ("scheduled", "queued", "processing")
    wanted = _filter("cancel", possible, status, kind, age, priority=priority, error=error)
    action = partial(_cancel, statuses=wanted.statuses if wanted else None, age=age)
    return _perform("cancel", action, ids, wanted, yes=yes, as_json=as_json)


@app.command()
def clear(
    ids: options.JobIds = None,
    *,
    reason: Annotated[
        str, typer.Option(help="Why; the next run finds it in job.clear_reason.", show_default=False)
    ],
    status: options.OnlyStatus = None,
    kind: options.OnlyKind = None,
    stale_for: options.StaleFor = None,
    running_for: options.RunningFor = None,
    no_progress_for: options.NoProgressFor = None,
    priority: options.OnlyPriority = None,
    error: options.OnlyError = None,
    yes: options.Yes = False,
    as_json: options.Json = False,
) -> int:
    """Take running jobs from their workers and put them back into the queue.

    Name jobs by their ids, or choose them by --kind or by their age. A job that hangs while its worker lives
    has heartbeats: --no-progress-for or --running-for find it, --stale-for does not. This run of a job does
    not count as an attempt; whatever its former worker still does, its result is refused.

    Example: `jsworker clear --no-progress-for 600 --reason "hangs in the download"`
    """
    if not (reason.strip() and len(reason) <= _LONGEST_REASON and reason.isprintable()):
        raise WrongUsage(f"--reason must be 1 to {_LONGEST_REASON} printable characters")
    age = choose_age(stale_for, running_for, no_progress_for)
    wanted = _filter("clear", ("processing",), status, kind, age, priority=priority, error=error)
    action = partial(_clear, reason=reason, age=age)
    return _perform("clear", action, ids, wanted, yes=yes, as_json=as_json, reason=reason)


def _in_words(wanted: Selection) -> str:
    asked = wanted.as_dict()
    asked |= {"status": " or ".join(wanted.statuses)}
    asked |= {"error": shown(asked["error"])} if "error" in asked else {}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asked.items())


def _filter(
    verb: str,
    possible: tuple[str, ...],
    status: str | None,
    kind: str | None,
    age: RunAge = ANY_AGE,
    *,
    priority: Priority | None = None,
    error: str | None = None,
) -> Selection | None:
    if kind is not None:
        check_kind(kind)
    try:
        where = JobFilter(error=error)
    except ValueError as refused_text:
        raise WrongUsage(f"--{refused_text}".replace("=", " ", 1)) from None
    statuses = choose_statuses(verb, status, possible, age)
    if verb == "retry" and status is None:
        statuses = ("failed",)  # a cancelled job is not wanted any more
    is_any = bool(status or kind or age or priority or error)
    lane = None if priority is None else priority_number(priority)
    return Selection(statuses, kind, lane, age, where) if is_any else None


def _perform(
    verb: str,
    action: Action,
    ids: list[UUID] | None,
    wanted: Selection | None,
    *,
    yes: bool,
    as_json: bool,
    **how: str,
) -> int:
    """Act on the named jobs, each once; if none is named, on those that match the filter."""
    filters = "--status/--kind/--priority/--error" if verb == "retry" else _FILTERS_OF_RUNS
    check_choice(verb, ids, filtered=wanted is not None, filters=filters, yes=yes)
    named = list(dict.fromkeys(ids or ()))
    known: Found = [(job_id, None) for job_id in named]
    if wanted is None:
        entry = AuditEntry.of_jobs(verb, named, actor=os_user(), **how)
    else:
        entry = AuditEntry(verb, {"jobs": wanted.for_audit(), **how}, actor=os_user())
    with operators_rights(verb):
        if wanted and not yes:
            known, wanted = _ask(verb, wanted)
        expected = None if wanted else len(known)
        return asyncio.run(report(_act(action, known, wanted, entry), as_json=as_json, expected=expected))


def _ask(verb: str, wanted: Selection) -> tuple[Found, Selection | None]:
    """Ask for confirmation, and return the jobs to act on, or the filter if it matches too many."""
    found, is_all, asked_at = asyncio.run(_look(wanted))
    if not found:
        remark(f"no job matches: {_in_words(wanted)}")
        return [], None
    jobs = "1 job" if len(found) == 1 else f"{len(found)} jobs"
    confirm(f"{verb} {jobs if is_all else f'at least {jobs}'} ({_in_words(wanted)})?")
    if is_all:
        return found, None
    # By the time of the answer more jobs may match: those that were enqueued, began to run or ended since.
    where = replace(wanted.where, until=asked_at)
    if verb in {"clear", "retry"}:
        where = replace(where, changed_before=asked_at)
    return [], replace(wanted, where=where)


async def _look(wanted: Selection) -> tuple[list[tuple[UUID, int]], bool, datetime]:
    """Return the jobs that match, whether these are all, and the time before they were looked for."""
    found: list[tuple[UUID, int]] = []
    async with connected_database() as database:
        asked_at = await database_now(database)
        async for page in listing.matching(database, wanted):
            found += page
            if len(found) > _MOST_ASKED_FOR:
                return found, False, asked_at
    return found, True, asked_at


async def _act(
    action: Action, known: Found, wanted: Selection | None, entry: AuditEntry
) -> AsyncGenerator[list[ActionOutcome], None]:
    matched = acted = 0
    async with connected_database() as database:
        try:
            async for page in _pages(database, known, wanted):
                matched += len(page)
                for start in range(0, len(page), _BATCH):
                    batch = action(database, page[start : start + _BATCH], entry)
                    outcomes = [outcome async for outcome in batch]
                    acted += len(outcomes)
                    yield outcomes
        except (asyncio.CancelledError, GeneratorExit):  # Ctrl-C; stdout cannot be written
            if wanted is None and acted == len(known):
                await entry.end(database, matched=matched)
            else:  # with a filter, others may match
                await entry.interrupt(database, matched=matched)
            raise
        if matched:
            await entry.end(database, matched=matched)


async def _pages(database: Database, known: Found, wanted: Selection | None) -> AsyncIterator[Found]:
    yield known
    if wanted is not None:
        any_found = False
        async for page in listing.matching(database, wanted, acting=True):
            any_found |= bool(page)
            yield page
        if not any_found:
            remark(f"no job matches: {_in_words(wanted)}")


async def _retry(
    database: Database, found: Found, entry: AuditEntry, *, statuses: Sequence[str] | None
) -> AsyncIterator[ActionOutcome]:
    """Retry these jobs; with ``statuses``, only those that still have one of them, and have not run since."""
    seen = {} if statuses is None else await listing.look_up(database, [job_id for job_id, _ in found])
    left = {
        job_id: why
        for job_id, token in found
        if job_id in seen and (why := _changed(seen[job_id], token, statuses or ()))
    }
    done = await control.retry_all(database, [each for each, _ in found if each not in left], entry=entry)
    for job_id, _ in found:
        if job_id in left:
            yield refused(job_id, left[job_id], has_changed=True)
        elif job_id in done.refused:
            yield refused(job_id, done.refused[job_id])
        else:
            yield ActionOutcome(job_id, "queued")


def _changed(job: listing.SeenJob, token: int | None, statuses: Sequence[str]) -> str | None:
    if job.status not in statuses:
        return f"job {job.id} is {job.status} by now"
    return None if token == job.fencing_token else f"job {job.id} has run again since it was found"


async def _cancel(
    database: Database, found: Found, entry: AuditEntry, *, statuses: Sequence[str] | None, age: RunAge
) -> AsyncIterator[ActionOutcome]:
    """Cancel these jobs; with ``statuses`` and ``age``, only those that still have such a status and age."""
    left = partial(refused, has_changed=statuses is not None)
    ids = [job_id for job_id, _ in found]
    done = await control.cancel(database, ids, statuses=statuses, age=age, entry=entry)
    for job_id, _ in found:
        if job_id in done.final:
            yield left(job_id, f"job {job_id} is {done.final[job_id]} already; nothing is left to cancel")
        elif age and done.other.get(job_id) == "processing":
            yield left(job_id, f"job {job_id}: {_since_found(age)}, or it has been claimed anew")
        elif job_id in done.other:
            yield left(job_id, f"job {job_id} is {done.other[job_id]} by now")
        elif job_id in done.unknown:
            yield refused(job_id, f"no job has id {job_id}")
        elif job_id in done.refused:
            yield refused(job_id, done.refused[job_id])
        else:
            yield ActionOutcome(job_id, "cancelled" if job_id in done.cancelled else "cancel_requested")


async def _clear(
    database: Database, found: Found, entry: AuditEntry, *, reason: str, age: RunAge
) -> AsyncIterator[ActionOutcome]:
    seen = await listing.look_up(database, [job_id for job_id, _ in found])
    refusals = {job_id: _unclearable(job_id, token, seen.get(job_id)) for job_id, token in found}
    left = [(job_id, seen[job_id].fencing_token) for job_id, why in refusals.items() if why is None]
    done = await reset.reset_by_operator(database, seen=left, reason=reason, age=age, entry=entry)
    taken = {each.id: each.status for each in done.resets}
    for job_id, token in found:
        if why := refusals[job_id]:
            yield refused(job_id, why, has_changed=token is not None)
        elif job_id in taken:
            yield ActionOutcome(job_id, taken[job_id])
        elif job_id in done.refused:
            yield refused(job_id, f"job {job_id} cannot be cleared: {done.refused[job_id]}")
        else:
            yield refused(job_id, f"job {job_id}: {_since_found(age)}", has_changed=bool(age))


def _unclearable(job_id: UUID, token: int | None, job: listing.SeenJob | None) -> str | None:
    if job is None:
        return f"no job has id {job_id}"
    if job.status != "processing":
        return f"job {job_id} is {job.status}; only a running job can be cleared"
    if token not in (None, job.fencing_token):
        return f"job {job_id} has been claimed anew since it was found"
    return None


def _since_found(age: RunAge) -> str:
    """Return what must have happened since a job was found, if ``age`` no longer applies to it."""
    signs = {"stale-for": "its worker gave a sign of life", "no-progress-for": "it has progressed"}
    seen = [signs[name] for name in age_options(age) if name in signs]
    return " or ".join(seen) or "its worker has just settled it"
