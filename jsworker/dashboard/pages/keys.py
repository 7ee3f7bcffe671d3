"""Keys: limits, rates and pauses of each limit key, with the jobs that run and wait under it."""

from collections.abc import Mapping
from typing import Any, Final

from jsworker.core.names import shown
from jsworker.dashboard.visit import Visit, WrongFilter
from jsworker.ownership.transitions.limits import list_limits

_PAGE: Final = 100


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of limit keys, the kinds themselves among them; of one kind, if it is given."""
    kind, everything = visit.get("kind"), visit.get("all") == "yes"
    every = await list_limits(visit.site.reads, all_keys=everything)
    found = [each for each in every if kind in (None, each["kind"])]
    start, after = 0, visit.get("after")
    if after is not None:
        names = [f"{each['kind']}:{each['key']}" for each in found]
        if after not in names:
            raise WrongFilter(f"after={shown(after)}: there is no such key")
        start = names.index(after) + 1
    page = found[start : start + _PAGE]
    last = f"{page[-1]['kind']}:{page[-1]['key']}" if start + _PAGE < len(found) else None
    return {"limits": page, "after": last, "kind": kind, "everything": everything}
