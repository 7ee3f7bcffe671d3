"""Failures: failed jobs in groups of like errors: how many, since when, and how often lately."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from jsworker.core.names import is_kind, shown
from jsworker.dashboard.filters import error_shown
from jsworker.dashboard.visit import Visit, WrongFilter, uuid_of
from jsworker.ownership.queries.failures import FailureId, list_failures

_LIMIT: Final = 50


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return groups of failed jobs, of all kinds or of one."""
    kind = visit.get("kind")
    if kind is not None and not is_kind(kind):
        raise WrongFilter(f"kind={shown(kind)} can be no kind's name")
    after_kind, after = visit.get("after_kind"), visit.get("after")
    behind = uuid_of(after, f"after={shown(after)} must be a UUID")
    place = FailureId(after_kind, behind) if after_kind and behind else None
    page = await list_failures(visit.site.reads, kind=kind, after=place, limit=_LIMIT)
    may_see = visit.access.payloads
    groups = [replace(each, error=error_shown(each.error, payloads=may_see)) for each in page.groups]
    return {"groups": groups, "after": page.after, "kind": kind}
