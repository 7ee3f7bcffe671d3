"""Workers: who is there, what each holds, and when it was last heard of; those of a host stand together."""

from collections.abc import Mapping
from typing import Any, Final

from jsworker.dashboard.visit import Visit
from jsworker.ownership.transitions.workers import list_workers, state_in_words

_PAGE: Final = 200


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of workers by host, the host that was heard of last first."""
    found = await list_workers(visit.site.reads, limit=_PAGE, after=visit.get("after"))
    hosts: dict[str, list[dict[str, Any]]] = {}
    for worker in found:
        worker["shown_state"] = state_in_words(worker)
        worker["busy"] = min(worker["processing"], worker["concurrency"])
        worker["ahead"] = max(worker["processing"] - worker["concurrency"], 0)
        hosts.setdefault(worker["hostname"], []).append(worker)
    for workers in hosts.values():  # those of a supervisor together
        workers.sort(key=lambda each: each["supervisor_pid"] or 0)
    versions = {each["version"] for each in found if each["alive"]}
    after = found[-1]["id"] if len(found) == _PAGE else None
    return {"hosts": hosts, "after": after, "versions": sorted(versions)}
