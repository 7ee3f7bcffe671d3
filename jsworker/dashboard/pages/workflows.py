"""Workflows: a list, and a page for one with its graph and its nodes' progress; cancel and retry."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.dashboard.filters import error_shown, plural
from jsworker.dashboard.visit import Done, Question, Visit, uuid_of
from jsworker.dashboard.workflow_picture import in_words, workflow_picture
from jsworker.ownership.queries.workflow_listing import get_workflow, list_workflows

_PAGE: Final = 50
VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "cancel": (
        "Cancel",
        "Waiting jobs are cancelled at once; running ones are asked to stop with their next heartbeat.",
    ),
    "retry": (
        "Retry",
        "Failed jobs go back into the queue; what was cancelled because they failed waits for them again.",
    ),
}
"""The verb, and what will happen."""


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of workflows, the newest first."""
    behind = uuid_of(visit.get("after"), "after must be the id of a workflow")
    found = await list_workflows(visit.site.reads, limit=_PAGE, after=behind)
    return {"workflows": found, "after": found[-1]["id"] if len(found) == _PAGE else None}


async def read_one(visit: Visit) -> Mapping[str, Any]:
    """Return a workflow with its nodes and its picture."""
    found = await get_workflow(visit.site.reads, visit.path["id"])
    nodes = [node | {"words": in_words(node["jobs"])} for node in found["nodes"]]
    links = {
        node["name"]: visit.url("workflow", id=found["id"]) + f"#node-{place}"
        for place, node in enumerate(nodes)
    }
    is_open = found["finished_at"] is None
    may_retry = found["cancelled_at"] is None and any(node["jobs"].get("failed") for node in nodes)
    may_see = visit.access.payloads
    errors = [
        {**each, "last_error": error_shown(each["last_error"], payloads=may_see)} for each in found["errors"]
    ]
    return {
        "workflow": found,
        "nodes": nodes,
        "errors": errors,
        "picture": workflow_picture(nodes, links),
        "acts": [verb for verb, can in (("cancel", is_open), ("retry", may_retry)) if can],
    }


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before a workflow is cancelled or retried, with the number of jobs it affects."""
    del form
    word, says = VERBS[verb]
    found = await get_workflow(visit.site.reads, visit.path["id"])
    meant = {"cancel": ("processing", "queued", "scheduled", "held"), "retry": ("failed",)}[verb]
    jobs = sum(node["jobs"].get(status, 0) for node in found["nodes"] for status in meant)
    is_cancelled = verb == "retry" and found["cancelled_at"] is not None
    return Question(
        verb=f"{word} {plural(jobs, 'job')} of the workflow",
        says="The workflow was cancelled: its jobs cannot be retried." if is_cancelled else says,
        values=[],
        back=visit.url("workflow", id=found["id"]),
        is_harmful=verb == "cancel",
        is_possible=jobs > 0 and not is_cancelled,
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done:
    """Cancel or retry a workflow."""
    del form
    workflow, workflows, actor = visit.path["id"], visit.site.client.workflows, visit.access.name
    if verb == "cancel":
        done = await workflows.cancel(workflow, actor=actor)
        says = f"{plural(done.cancelled, 'job')} cancelled, {done.requested} asked to stop"
    else:
        says = f"{plural(await workflows.retry(workflow, actor=actor), 'job')} retried"
    return Done(says, visit.url("workflow", id=workflow))
