"""Actions on one job, several, or all that match: retry, cancel, take back, priority, reschedule."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast
from uuid import UUID

from starlette.datastructures import FormData

from jsworker.client.selected_jobs import (
    REASON_CHARACTERS,
    BulkOutcome,
    JobConditions,
    SelectedJobs,
    count_jobs,
)
from jsworker.client.terms import instant_of
from jsworker.core.names import printable, shown
from jsworker.core.priorities import PRIORITIES, priority_number
from jsworker.dashboard.filters import number, plural
from jsworker.dashboard.pages.jobs import NAMES, POSSIBLE, JobSearch, instant
from jsworker.dashboard.visit import Done, Question, Visit, WrongFilter, is_short_number
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.listing import SeenJob
from jsworker.ownership.schema import STATUSES
from jsworker.ownership.transitions import control, priorities, reset
from jsworker.ownership.transitions.audit import AuditEntry
from jsworker.ownership.transitions.priorities import Changed
from jsworker.ownership.transitions.reschedule import reschedule_all
from jsworker.ownership.transitions.schedules import database_now

_CLEARED: Final = (
    "Running jobs are taken from their workers and queued again; what their workers still write is refused."
    " These runs do not count as attempts."
)
VERBS: Final[Mapping[str, tuple[str, str, str]]] = {
    "retry": ("Retry", "retried", "Their counters are set to zero; completed steps are kept."),
    "cancel": (
        "Cancel",
        "cancelled",
        "Waiting jobs are cancelled at once; running ones are asked to stop with their next heartbeat.",
    ),
    "clear": ("Take back", "taken back", _CLEARED),
    "priority": ("Set the priority of", "moved", "Waiting jobs are moved; running jobs are not affected."),
    "reschedule": (
        "Reschedule",
        "rescheduled",
        "The due time of scheduled jobs is changed; with a time in the past, they start at once.",
    ),
}
"""The verb, the participle, and what will happen."""
_LATER: Final[Mapping[str, str]] = {"retry": "Jobs that end", "clear": "Runs that begin"}
"""What an action on all that match leaves alone, for actions on jobs that have begun."""
_MOST_NAMED: Final = 1_000
_LONGEST: Final = 100


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before jobs are acted on, with their number."""
    word, _, says = VERBS[verb]
    ids = _ids(visit, form)
    filters = [(name, str(form[name])) for name in NAMES if form.get(name)]
    if ids:
        values = [*filters, *(("id", str(each)) for each in ids)]  # the filters lead back to the list
        if verb in {"clear", "retry"}:  # a job that has run by the time of the answer is left alone
            seen = await listing.look_up(visit.site.reads, ids)
            values += [("seen", ":".join(map(str, each))) for each in seen.values()]
        jobs, is_all = len(ids), True
        which = f" This affects job {ids[0]}." if len(ids) == 1 else ""
    else:
        asked_at = (await database_now(visit.site.reads)).isoformat()
        values = [("all", "yes"), *filters, ("asked_at", asked_at)]
        jobs, is_all = 0, True
        later = _LATER.get(verb, "Jobs that are enqueued")
        which = f"{_in_words(filters)} {later} from now on are left alone."
        for selected in _selected(verb, visit, form):
            found = await count_jobs(visit.site.reads, selected.selection)
            jobs, is_all = jobs + found.jobs, is_all and found.is_all
    many = plural(jobs, "job") if is_all else f"at least {plural(jobs, 'job')}"
    return Question(
        verb=f"{word} {many}",
        says=says + which,
        values=values,
        back=_back(visit, form),
        fields=f"fields_{verb}.html" if verb in {"clear", "priority", "reschedule"} else None,
        names={
            "priorities": PRIORITIES,
            "longest": REASON_CHARACTERS,
            "given": {name: str(form.get(name) or "") for name in ("reason", "to", "run_at")},
        },
        is_harmful=verb in {"cancel", "clear"},
        is_possible=jobs > 0 or not is_all,
    )


