"""Overview: what waits, runs and fails, of each kind, and who works on it."""

from collections.abc import Mapping
from typing import Any, Final

from jsworker.dashboard.visit import Visit
from jsworker.ownership.queries.status import BOUND, read_status

_KINDS: Final = 100


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return the state of the first kinds, and of all workers."""
    status = await read_status(visit.site.reads, limit=_KINDS, after=visit.get("after"))
    return {"status": status, "bound": BOUND}
