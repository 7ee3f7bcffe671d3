"""``jsworker jobs`` lists jobs; ``jsworker job ID`` shows everything about one, its timeline in words."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from jsworker.cli import options
from jsworker.cli.options import argument, flag
from jsworker.cli.output import (
    console,
    folded,
    moment,
    new_table,
    print_json,
    print_line,
    print_table,
    remark,
    remark_next_page,
    right,
    seconds_in_words,
    since,
    until,
)
from jsworker.cli.selection import ask_database, choose_age, choose_moment, choose_statuses, find_job
from jsworker.cli.watching import watch as show_again
from jsworker.client.job_timeline import CANCELLATIONS, entry_lines, readable, run_line, seconds_taken
from jsworker.core.contents import key_of_content
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import cell, check_kind, headline, printable, short_id
from jsworker.core.priorities import PRIORITIES, priority_number
from jsworker.core.strict_json import plain
from jsworker.core.tracebacks import from_users_code, last_place
from jsworker.ownership.database import Database
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import JobFilter
from jsworker.ownership.queries.listing import Page
from jsworker.ownership.queries.status import Service, service_of, services_of
from jsworker.ownership.queries.workflow_listing import place_of
from jsworker.ownership.schema import STATUSES
from jsworker.ownership.transitions.refused_rows import Mark, marks_of
from jsworker.ownership.transitions.steps import steps_of

_Services = Mapping[str, Service]
"""Whether the jobs of a kind can begin, by the kinds of queued jobs."""

_SEARCH_SECONDS: Final = 2.0
_LONGEST_VALUE: Final = 100_000
_MOST_LINES: Final = 200
"""Of a value in a table: laying out a line takes its time."""
_LONGEST_RESULT: Final = 200
_WIDE: Final = 110
"""Least columns of a terminal on which a job takes one line."""

_COLOURS: Final = {
    "scheduled": "blue",
    "queued": "yellow",
    "processing": "cyan",
    "completed": "green",
    "failed": "red",
    "cancelled": "magenta",
}

_WAITS_FOR: Final = {
    "limit": "held by limit{key}",
    "rate": "held by rate{key}",
    "paused": "paused{key}",
    "needs": "waits for the jobs that it needs",
}
"""What a held job waits for."""

_FAILURES: Final = {
    "attempts": "no attempt is left",
    "stalled": "it stalled too often",
    "permanent": "the processor said so",
    "payload": "its payload does not fit its processor",
    "result": "its result cannot be stored",
    "snoozes": "it was snoozed too often",
}

app = options.new_app()


@app.command()
def jobs(
    *,
    status: options.OnlyStatus = None,
    kind: options.OnlyKind = None,
    stale_for: options.StaleFor = None,
    running_for: options.RunningFor = None,
    no_progress_for: options.NoProgressFor = None,
    limit: options.Limit = 50,
    after: options.After = None,
    priority: options.OnlyPriority = None,
    error: options.OnlyError = None,
    key: options.OnlyKey = None,
    worker: options.OnlyWorker = None,
    unique_key: options.OnlyUniqueKey = None,
    since: options.Since = None,
    until: options.Until = None,
    watch: options.Watch = False,
    interval: options.Interval = 2.0,
    as_json: options.Json = False,
) -> None:
    """List jobs, the newest first; scheduled jobs by due time, queued ones the last queued first.

    Running jobs that are chosen by their age come the oldest first: by the time since their last progress,
    since their claim, or since the last heartbeat of their worker.

    Completed jobs, and those that --error, --key, --worker, --unique-key, --since or
    --until choose are searched for from the newest on, for two seconds at most.
    --after goes on where that ended, as it does behind the last job of a list.

    TRY is attempts/max_attempts, AGE the time since the job was enqueued. `jsworker job ID` shows a job with
    its payload, its result and all that happened to it.

    Example: `jsworker jobs --status failed --kind count-words`
    """
    if kind is not None:
        check_kind(kind)
    age = choose_age(stale_for, running_for, no_progress_for)
    choose_statuses("jobs", status, STATUSES, age)
    lane = None if priority is None else priority_number(priority)
    first = None if since is None else choose_moment("since", since)
    last = None if until is None else choose_moment("until", until)
    try:
        where = JobFilter(error, key, worker, unique_key, first, last)
    except ValueError as refused:
        name, _, rule = str(refused).partition("=")
        raise WrongUsage(f"--{name.replace('_', '-')} {rule}") from None
    ask = partial(
        _page, status=status, kind=kind, age=age, priority=lane, limit=limit, after=after, where=where
    )
    if watch:
        show_again(ask, _table, interval=interval, as_json=as_json)
        return
    found = ask_database(ask)
    page = found[0]
    if as_json:
        print_json(page.jobs)
    else:
        console().print(_table(found))
        if not page.jobs:
            remark(f"no jobs{'' if kind is None else f' of kind {kind}'} were found")
    is_full = as_json and len(page.jobs) == limit  # then the caller continues after the id of the last job
    if page.after is not None and not is_full:
        remark_next_page(page.after)
    if page.leaves_out_kinds:
        remark(
            f"only the first {listing.MOST_KINDS} kinds are listed; add --kind KIND for another:"
            " `jsworker status --limit 1000` names all"
        )


def _table(found: tuple[Page, _Services]) -> RenderableType:
    page, services = found
    rows = (_row(job, services) for job in page.jobs)
    if console().width < _WIDE:
        return Group(*(line for row in rows for line in _two_lines(row)))
    ids, kinds = Column("ID", no_wrap=True, min_width=36), folded("KIND")
    statuses, details = Column("STATUS", no_wrap=True, min_width=10), folded("DETAIL", at_least=12)
    return new_table([ids, kinds, statuses, "TRY", right("AGE"), details], rows)


def _two_lines(row: Iterable[Text | str]) -> Iterator[Text]:
    """Yield the lines of a job for a narrow terminal: its details are on a line of their own."""
    job_id, kind, status, tries, age, detail = map(_text, row)
    yield Text("  ").join([job_id, kind, status, Text(f"try {tries}, {age} ago")])
    if detail:
        yield Text.assemble("    ", detail)


def _text(value: Text | str) -> Text:
    return value if isinstance(value, Text) else Text(value)


async def _page(database: Database, **filters: Any) -> tuple[Page, _Services]:
    page = await listing.list_jobs(database, seconds=_SEARCH_SECONDS, **filters)
    marks = await marks_of(database, [job["id"] for job in page.jobs])
    services = await services_of(database, {job["kind"] for job in page.jobs if job["status"] == "queued"})
    jobs = [_in_terms(job) | {"refused": marks.get(job["id"], [])} for job in page.jobs]
    return replace(page, jobs=jobs), services


def _in_terms(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's row with its priority as a word, as a client gives it."""
    return {**row, "priority": PRIORITIES[row["priority"]]}