def _in_words(filters: Sequence[tuple[str, str]]) -> str:
    words = [
        "one kind of error" if name == "failure" else f"{name.replace('_', ' ')} {printable(value, _LONGEST)}"
        for name, value in filters
    ]
    return (
        f" This affects all jobs with {', '.join(words)}."
        if words
        else " This affects all jobs to which it applies."
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done:
    """Act on jobs, and say how many were changed."""
    ids = _ids(visit, form)
    if ids:
        outcomes = [await _act_on(visit, verb, ids, form)]
    else:
        how = _how(verb, form)
        outcomes = [
            await _ACTS[verb](selected, *(() if how is None else (how,)), actor=visit.access.name)
            for selected in _selected(verb, visit, form)
        ]
    changed, requested = sum(each.changed for each in outcomes), sum(each.requested for each in outcomes)
    says = f"{plural(changed - requested, 'job')} {VERBS[verb][1]}"
    if requested:
        says += f", {number(requested)} asked to stop"
    left = sum(each.matched for each in outcomes) - changed
    why = [reason for each in outcomes for reason in each.refused.values()]
    return Done.of_several(says, left, why, _back(visit, form))


_ACTS: Final[Mapping[str, Callable[..., Awaitable[BulkOutcome]]]] = {
    "retry": SelectedJobs.retry,
    "cancel": SelectedJobs.cancel,
    "clear": SelectedJobs.clear,
    "priority": SelectedJobs.set_priority,
    "reschedule": SelectedJobs.reschedule,
}


async def _act_on(visit: Visit, verb: str, ids: Sequence[UUID], form: FormData) -> BulkOutcome:
    """Act on jobs that are named by their ids, with one entry in the audit."""
    how = _how(verb, form)
    client, database = visit.site.client, visit.site.client.database
    action = "set_priority" if verb == "priority" else verb
    entry = AuditEntry.of_jobs(action, ids, actor=visit.access.name, **_for_audit(verb, how))
    match verb:
        case "retry":
            then, now = _seen(form), await listing.look_up(database, list(ids))
            left = {
                each: f"job {each} is {now[each].status}, and was acted on or has run since you were asked"
                for each in ids
                if each in now and then.get(each, now[each]) != now[each]
            }
            retried = await control.retry_all(
                database, [each for each in ids if each not in left], entry=entry
            )
            done = Changed(retried.changed, retried.refused | left)
        case "priority":
            done = await priorities.set_priorities(database, ids, priority_number(how), entry=entry)
        case "reschedule":
            done = await reschedule_all(database, ids, how, entry=entry)
        case "cancel":
            cancelled = await control.cancel(database, ids, entry=entry)
            ended = {each: f"job {each} is {status} already" for each, status in cancelled.final.items()}
            unknown = {each: f"job {each} does not exist" for each in cancelled.unknown}
            changed = [*cancelled.cancelled, *cancelled.requested]
            refused = cancelled.refused | ended | unknown
            done = Changed(changed, refused, requested=len(cancelled.requested))
        case _:
            then, now = _seen(form), await listing.look_up(database, list(ids))
            running = [
                (each.id, then.get(each.id, each).fencing_token)
                for each in now.values()
                if each.status == "processing"
            ]
            taken = await reset.reset_by_operator(database, seen=running, reason=how, entry=entry)
            resets = {each.id for each in taken.resets}
            why = {
                each: f"job {each} cannot be taken back: {taken.refused[each]}"
                if each in taken.refused
                else f"job {each} does not run, or has begun another run"
                for each in ids
                if each not in resets
            }
            done = Changed([*resets], why)
    await entry.end(database, matched=len(ids))
    client.publisher.publish_in_background()  # of others more may wait than a browser does
    outcome = BulkOutcome(entry.action_id, matched=len(ids))
    outcome.add(done)
    return outcome


def _for_audit(verb: str, how: Any) -> dict[str, str]:
    """Return how an action was to be done, under the names that ``SelectedJobs`` gives it in the audit."""
    if how is None:
        return {}
    return {"reason": how} if verb == "clear" else {"to": how.isoformat() if verb == "reschedule" else how}


def _ids(visit: Visit, form: FormData) -> list[UUID]:
    """Return the ids of jobs in the address or the form; empty: all jobs that match the filters are meant."""
    if "id" in visit.path:
        return [visit.path["id"]]
    if form.get("all"):
        return []
    given = [str(each) for each in form.getlist("id")][:_MOST_NAMED]
    if not given:
        raise WrongFilter("no job was chosen: tick some, or all that match")
    try:
        return list(dict.fromkeys(map(UUID, given)))
    except ValueError:
        raise WrongFilter("a job's id must be a UUID") from None


def _seen(form: FormData) -> dict[UUID, SeenJob]:
    """Return the jobs as they were when the question was asked."""
    found: dict[UUID, SeenJob] = {}
    for given in map(str, form.getlist("seen")):
        job_id, _, rest = given.partition(":")
        status, _, token = rest.partition(":")
        wrong = WrongFilter(f"seen={shown(given)} must be ID:STATUS:NUMBER")
        if status not in STATUSES or not is_short_number(token):
            raise wrong
        try:
            found[UUID(job_id)] = SeenJob(UUID(job_id), status, int(token))
        except ValueError:
            raise wrong from None
    return found


def _selected(verb: str, visit: Visit, form: FormData) -> list[SelectedJobs]:
    given = {name: str(form.get(name) or "") for name in NAMES}
    search = JobSearch.of(given, payloads=visit.access.payloads)
    statuses = [each for each in POSSIBLE[verb] if search.status in (None, each)]
    if verb == "retry" and search.status is None:
        statuses = ["failed"]  # a cancelled job is not wanted any more
    if not statuses:
        raise WrongFilter(
            f"status={search.status}: {verb} acts on jobs that are {' or '.join(POSSIBLE[verb])}"
        )
    where, asked_at = search.where, instant("asked_at", str(form.get("asked_at") or ""))
    if asked_at is not None:  # more jobs may match by the time of the answer than the question has counted
        where = replace(where, until=min(asked_at, where.until or asked_at))
        if verb in _LATER:  # and jobs that have run since are left alone
            where = replace(where, changed_before=asked_at)
    conditions = cast("JobConditions", where.values())
    try:
        return [
            visit.site.client.select(status=status, kind=search.kind, priority=search.priority, **conditions)
            for status in statuses
        ]
    except ValueError as error:
        raise WrongFilter(str(error)) from None


def _how(verb: str, form: FormData) -> Any:
    """Return the further input of the form: a reason, a priority or a time; None: the action needs none."""
    try:
        match verb:
            case "clear":
                reason = printable(str(form.get("reason") or "").strip(), REASON_CHARACTERS)
                if not reason:
                    raise WrongFilter("a reason is needed: the next run of the job finds it")
                return reason
            case "priority":
                name = str(form.get("to") or "")
                priority_number(name)
                return name
            case "reschedule":
                found = instant("run_at", str(form.get("run_at") or ""))
                if found is None:
                    raise WrongFilter("a time is needed")
                return instant_of("run_at", found)
    except ValueError as error:
        raise WrongFilter(str(error)) from None
    return None


def _back(visit: Visit, form: FormData) -> str:
    if "id" in visit.path:
        return visit.url("job", id=visit.path["id"])
    return visit.url("jobs", {name: form.get(name) or None for name in NAMES})
