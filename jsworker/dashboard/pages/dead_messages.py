"""Dead messages: those that no worker could use; replay or drop them."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.client import dead_messages
from jsworker.dashboard.filters import plural
from jsworker.dashboard.visit import Done, Question, Visit, WrongFilter
from jsworker.ownership.transitions.dead_messages import KEPT_MESSAGES, list_dead

_PAGE: Final = 100
_LONGEST_ID: Final = 18
VERBS: Final[Mapping[str, tuple[str, str, str]]] = {
    "replay": ("Replay", "replayed", "Each message is sent to its subject again, and removed from the list."),
    "drop": ("Drop", "dropped", "They are removed from the list. No job is lost: jobs are rows of a table."),
}
"""The verb, the participle, and what will happen."""


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return a page of dead messages, the newest first."""
    after = visit.get("after")
    found = await list_dead(visit.site.reads, limit=_PAGE, after=None if after is None else _id(after))
    return {"messages": found, "after": found[-1]["id"] if len(found) == _PAGE else None}


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before messages are replayed or dropped, with their number."""
    word, _, says = VERBS[verb]
    ids = await _ids(visit, form)
    return Question(
        verb=f"{word} {plural(len(ids), 'message')}",
        says=says,
        values=[("id", str(each)) for each in ids]
        if not form.get("all")
        else [("all", "yes"), ("last", str(max(ids, default=0)))],
        back=visit.url("dead-messages"),
        is_harmful=verb == "drop",
        is_possible=bool(ids),
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done:
    """Replay or drop messages, and say how many."""
    ids, client, actor = await _ids(visit, form), visit.site.client, visit.access.name
    if verb == "drop":
        outcomes = await dead_messages.drop(client.database, ids, actor=actor)
    else:
        replaying = dead_messages.replay(
            client.database, client.settings, ids, client_name="jsworker dashboard", actor=actor
        )
        outcomes = [outcome async for outcome in replaying]
    refused = [outcome.refusal for outcome in outcomes if outcome.refusal is not None]
    changed = f"{plural(len(outcomes) - len(refused), 'message')} {VERBS[verb][1]}"
    return Done.of_several(changed, len(refused), refused, visit.url("dead-messages"))


async def _ids(visit: Visit, form: FormData) -> list[int]:
    """Return the ids of the chosen messages, the oldest first."""
    if form.get("all"):  # as many as the question has counted: more may have come by the time of the answer
        after = None if form.get("last") is None else _id(str(form["last"])) + 1
        found = await list_dead(visit.site.reads, limit=2 * KEPT_MESSAGES, after=after)
        return [int(each["id"]) for each in reversed(found)]
    given = [str(each) for each in form.getlist("id")]
    if not given:
        raise WrongFilter("no message was chosen: tick some, or all")
    return sorted(set(map(_id, given)))


def _id(given: str) -> int:
    if not (given.isascii() and given.isdigit() and len(given) <= _LONGEST_ID):
        raise WrongFilter("a message's id must be a number")
    return int(given)
