"""A job: its state, its owner, its timeline and its contents."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from jsworker.client.job_info import JobDetails, JobEvent
from jsworker.core.contents import is_encoded_value
from jsworker.dashboard.filters import as_json, error_shown
from jsworker.dashboard.pages.jobs import acts_on, is_due
from jsworker.dashboard.timeline_picture import timeline_picture, timeline_table
from jsworker.dashboard.timeline_story import is_silent, job_story
from jsworker.dashboard.visit import Visit
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.status import service_of
from jsworker.ownership.queries.workflow_listing import place_of
from jsworker.ownership.transitions.child_jobs import noted_child_jobs
from jsworker.ownership.transitions.steps import steps_of

_LONGEST: Final = 64 * 1024
_MOST_ERRORS: Final = 10
_TRACE: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Content:
    """A value of a job as it is shown: its text, and why it is hidden or cut."""

    name: str
    text: str = ""
    hidden: str = ""


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return everything about a job that the viewer may see."""
    reads, job_id = visit.site.reads, UUID(str(visit.path["id"]))
    payloads = visit.access.payloads
    row = await listing.get_job_shown(reads, job_id, contents=payloads)
    row = {**row, "last_error": error_shown(row["last_error"], payloads=payloads)}
    events = [
        JobEvent.of_row(event if payloads else _without_texts(event))
        for event in await listing.timeline(reads, job_id)
    ]
    job = JobDetails.of_row(row)
    now = visit.site.clock.now()
    every = visit.site.client.settings.heartbeat_interval
    story = job_story(job, events, now, heartbeat_interval=every)
    steps = await steps_of(reads, job_id)
    noted = [
        each for event in events if event.event == "child_jobs" for each in noted_child_jobs(event.detail)
    ]
    node = None if row["batch_id"] is None else await place_of(reads, row["batch_id"])
    return {
        "job": job,
        "acts": [name for name in acts_on(row["status"]) if visit.may(name)],
        "picture": timeline_picture(story),
        "table": timeline_table(story),
        "other_errors": other_errors(events, row["last_error"]) if payloads else [],
        "steps": [
            {**step, "shown": content("result", step["result"], payloads=payloads, indent=None)}
            for step in steps
        ],
        "contents": list(contents(row, payloads=payloads)),
        "node": node,
        "service": await service_of(reads, row["kind"]) if is_due(row, now) else None,
        "is_silent": job.status == "processing" and is_silent(row["last_activity_at"], now, every),
        "children": await listing.look_up(reads, noted) if noted else {},
        "trace": trace_id(row["traceparent"]),
    }


def _without_texts(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of the timeline without the processor's texts: errors, and reasons to snooze."""
    shown = {**event, "error": error_shown(event["error"], payloads=False)}
    if event["event"] == "snoozed":
        # The reason is the processor's own text, as the message of an error is.
        detail = event["detail"] if isinstance(event["detail"], dict) else {}
        shown["detail"] = {**detail, "reason": "you may not see why"}
    return shown


def other_errors(events: Sequence[JobEvent], last_error: str | None) -> list[JobEvent]:
    """Return the last entries with an error, the newest first; without the entry of the job's last error."""
    found = [each for each in reversed(events) if each.error]
    # An error after the completion is a later one, but not the job's.
    last = next((each for each in found if each.error == last_error), None)
    return [each for each in found if each is not last][:_MOST_ERRORS]


def contents(row: Mapping[str, Any], *, payloads: bool) -> Iterator[Content]:
    """Yield what a job holds, each as ``content`` does; what is too large was not read."""
    for name in listing.CONTENTS:
        size = row[f"{name}_bytes"]
        if payloads and size is not None and size > listing.SHOWN_BYTES:
            how = f"`jsworker job {row['id']} --json` shows it"
            yield Content(name, hidden=f"of {size:,} bytes, too large to be shown here; {how}")
        elif row[name] is not None or (size is not None and not payloads):
            yield content(name, row[name], payloads=payloads)


def content(name: str, value: Any, *, payloads: bool, indent: int | None = 2) -> Content:
    """Return what may be shown of a stored value; an encoded value is never shown."""
    if is_encoded_value(value):
        return Content(name, hidden="encrypted")
    if not payloads:
        return Content(name, hidden="you may not see what jobs hold")
    try:
        text, is_cut = as_json(value, indent, most=_LONGEST)
    except RecursionError:
        return Content(name, hidden="nested too deeply to be shown")
    return Content(name, text, hidden=f"cut after {_LONGEST:,} characters" if is_cut else "")


def trace_id(traceparent: str | None) -> str | None:
    """Return the id of the trace in which a job was enqueued; None: there is none."""
    found = _TRACE.fullmatch(traceparent or "")
    return found[1] if found else None
