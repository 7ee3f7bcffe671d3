"""Jobs: a listing by the filters in the address, with actions on chosen jobs or on all that match."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self, cast
from uuid import UUID

from jsworker.client.job_info import JobStatus
from jsworker.core.names import is_kind, shown
from jsworker.core.priorities import PRIORITIES, Priority, priority_number
from jsworker.dashboard.filters import error_shown
from jsworker.dashboard.timeline_story import is_silent
from jsworker.dashboard.visit import Visit, WrongFilter, uuid_of
from jsworker.ownership.queries.job_filter import JobFilter
from jsworker.ownership.queries.listing import MOST_KINDS, list_jobs
from jsworker.ownership.queries.status import services_of
from jsworker.ownership.schema import STATUSES

_LIMIT: Final = 50
_MOST: Final = 100
_SEARCH_SECONDS: Final = 1.5
"""After this time a search shows what it has found; the next page continues the search."""
NAMES: Final = (
    *("status", "kind", "priority", "key", "worker", "unique_key"),
    *("error", "since", "until", "failure"),
)
"""Names of the filters in an address."""


@dataclass(frozen=True, slots=True)
class JobSearch:
    """Filters of jobs, from an address or a form.

    Attributes:
        status, kind, priority: only such jobs; None: any.
        where: the other conditions.
    """

    status: JobStatus | None
    kind: str | None
    priority: Priority | None
    where: JobFilter

    @classmethod
    def of(cls, given: Mapping[str, str | None], *, payloads: bool) -> Self:
        """Read filters; WrongFilter names one that makes no sense, or that the viewer may not use."""
        status, kind, priority = (given.get(name) or None for name in ("status", "kind", "priority"))
        if status is not None and status not in STATUSES:
            raise WrongFilter(f"status={shown(status)} must be one of {', '.join(STATUSES)}")
        if priority is not None and priority not in PRIORITIES:
            raise WrongFilter(f"priority={shown(priority)} must be one of {', '.join(PRIORITIES)}")
        if kind is not None and not is_kind(kind):
            raise WrongFilter(f"kind={shown(kind)} can be no kind's name")
        if given.get("error") and not payloads:
            raise WrongFilter("error: you may not see texts of errors, nor search in them")
        failure = given.get("failure")
        try:
            where = JobFilter(
                error=given.get("error") or None,
                key=given.get("key") or None,
                worker=given.get("worker") or None,
                unique_key=given.get("unique_key") or None,
                since=instant("since", given.get("since")),
                until=instant("until", given.get("until")),
                failure=uuid_of(failure, f"failure={shown(failure)} must be a UUID"),
            )
        except ValueError as error:
            raise WrongFilter(str(error)) from None
        return cls(cast("JobStatus | None", status), kind, priority, where)


def instant(name: str, given: str | None) -> datetime | None:
    """Return a time of a form, by default in UTC; None: none is given. WrongFilter: it is not a time."""
    if not given:
        return None
    try:
        found = datetime.fromisoformat(given)
    except ValueError:
        raise WrongFilter(
            f"{name}={shown(given)} must be a time as 2026-01-31T12:00, in UTC unless it says otherwise"
        ) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of the listing."""
    given = {name: visit.get(name) for name in NAMES}
    search = JobSearch.of(given, payloads=visit.access.payloads)
    limit = visit.number("limit", _LIMIT, most=_MOST)
    after = visit.get("after")
    try:
        page = await list_jobs(
            visit.site.reads,
            status=search.status,
            kind=search.kind,
            priority=None if search.priority is None else priority_number(search.priority),
            where=search.where,
            limit=limit,
            after=None if after is None else UUID(after),
            seconds=_SEARCH_SECONDS,
        )
    except ValueError as error:
        raise WrongFilter(f"after or failure: {error}") from None
    now, payloads = visit.site.clock.now(), visit.access.payloads
    every = visit.site.client.settings.heartbeat_interval
    due = {job["id"]: job["kind"] for job in page.jobs if is_due(job, now)}
    services = await services_of(visit.site.reads, set(due.values()))
    return {
        "jobs": [
            {
                **job,
                "last_error": error_shown(job["last_error"], payloads=payloads),
                "service": services[job["kind"]] if job["id"] in due else None,
                "is_silent": job["status"] == "processing" and is_silent(job["last_activity_at"], now, every),
            }
            for job in page.jobs
        ],
        "after": page.after,
        "kinds_listed": MOST_KINDS if page.leaves_out_kinds else None,
        "is_partial": page.after is not None and len(page.jobs) < limit,
        "given": given,
        "filters": sum(value is not None for name, value in given.items() if name != "status"),
        "statuses": STATUSES,
        "priorities": PRIORITIES,
        "acts": [name for name in acts_on(search.status) if visit.may(name)],
    }


def is_due(job: Mapping[str, Any], now: datetime) -> bool:
    """Return whether a job waits, and not only for its time."""
    if job["status"] == "scheduled" and job["held_by"] is None:
        return bool(job["run_at"] is not None and job["run_at"] <= now)
    return job["status"] in {"scheduled", "queued"}


def acts_on(status: str | None) -> list[str]:
    """Return the actions that are possible on jobs of a status; None: of any status."""
    return [name for name, possible in POSSIBLE.items() if status is None or status in possible]


POSSIBLE: Final[Mapping[str, tuple[JobStatus, ...]]] = {
    "retry": ("failed", "cancelled"),
    "cancel": ("scheduled", "queued", "processing"),
    "clear": ("processing",),
    "priority": ("scheduled", "queued"),
    "reschedule": ("scheduled",),
}
"""The statuses of jobs on which each action is possible."""
