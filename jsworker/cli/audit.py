"""``jsworker audit``: who did what to jobs, kinds and schedules."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any
from uuid import UUID

from jsworker.cli.options import Json, Limit, new_app, option, whole_id
from jsworker.cli.output import folded, moment, print_json, print_table, remark, remark_next_page, right
from jsworker.cli.selection import ask_database
from jsworker.core.names import cell
from jsworker.ownership.transitions.audit import Action, list_actions

app = new_app()


@app.command()
def audit(
    *,
    limit: Limit = 50,
    after: Annotated[
        UUID | None,
        option("ID", "Continue the list after this action; --json shows its id.", parser=whole_id),
    ] = None,
    as_json: Json = False,
) -> None:
    """List who did what, the last action first: retries, cancellations, pauses, limits, schedules.

    WHO is what the command or the application said; by which login of the database it was done, --json shows.
    Entries are kept for 400 days; `jsworker prune` deletes older ones.

    Example: `jsworker audit --limit 10`
    """
    found = ask_database(partial(list_actions, limit=limit, after=after))
    if as_json:
        print_json(found)
    elif found:
        what = folded("WHAT", at_least=20)
        print_table(["AT", folded("WHO", at_least=12), "ACTION", right("CHANGED"), what], map(_row, found))
    else:
        remark("there are no entries; they are kept for 400 days")
    if len(found) == limit:
        remark_next_page(found[-1].action_id)


def _row(action: Action) -> list[str]:
    changed = str(action.changed)
    if action.matched > action.changed:
        changed += f" of {action.matched}"
    target = ", ".join(_words(action.target))
    return [moment(action.at), cell(action.actor), cell(action.action), changed, cell(target)]


def _words(target: Mapping[str, Any]) -> Iterator[str]:
    for name, value in target.items():
        if isinstance(value, Mapping):
            yield from _words(value)
        else:
            yield f"{name} {' '.join(map(str, value)) if isinstance(value, list) else value}"