def _row(job: Mapping[str, Any], services: _Services) -> list[Text | str]:
    most = job["max_attempts"]
    details = [*map(_refusal, job["refused"]), _lane(job), *_detail(job, services)]
    return [
        str(job["id"]),
        cell(job["kind"]),
        Text(job["status"], _COLOURS[job["status"]]),
        f"{job['attempts']}/{'-' if most is None else most}",
        since(job["created_at"]),
        Text(", ".join(filter(None, details))),
    ]


def _lane(job: Mapping[str, Any]) -> str:
    """Return a job's priority in words; empty if it is normal, or if the job has ended."""
    is_usual = job["priority"] == "normal" or job["finished_at"] is not None
    return "" if is_usual else f"{job['priority']} priority"


def _refusal(mark: Mark) -> str:
    constraint = "" if mark.constraint_name is None else f" {cell(mark.constraint_name)}"
    return f"PostgreSQL refuses to {mark.attempted}: SQLSTATE {mark.sqlstate}{constraint}"


def _detail(job: Mapping[str, Any], services: _Services) -> Iterator[str]:
    match job["status"]:
        case "scheduled" if job["held_by"] is not None:
            yield f"{_held(job)} for {since(job['held_at'])}"
            yield headline(job["last_error"])
        case "scheduled":
            behind = job["behind"]
            yield (
                f"due in {until(job['run_at'])}"
                if behind is None
                else f"behind {short_id(behind)}, of its key"
            )
            yield _returned(job) or headline(job["last_error"])
            yield _expiry(job)
        case "queued":
            yield _why_not_taken(services[job["kind"]])
            yield _returned(job) or _expiry(job)
        case "cancelled":
            yield cell(job["failure_reason"])
        case "processing":
            yield cell(job["worker_id"])
            yield f"running for {since(job['claimed_at'])}, heartbeat {since(job['last_activity_at'])} ago"
            if job["progress_at"] is not None and job["progress_at"] >= job["claimed_at"]:
                yield f"progress {since(job['progress_at'])} ago"
            yield from _progress(job)
            if job["cancel_requested"]:
                yield "asked to stop"
        case "completed":
            if (took := seconds_taken(job)) is not None:
                yield f"took {seconds_in_words(took)}" if took >= 1 else f"took {took * 1000:.0f}ms"
        case "failed":
            yield ": ".join(filter(None, (cell(job["failure_reason"]), headline(job["last_error"]))))


