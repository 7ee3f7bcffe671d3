"""``jsworker workflow``: how far workflows are, as a tree; cancel and retry them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Final

from rich.table import Column
from rich.text import Text
from rich.tree import Tree

from jsworker.cli.client_call import ask_client
from jsworker.cli.interruption import on_interrupt, run_in_batches
from jsworker.cli.options import Group, Json, JsonObject, Limit, argument, new_app, option
from jsworker.cli.output import (
    console,
    folded,
    moment,
    print_json,
    print_line,
    print_table,
    remark,
    remark_next_page,
    right,
    seconds_in_words,
    since,
)
from jsworker.cli.selection import connected_database
from jsworker.client.workflows import workflow_uuid
from jsworker.core.names import cell, headline
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.workflow_control import CancelledWorkflow, cancelling_workflow

_BAR_CELLS: Final = 20
_COLUMNS_PER_LEVEL: Final = 12
"""A level is indented by four columns: nodes keep at least two thirds of the terminal."""
_WIDE: Final = 80
"""On a narrower terminal the name has a line of its own."""
_ENDED: Final = ("completed", "failed", "cancelled")
_COLOURS: Final = {"completed": "green", "failed": "red", "cancelled": "yellow", "running": "cyan"}


class _Group(Group):
    """Takes a first argument that is no command for the id of a workflow to show."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands:
            args = ["show", *args]
        return super().resolve_command(ctx, args)


app = new_app(cls=_Group, no_args_is_help=True)

Id = Annotated[str, argument("ID", "The workflow's id.")]


@app.callback()
def _workflow() -> None:
    """Show a workflow as a tree (`jsworker workflow ID`), list, cancel or retry workflows.

    Producers enqueue them: `JobClient.workflow`.
    """


@app.command("list")
def list_workflows(
    *,
    limit: Limit = 50,
    after: Annotated[str | None, option("ID", "Continue the list after this workflow.")] = None,
    as_json: Json = False,
) -> None:
    """List workflows, the newest first.

    Example: `jsworker workflow list --limit 10`
    """
    found = ask_client(lambda client: client.workflows.list(limit=limit, after=after))
    if as_json:
        print_json(found)
        return
    if console().width < _WIDE:
        for workflow_id, name, *state, _, _ in map(_row, found):
            console().print(Text("\n    ").join([Text("  ".join([workflow_id, *state])), Text(name)]))
    else:
        names, nodes = folded("NAME"), right("NODES")
        columns: list[str | Column] = ["ID", names, "STATUS", nodes, "ENQUEUED", "FINISHED"]
        print_table(columns, map(_row, found), spare=("FINISHED", "ENQUEUED"))
    if len(found) == limit:
        remark_next_page(found[-1]["id"])
    if not found:
        remark("there are no workflows")


def _row(workflow: Mapping[str, Any]) -> list[str]:
    return [
        str(workflow["id"]),
        cell(workflow["name"]),
        cell(workflow["status"]),
        f"{workflow['nodes_finished']} of {workflow['nodes']}",
        moment(workflow["created_at"]),
        moment(workflow["finished_at"]),
    ]


