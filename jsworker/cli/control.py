"""``jsworker retry``, ``cancel`` and ``clear``: what an operator may do to jobs.

They need only the database: workers publish what they queue again, within their relay interval.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import Annotated
from uuid import UUID

import typer

from jsworker.cli.connection import connected_database
from jsworker.cli.failures import WrongUsage
from jsworker.cli.options import (
    JobIds,
    Json,
    NoProgressFor,
    OnlyKind,
    OnlyStatus,
    RunningFor,
    StaleFor,
    Yes,
    new_app,
)
from jsworker.cli.outcomes import Outcome, OutcomeReport, changed, refused
from jsworker.cli.selection import (
    Filter,
    Found,
    Selection,
    check_choice,
    choose_age,
    choose_statuses,
    select,
    since_found,
)
from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.run_age import RunAge
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions import control, reset
from jsworker.ownership.transitions.reset import Reset

_BATCH = 500
_TRIES = 3
_TRY_AGAIN_SECONDS = 0.05
_LONGEST_REASON = 1000
_LIVE = ("scheduled", "queued", "processing")
_FILTERS_OF_RUNS = "--status/--kind/--stale-for/--running-for/--no-progress-for"

Action = Callable[[Database, Found], AsyncIterator[Outcome]]

app = new_app()


@app.command()
def retry(
    ids: JobIds = None,
    *,
    status: OnlyStatus = None,
    kind: OnlyKind = None,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Put failed jobs back into the queue, their counters at zero.

    Name jobs by their ids, or choose them by --status failed or --kind. Only failed jobs can be retried: a
    cancelled job is final, so enqueue it again.
    """
    wanted = Filter(choose_statuses("retry", status, ("failed",)), kind)
    filtered = status is not None or kind is not None
    check_choice("retry", ids, filtered=filtered, filters="--status/--kind", yes=yes)
    return _perform("retry", _retry, select("retry", ids, wanted, yes=yes), as_json=as_json)


