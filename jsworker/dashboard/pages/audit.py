"""Audit: who did what, when, and to how many."""

import json
from collections.abc import Mapping
from typing import Any, Final

from jsworker.dashboard.visit import Visit, uuid_of
from jsworker.ownership.transitions.audit import list_actions

_PAGE: Final = 50
_NAMED: Final = 3


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of actions, the last one first."""
    behind = uuid_of(visit.get("after"), "after must be the id of an action")
    found = await list_actions(visit.site.reads, limit=_PAGE, after=behind)
    targets = {each.action_id: in_words(each.target) for each in found}
    last = found[-1].action_id if len(found) == _PAGE else None
    return {"actions": found, "targets": targets, "after": last}


def in_words(target: Any) -> str:
    """Return the target of an action in one line."""
    if not isinstance(target, dict):
        return json.dumps(target, ensure_ascii=False)
    return ", ".join(f"{name} {_value(value)}" for name, value in target.items())


def _value(value: Any) -> str:
    match value:
        case [*ids] | {"ids": [*ids]}:
            few = ", ".join(map(str, ids[:_NAMED]))
            count = value.get("of", len(ids)) if isinstance(value, dict) else len(ids)
            return few if len(ids) <= _NAMED else f"{few}, of {count}"
        case dict():
            given = {name: each if isinstance(each, list) else [each] for name, each in value.items()}
            return ", ".join(
                f"{name}={' or '.join(map(str, some))}" for name, some in given.items() if some != [None]
            )
    return str(value)
