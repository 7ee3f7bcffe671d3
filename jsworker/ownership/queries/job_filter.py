"""Which jobs somebody means who names none: the words of filters, for listings and for what acts on all that match."""

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from jsworker.core.names import shown
from jsworker.core.priorities import PRIORITIES
from jsworker.core.strict_json import plain
from jsworker.ownership.predicates import ANY_AGE, RunAge

_TEXTS: Final = ("error", "key", "worker", "unique_key")
_LONGEST: Final = 1000

# Asked of rows that a page has read, and no condition of it: one that few rows fulfil would let a statement read all.
IS_MEANT: Final = """(
  (CAST(:error AS text) IS NULL OR coalesce(position(lower(CAST(:error AS text)) IN lower(j.last_error)) > 0, false))
  AND (CAST(:key AS text) IS NULL OR coalesce(j.limit_key = :key, false))
  AND (CAST(:worker AS text) IS NULL OR coalesce(:worker IN (j.worker_id, j.completed_by), false))
  AND (CAST(:unique_key AS text) IS NULL OR coalesce(:unique_key IN (j.unique_key, j.waiting_key), false))
  AND (CAST(:priority AS smallint) IS NULL OR j.priority = CAST(:priority AS smallint))
  AND (CAST(:since AS timestamptz) IS NULL OR j.created_at >= CAST(:since AS timestamptz))
  AND (CAST(:until AS timestamptz) IS NULL OR j.created_at < CAST(:until AS timestamptz))
  AND (CAST(:changed_before AS timestamptz) IS NULL
    OR coalesce(coalesce(j.finished_at, j.claimed_at) < CAST(:changed_before AS timestamptz), false)))"""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Selects jobs: those that meet every condition that is not None.

    Attributes:
        error: their last error holds this text, in capitals or not.
        key: their limit key.
        worker: the worker that runs them, or has completed them.
        unique_key: their unique key, whether of live or waiting jobs.
        since, until: they were enqueued then or later, and before; with time zones.
        failure: the group of failures that they belong to, of the kind that is asked for with it.
        changed_before: if they run, they were claimed before this time, and if they have ended, they ended
            before it; jobs that wait do not match.

    Raises:
        ValueError: a text is empty or too long, or a time has no time zone.
    """

    error: str | None = None
    key: str | None = None
    worker: str | None = None
    unique_key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    failure: UUID | None = None
    changed_before: datetime | None = None

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value = getattr(self, name)
            if value is not None and not (value.strip() and len(value) <= _LONGEST and "\0" not in value):
                raise ValueError(f"{name}={shown(value)} must be a text of 1 to {_LONGEST} characters")
        for name in ("since", "until", "changed_before"):
            value = getattr(self, name)
            if value is not None and value.tzinfo is None:
                raise ValueError(f"{name}={value} must have a time zone")

    def values(self) -> dict[str, Any]:
        """Return the parameters of ``IS_MEANT`` but the priority, and that of a group of failures."""
        return asdict(self)


ANY_JOB: Final = JobFilter()
"""Selects every job."""


@dataclass(frozen=True, slots=True)
class Selection:
    """All jobs that match.

    Attributes:
        statuses: they are of one of these.
        kind, priority: they are of this kind, of this priority, by its number; None: of any.
        age: if they run, they are so old.
        where: what else they have in common.

    Raises:
        ValueError: a group of failures is meant, but no kind or other statuses than failed.
    """

    statuses: tuple[str, ...]
    kind: str | None = None
    priority: int | None = None
    age: RunAge = ANY_AGE
    where: JobFilter = ANY_JOB

    def __post_init__(self) -> None:
        if self.where.failure is not None and (self.kind is None or self.statuses != ("failed",)):
            raise ValueError(f"failure={self.where.failure} needs its kind, and goes with failed jobs alone")

    def as_dict(self) -> dict[str, Any]:
        """Return what is asked for, for JSON."""
        priority = None if self.priority is None else PRIORITIES[self.priority]
        asked: dict[str, Any] = {"kind": self.kind, "priority": priority, "status": list(self.statuses)}
        asked |= {**asdict(self.age), **asdict(self.where)}
        return {name: plain(value) for name, value in asked.items() if value is not None}

    def for_audit(self) -> dict[str, Any]:
        """Return what is asked for, but not which text in errors: it may be what only some may read."""
        asked = self.as_dict()
        return asked | ({"error": "not recorded"} if "error" in asked else {})
