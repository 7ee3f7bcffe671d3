"""The stacks of a run or a worker at this moment: the worker is asked over NATS."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from starlette.exceptions import HTTPException

from jsworker.client.worker_stacks import NoStack, ask_for_stack, stack_lines
from jsworker.core.names import printable
from jsworker.dashboard.filters import duration
from jsworker.dashboard.visit import Visit, WrongFilter
from jsworker.ownership.queries import listing
from jsworker.ownership.transitions.workers import get_worker

_LONGEST_ID: Final = 200
RIGHT: Final = "workers"
"""The right that the viewer needs: a worker is asked, and paths of the code are shown."""


async def read_worker(visit: Visit) -> Mapping[str, Any]:
    """Return the stacks of a worker."""
    worker_id = visit.get("worker")
    if worker_id is None:
        raise WrongFilter("a worker is needed")
    return await _read(visit, worker_id, None)


async def read_job(visit: Visit) -> Mapping[str, Any]:
    """Return the stack of a job's run."""
    job_id: UUID = visit.path["id"]
    found = await listing.get_job_shown(visit.site.reads, job_id, contents=False)
    if found["status"] != "processing":
        why = f"The job is {found['status']}: only one that runs has a stack."
        return {"job": job_id, "worker": found["completed_by"], "lines": [], "why": why}
    return await _read(visit, found["worker_id"], job_id)


async def _read(visit: Visit, worker_id: str, job_id: UUID | None) -> Mapping[str, Any]:
    if not visit.may(RIGHT):
        raise HTTPException(403, f"you may not do this: {RIGHT}")
    worker = await get_worker(visit.site.reads, worker_id)
    if worker is None and job_id is None:
        why = f"no worker has id {printable(worker_id, _LONGEST_ID)}"
        return {"job": None, "worker": worker_id, "lines": [], "why": why}
    seen = None if worker is None else str(duration(visit.site.clock.now() - worker["last_seen_at"]))
    lines, why = list[str](), ""
    try:
        settings = visit.site.client.settings
        lines = stack_lines(await ask_for_stack(settings, worker_id, job_id, seen=seen))
    except NoStack as error:
        why = str(error)
    return {"job": job_id, "worker": worker_id, "lines": lines, "why": why}