@app.command()
def show(workflow: Id, *, as_json: JsonObject = False) -> None:
    """Show a workflow: its nodes with their progress, each below the last one that it comes after.

    Example: `jsworker workflow 01a2074f-a6fa-739d-acb3-4f19a2de76ad`
    """
    found = ask_client(lambda client: client.workflows.get(workflow))
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(_tree(found, deepest=out.width // _COLUMNS_PER_LEVEL))
    for error in found["errors"]:
        line = f"{cell(error['node'])}: job {error['id']} failed: {headline(error['last_error'])}"
        out.print(Text(line, "red"))


@app.command()
def cancel(workflow: Id, *, as_json: JsonObject = False) -> None:
    """Cancel the live jobs of a workflow; running jobs are asked to stop.

    Ctrl-C ends it after the present batch of jobs; workers cancel those that are left.

    Example: `jsworker workflow cancel 01a2074f-a6fa-739d-acb3-4f19a2de76ad`
    """
    wanted = workflow_uuid(workflow)
    entry = AuditEntry("workflow.cancel", {"workflow": str(wanted)}, actor=os_user())
    done: CancelledWorkflow | None = None

    async def cancel_it() -> None:
        nonlocal done
        async with connected_database() as database:
            interrupted = on_interrupt("workers cancel the jobs that are left")
            async with aclosing(cancelling_workflow(database, wanted, entry=entry)) as steps:
                async for so_far in steps:
                    done = so_far
                    if interrupted.is_set():
                        raise asyncio.CancelledError

    try:
        with operators_rights("workflow cancel", "UPDATE on jsworker.workflows"):
            run_in_batches(cancel_it())
    finally:  # what was done is reported, whatever came after it
        if done is not None and as_json:
            print_json(done._asdict())
        elif done is not None:
            print_line(f"cancelled {done.cancelled}, asked {done.requested} running to stop")


@app.command()
def retry(workflow: Id, *, as_json: JsonObject = False) -> None:
    """Put a workflow's failed jobs back into the queue; jobs cancelled because of them wait again.

    Example: `jsworker workflow retry 01a2074f-a6fa-739d-acb3-4f19a2de76ad`
    """
    retried = ask_client(lambda client: client.workflows.retry(workflow, actor=os_user()))
    if as_json:
        print_json({"retried": retried})
    else:
        print_line(f"retried {retried}")


def _tree(found: Mapping[str, Any], *, deepest: int) -> Tree:
    """Return a workflow as a tree of so many levels, in which each node stands once.

    On the deepest level nodes stand below each other, and name what they come after.
    """
    status = str(found["status"])
    ended = f"took {_took(found)}" if found["finished_at"] else f"since {since(found['created_at'])}"
    by = {"failed": ", cancelled by an operator", "cancelled": " by an operator"}.get(status, "")
    by = by if found["cancelled_at"] else ""
    head = Text.assemble(
        (cell(found["name"]), "bold"),
        f" {found['id']} ",
        (status, _COLOURS.get(status, "yellow")),
        f"{by}, {ended}",
    )
    root = Tree(head)
    below: dict[str, tuple[Tree, int]] = {}
    for node in _in_order(found["nodes"]):
        needs: Sequence[str] = node["needs"]
        # Rows that other programs have written may form a circle, or need a node of another workflow.
        parent, level = below.get(needs[-1], (root, 0)) if needs else (root, 0)
        branch = parent.add(_node(node, names_needs=len(needs) > 1 or level >= deepest))
        below[node["name"]] = (branch, level + 1) if level < deepest else (parent, level)
    return root


def _in_order(nodes: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield each node after the nodes that it needs, which may come later in ``nodes``."""
    waiting, done = list(nodes), set[str]()
    while waiting:
        ready = [node for node in waiting if done.issuperset(node["needs"])] or waiting[:1]
        for node in ready:
            waiting.remove(node)
            done.add(node["name"])
            yield node


def _node(node: Mapping[str, Any], *, names_needs: bool) -> Text:
    jobs: Mapping[str, int] = node["jobs"]
    ended, total = sum(jobs.get(status, 0) for status in _ENDED), sum(jobs.values())
    ends = [status for status in _ENDED if jobs.get(status)]
    full = _BAR_CELLS if not total else ended * _BAR_CELLS // total
    state = node["outcome"] or ("waiting" if jobs.get("held") and not ended else "running")
    colour = _COLOURS.get(state, "")
    parts: list[Any] = [(cell(node["name"]), "bold")]
    if node["kind"] != node["name"]:
        parts.append(f" ({cell(node['kind'])})")
    parts += [
        " ",
        ("━" * full, colour),
        ("─" * (_BAR_CELLS - full), "dim"),
        f" {ended}/{total}",
    ]
    if len(ends) <= 1 or not node["outcome"]:
        parts.append((f" {state}", colour))
    of_note = ends if node["outcome"] else ("processing", "failed", "cancelled")
    others = [f"{jobs[status]} {status}" for status in of_note if jobs.get(status)]
    if others and (len(ends) > 1 or not node["outcome"]):
        parts.append(f" ({', '.join(others)})")
    if names_needs and node["needs"]:
        parts.append((f", after {', '.join(map(cell, node['needs']))}", "dim"))
    return Text.assemble(*parts)


def _took(found: Mapping[str, Any]) -> str:
    return seconds_in_words((found["finished_at"] - found["created_at"]).total_seconds())