def _held(job: Mapping[str, Any]) -> str:
    key = f" of {cell(job['limit_key'])}" if job["limit_key"] else ""
    return _WAITS_FOR.get(job["held_by"], f"held by {cell(job['held_by'])}").replace("{key}", key)


def _returned(job: Mapping[str, Any]) -> str:
    """Return why a job came back from its last run; the row does not tell if it was taken or handed back."""
    return f"returned: {headline(job['clear_reason'])}" if job["cleared"] else ""


def _expiry(job: Mapping[str, Any]) -> str:
    """Return in how long a job expires; empty if it has no such time, or has been claimed once."""
    if job["expires_at"] is None or job["fencing_token"]:
        return ""
    return f"expires in {until(job['expires_at'])}"


def _progress(job: Mapping[str, Any]) -> Iterator[str]:
    share = None if job["progress"] is None else f"{job['progress']:.0%}"
    yield " ".join(filter(None, (cell(job["stage"]), share)))
    yield cell(job["message"])


@app.command()
def job(
    job_id: Annotated[str, argument("ID", "The job's id, or its last eight digits.")],
    *,
    all_columns: Annotated[bool, flag("Show every column that is set.", "--all")] = False,
    traceback: Annotated[bool, flag("Show the last error's traceback.", "--traceback")] = False,
    full_traceback: Annotated[
        bool, flag("The same, from jsworker's own frames on.", "--full-traceback")
    ] = False,
    stack: options.Stack = False,
    as_json: options.Json = False,
) -> None:
    """Show one job: its state and why, its error, payload and result; then its runs and its timeline.

    There is a line for each run, numbered by its fencing token, then one for each step. The timeline holds
    what is out of the ordinary: claims after the first one, errors, resets, late writes that were refused,
    retries, cancellations; of a long one, the last 1,000 entries and their runs. With --json, the object has
    every column, the timeline under "timeline", the steps under "steps" (without results that take more than
    16 KiB), and under "refused" what PostgreSQL refuses to do with the job's row. A job that is named by its
    last digits is looked for among the newest.

    --stack asks the worker that runs it over NATS, with the login of a worker, and shows instead at which
    places of your code its run is at this moment: the coroutine that waits, and the tasks that it waits for,
    or the thread of a plain function.

    Example: `jsworker job 19f2de76 --traceback`
    """
    if stack:
        from jsworker.cli.workers import show_run  # noqa: PLC0415 -- only this needs NATS

        show_run(job_id, as_json=as_json)
        return
    found, service = ask_database(partial(_job, named=job_id))
    is_cut = len(found["timeline"]) >= listing.MOST_EVENTS
    if is_cut and not (traceback or full_traceback):
        remark(f"the timeline may have earlier entries: these are the last {listing.MOST_EVENTS:,}")
    if as_json:
        print_json(found)
        return
    timeline = list(map(readable, found.pop("timeline")))
    refused, steps = found.pop("refused"), found.pop("steps")
    if traceback or full_traceback:
        error = found["last_error"] or "there was no error"
        print_line(_lines(error if full_traceback else from_users_code(error)))
        return
    grid = Table.grid(Column(style="bold", no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, value in _every_column(found) if all_columns else _summary(found, service):
        grid.add_row(name, value)
    console().print(grid)
    for mark in refused:
        again = f"first {since(mark.first_at)} ago, tries: {mark.tries}, again in {until(mark.retry_at)}"
        print_line(f"\n{_refusal(mark)}; {again}")
    if runs := int(found["fencing_token"]):
        print_line("")
        shown = (each["fencing_token"] for each in timeline if each["fencing_token"])
        first = min(shown, default=runs) if is_cut else 1
        for token in range(first, runs + 1):
            print_line(run_line(token, found, timeline))
    if steps:
        print_line("")
        print_table(["STEP", right("RUN"), "AT", folded("RESULT", at_least=20)], map(_step, steps))
    if timeline:
        print_line("")
        rows = [
            (moment(each["at"], milliseconds=True), cell(each["fencing_token"]), line)
            for each, line in zip(timeline, entry_lines(timeline, zone=None), strict=True)
        ]
        print_table(["AT", right("RUN"), folded("WHAT HAPPENED", at_least=20)], rows)


async def _job(database: Database, named: str) -> tuple[dict[str, Any], Service | None]:
    """Return a job, and, while it is queued, whether jobs of its kind can begin."""
    found = _in_terms(await find_job(database, named))
    marks = await marks_of(database, [found["id"]])
    timeline = await listing.timeline(database, found["id"])
    if found["batch_id"] is not None:
        found["workflow"] = await place_of(database, found["batch_id"])
    steps = await steps_of(database, found["id"])
    service = await service_of(database, found["kind"]) if found["status"] == "queued" else None
    return found | {"refused": marks.get(found["id"], []), "steps": steps, "timeline": timeline}, service


def _step(step: Mapping[str, Any]) -> list[str]:
    if step["sleeps_until"] is not None:
        result = f"sleeps until {moment(step['sleeps_until'])}"
    elif step["result"] is None and step["stored_bytes"]:
        result = f"{step['stored_bytes']} bytes"
    else:
        key = key_of_content(step["result"])
        result = json.dumps(step["result"], ensure_ascii=False) if key is None else f"encrypted: {key}"
    at = moment(step["at"], milliseconds=True)
    return [cell(step["name"]), cell(step["fencing_token"]), at, printable(result, _LONGEST_RESULT)]


def _summary(found: Mapping[str, Any], service: Service | None) -> Iterator[tuple[str, Text]]:
    """Yield the facts of a job that matter first: kind, status and why, worker, error, counters, contents."""
    yield "job", Text(f"{cell(found['kind'])} {found['id']}")
    yield "status", Text(f"{found['status']}: {_status_line(found, service)}", _COLOURS[found["status"]])
    if found["status"] == "processing":
        heard = since(found["last_activity_at"])
        yield "worker", Text(f"{cell(found['worker_id'])}, last heartbeat {heard} ago")
    if progress := ", ".join(filter(None, _progress(found))):
        yield "progress", Text(progress)
    if found["last_error"]:
        place = last_place(found["last_error"])
        error = headline(found["last_error"]) + (f" at {cell(place)}" if place else "")
        yield "error", Text(error, "red" if found["status"] == "failed" else "")
    most = "" if found["max_attempts"] is None else f" of {found['max_attempts']}"
    stalls = "" if found["max_stalls"] is None else f" of {found['max_stalls']}"
    counts = f"errors: {found['errors']}, stalls: {found['stalls']}{stalls}"
    yield "attempts", Text(f"{found['attempts']}{most}; {counts}")
    yield "enqueued", Text(f"{moment(found['created_at'])}, {since(found['created_at'])} ago")
    if found["finished_at"] is not None:
        yield "finished", Text(f"{moment(found['finished_at'])}, {since(found['finished_at'])} ago")
    if (flow := found.get("workflow")) is not None:
        yield "workflow", Text(f"{cell(flow['name'])} {flow['workflow']}, node {cell(flow['node'])}")
    if found["priority"] != "normal":
        yield "priority", Text(found["priority"])
    if (key := found["unique_key"] or found["waiting_key"]) is not None:
        scope = "" if found["waiting_key"] is None else " (one may wait, one may run)"
        yield "unique key", Text(f"{cell(key)}{scope}")
    if found["limit_key"]:
        yield "limit key", Text(cell(found["limit_key"]))
    for name in ("payload", "checkpoint", "result"):
        if found[name] is not None:
            key = key_of_content(found[name])
            yield name, Text(_in_words(found[name]) if key is None else f"encrypted: {cell(key)}")


def _every_column(found: Mapping[str, Any]) -> Iterator[tuple[str, Text]]:
    for name, value in found.items():
        if value is not None:
            yield name, Text(_in_words(value), _COLOURS[value] if name == "status" else "")


def _status_line(found: Mapping[str, Any], service: Service | None) -> str:
    match found["status"]:
        case "scheduled":
            return _when(found)
        case "queued":
            not_taken = "" if service is None else _why_not_taken(service, found["kind"])
            waits = "waits" if not_taken else "waits for a free worker"
            waits = "its message waits to be published" if found["needs_publish"] else waits
            waits = f"{waits} since {since(found['queued_at'])}"
            return "; ".join(filter(None, (waits, not_taken, _returned(found), _expiry(found))))
        case "processing":
            asked = ", asked to stop" if found["cancel_requested"] else ""
            return f"runs since {since(found['claimed_at'])}{asked}"
        case "failed":
            reason = str(found["failure_reason"])
            return f"{_FAILURES.get(reason, cell(reason))}; `jsworker retry` puts it back into the queue"
        case "completed":
            return f"by {cell(found['completed_by'])}" if found["completed_by"] else "done"
        case _:
            why = str(found["failure_reason"])
            again = "" if why == "needs" else "; `jsworker retry` puts it back into the queue"
            return f"{CANCELLATIONS.get(why, 'on request')}{again}"


def _why_not_taken(service: Service, kind: str | None = None) -> str:
    """Return why no worker takes jobs of a kind, even if slots are free; empty if there is no such reason.

    Args:
        service: of the kind.
        kind: named in the cure, which the short form for a listing leaves out.
    """
    if service.paused_at is not None:
        cure = "" if kind is None else f" since {moment(service.paused_at)}: `jsworker resume {cell(kind)}`"
        return f"its kind is paused{cure}"
    return service.unserved


def _when(found: Mapping[str, Any]) -> str:
    if found["held_by"] is not None:
        later = f"; not before {moment(found['due_at'])}" if found["due_at"] is not None else ""
        waits = f"{_held(found)} for {since(found['held_at'])}{later}"
        return "; ".join(filter(None, (waits, _expiry(found))))
    begins = "runs again" if found["attempts"] or found["fencing_token"] else "due"
    if found["behind"] is not None:
        begins = f"waits for job {found['behind']} of its unique key; looked at again"
    due = f"{begins} in {until(found['run_at'])}, at {moment(found['run_at'])}"
    if found["debounce_until"] is not None and not found["fencing_token"]:
        due += f", moved back with each repetition, at the last until {moment(found['debounce_until'])}"
    return "; ".join(filter(None, (due, _returned(found), _expiry(found))))


def _in_words(value: Any) -> str:
    match value:
        case datetime():
            text = plain(value)
        case timedelta():
            text = f"{value.total_seconds():g} s"
        case bool() | dict() | list():
            text = json.dumps(value, ensure_ascii=False, indent=2)
        case _:
            text = str(value)
    shown = "\n".join(text[:_LONGEST_VALUE].split("\n", _MOST_LINES)[:_MOST_LINES])
    return _lines(shown) + ("" if shown == text else "\n... `--json` shows all")


def _lines(text: str) -> str:
    # Line by line: a traceback keeps its lines, and control characters do not reach the terminal.
    return "\n".join(printable(line, _LONGEST_VALUE) for line in text.split("\n"))
