"""Keys: limits, rates and pauses of each limit key, with the jobs that run and wait under it."""

from collections.abc import Mapping
from typing import Any, Final

from jsworker.core.names import is_kind, shown
from jsworker.dashboard.visit import Visit, WrongFilter
from jsworker.ownership.transitions.limits import list_limits

_PAGE: Final = 100


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of limit keys, and of the limits of kinds themselves; of one kind, if it is given."""
    kind, everything = visit.get("kind"), visit.get("all") == "yes"
    found = await list_limits(
        visit.site.reads, all_keys=everything, kind=kind, after=_place(visit.get("after")), limit=_PAGE + 1
    )
    page = found[:_PAGE]
    last = f"{page[-1]['kind']}:{page[-1]['key']}" if len(found) > _PAGE else None
    # A kind's own row is followed by those of its keys, also where the page ends between them.
    keyed = {each["kind"] for each in found if each["key"]}
    return {"limits": page, "keyed": keyed, "after": last, "kind": kind, "everything": everything}


def _place(after: str | None) -> tuple[str, str]:
    if after is None:
        return "", ""
    kind, colon, key = after.partition(":")
    if not (colon and is_kind(kind)):
        raise WrongFilter(f"after={shown(after)} must be a kind and a key, with a colon between them")
    return kind, key