@app.command()
def cancel(
    ids: JobIds = None,
    *,
    status: OnlyStatus = None,
    kind: OnlyKind = None,
    stale_for: StaleFor = None,
    running_for: RunningFor = None,
    no_progress_for: NoProgressFor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Cancel jobs: waiting ones at once, running ones are asked to stop.

    Name jobs by their ids, or choose them by --status or --kind, running ones also by their age. A running
    job learns of it with its worker's next heartbeat, and is cancelled when its run has ended.
    """
    age = choose_age(stale_for, running_for, no_progress_for)
    wanted = Filter(choose_statuses("cancel", status, _LIVE, age), kind, age)
    filtered = status is not None or kind is not None or bool(age)
    check_choice("cancel", ids, filtered=filtered, filters=_FILTERS_OF_RUNS, yes=yes)
    selection = select("cancel", ids, wanted, yes=yes)
    action = partial(_cancel, statuses=wanted.statuses if filtered else None, age=age)
    return _perform("cancel", action, selection, as_json=as_json)


@app.command()
def clear(
    ids: JobIds = None,
    *,
    reason: Annotated[
        str, typer.Option(help="Why; the next run is told as job.clear_reason.", show_default=False)
    ],
    status: OnlyStatus = None,
    kind: OnlyKind = None,
    stale_for: StaleFor = None,
    running_for: RunningFor = None,
    no_progress_for: NoProgressFor = None,
    yes: Yes = False,
    as_json: Json = False,
) -> int:
    """Take running jobs from their workers and put them back into the queue.

    Name jobs by their ids, or choose them by --kind or by their age. A job that hangs while its worker lives
    has heartbeats: --no-progress-for or --running-for find it, --stale-for does not. This run of a job does
    not count as an attempt; whatever its former worker still does, its result is refused.
    """
    if not (reason.strip() and len(reason) <= _LONGEST_REASON and reason.isprintable()):
        raise WrongUsage(f"--reason must be 1 to {_LONGEST_REASON} printable characters")
    age = choose_age(stale_for, running_for, no_progress_for)
    filtered = status is not None or kind is not None or bool(age)
    wanted = Filter(choose_statuses("clear", status, ("processing",), age), kind, age)
    check_choice("clear", ids, filtered=filtered, filters=_FILTERS_OF_RUNS, yes=yes)
    selection = select("clear", ids, wanted, yes=yes)
    action = partial(_clear, reason=reason, age=age)
    return _perform("clear", action, selection, as_json=as_json)


def _perform(call: str, action: Action, selection: Selection, *, as_json: bool) -> int:
    with OutcomeReport(as_json=as_json) as report:
        if selection.named or selection.wanted:
            with operators_rights(call):
                asyncio.run(_act(action, selection, report))
    return report.exit_code


async def _act(action: Action, selection: Selection, report: OutcomeReport) -> None:
    async with connected_database() as database:
        async for found in selection.pages(database):
            for start in range(0, len(found), _BATCH):
                async for outcome in action(database, found[start : start + _BATCH]):
                    report.add(outcome)


async def _retry(database: Database, found: Found) -> AsyncIterator[Outcome]:
    for job_id, _ in found:
        try:
            await control.retry(database, job_id)
        except TransitionRefused as error:
            yield refused(job_id, str(error))
        else:
            yield Outcome(job_id, "queued")


async def _cancel(
    database: Database, found: Found, *, statuses: Sequence[str] | None, age: RunAge
) -> AsyncIterator[Outcome]:
    """Cancel jobs by their ids, or those of them that are still of one of these statuses, and so old."""
    left = refused if statuses is None else changed
    done = await control.cancel(database, [job_id for job_id, _ in found], statuses=statuses, age=age)
    for job_id, _ in found:
        if job_id in done.final:
            yield left(job_id, f"job {job_id} is {done.final[job_id]} already; nothing is left to cancel")
        elif age and done.other.get(job_id) == "processing":
            yield left(job_id, f"job {job_id}: {since_found(age)}, or it has been claimed anew")
        elif job_id in done.other:
            yield left(job_id, f"job {job_id} is {done.other[job_id]} by now")
        elif job_id in done.unknown:
            yield refused(job_id, f"no job has id {job_id}")
        elif job_id in done.refused:
            yield refused(job_id, f"job {job_id} cannot be cancelled: {done.refused[job_id]}")
        else:
            yield Outcome(job_id, "cancelled" if job_id in done.cancelled else "cancel_requested")


async def _clear(database: Database, found: Found, *, reason: str, age: RunAge) -> AsyncIterator[Outcome]:
    seen = await listing.look_up(database, [job_id for job_id, _ in found])
    refusals = {each.id: each for each in _unclearable(found, seen)}
    running = [(job_id, seen[job_id].fencing_token) for job_id, _ in found if job_id not in refusals]
    taken, bad = await _take_back(database, running, reason, age)
    for job_id, _ in found:
        if job_id in refusals:
            yield refusals[job_id]
        elif job_id in taken:
            yield Outcome(job_id, taken[job_id].status)
        elif job_id in bad:
            yield refused(job_id, f"job {job_id} cannot be cleared: {bad[job_id]}")
        else:
            left = changed if age else refused
            yield left(job_id, f"job {job_id}: {since_found(age)}, or it is being written right now")


def _unclearable(found: Found, seen: dict[UUID, listing.SeenJob]) -> Iterator[Outcome]:
    for job_id, token in found:
        job = seen.get(job_id)
        left = refused if token is None else changed
        if job is None:
            yield refused(job_id, f"no job has id {job_id}")
        elif job.status != "processing":
            yield left(job_id, f"job {job_id} is {job.status}; only a running job can be cleared")
        elif token not in (None, job.fencing_token):
            yield left(job_id, f"job {job_id} has been claimed anew since it was found")


async def _take_back(
    database: Database, running: list[tuple[UUID, int]], reason: str, age: RunAge
) -> tuple[dict[UUID, Reset], dict[UUID, str]]:
    """Reset running jobs; a row that a heartbeat has locked for the moment is tried again.

    Returns:
        The jobs that were reset, and those whose row PostgreSQL refused to update, with its reason.
    """
    taken: dict[UUID, Reset] = {}
    bad: dict[UUID, str] = {}
    for pause in (0.0, *[_TRY_AGAIN_SECONDS] * (_TRIES - 1)):
        left = [(job_id, token) for job_id, token in running if job_id not in taken and job_id not in bad]
        if not left:
            break
        await asyncio.sleep(pause)
        found = await reset.reset_by_operator(database, seen=left, reason=reason, age=age)
        taken |= {each.id: each for each in found.resets}
        bad |= {job_id: str(error) for job_id, error in found.refused.items()}
    return taken, bad
