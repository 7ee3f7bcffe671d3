"""Workers by host: the jobs of each, and its last heartbeat; drain one, and let it claim jobs again."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.core.names import printable
from jsworker.dashboard.visit import Done, Question, Visit, WrongFilter, needed
from jsworker.ownership.transitions.workers import get_worker, list_workers, state_in_words

VERBS: Final = ("drain", "undrain")
_PAGE: Final = 200
_LONGEST_ID: Final = 200


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of workers by host, the host of the last heartbeat first."""
    found = await list_workers(visit.site.reads, limit=_PAGE, after=visit.get("after"))
    hosts: dict[str, list[dict[str, Any]]] = {}
    for worker in found:
        worker["shown_state"] = state_in_words(worker)
        worker["busy"] = min(worker["processing"], worker["concurrency"])
        worker["ahead"] = max(worker["processing"] - worker["concurrency"], 0)
        hosts.setdefault(worker["hostname"], []).append(worker)
    for workers in hosts.values():  # workers of one supervisor together
        workers.sort(key=lambda each: each["supervisor_pid"] or 0)
    versions = {each["version"] for each in found if each["alive"]}
    after = found[-1]["id"] if len(found) == _PAGE else None
    return {"hosts": hosts, "after": after, "versions": sorted(versions)}


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before a worker is drained, or claims jobs again."""
    worker_id = needed(form, "worker", "a worker")
    named = printable(worker_id, _LONGEST_ID)
    worker = await get_worker(visit.site.reads, worker_id)
    if worker is None:
        raise WrongFilter(f"no worker has id {named}")
    says = "It claims jobs again after its next heartbeat."
    if verb == "drain":
        runs = min(worker["processing"], worker["concurrency"])
        ahead = worker["processing"] - runs
        says = (
            "It claims no more jobs until it is undrained, or its process is restarted."
            f" Running jobs that continue: {runs}; jobs claimed ahead that are handed back: {ahead}."
        )
    return Question(
        verb=f"{verb.capitalize()} worker {named}",
        says=says if worker["state"] != "stopped" else "It has stopped.",
        values=[("worker", worker_id)],
        back=visit.url("workers"),
        is_harmful=verb == "drain",
        is_possible=worker["state"] != "stopped",
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done:
    """Drain a worker, or let it claim jobs again."""
    worker_id, actor = needed(form, "worker", "a worker"), visit.access.name
    named = f"worker {printable(worker_id, _LONGEST_ID)}"
    if verb == "drain":
        await visit.site.client.drain_worker(worker_id, actor=actor)
        return Done(f"{named} is to be drained", visit.url("workers"))
    await visit.site.client.undrain_worker(worker_id, actor=actor)
    return Done(f"{named} claims jobs again", visit.url("workers"))
