"""HOLD and WAKE: what is written when a job begins to wait for an event, and when the event has come.

A held job is scheduled without a time. It has no message, and no clock makes it due.
"""

from typing import Any, Final

import sqlalchemy as sa

from jsworker.ownership.statements import AT_START, NOT_HELD, NOW, j


def held_now(why: str | sa.ColumnElement[Any]) -> dict[str, Any]:
    """Return what is written when a queued job is held: it keeps its place in the queue's order."""
    return {
        "status": "scheduled",
        "run_at": sa.null(),
        "held_by": why,
        "held_at": NOW,
        "needs_publish": False,
    }


# One instant for the whole statement: with clock_timestamp(), one row could count as both early and late.
_is_early: Final = sa.func.coalesce(j.c.due_at > AT_START, sa.false())

WOKEN: Final = {
    "status": sa.case((_is_early, "scheduled"), else_="queued"),
    "run_at": sa.case((_is_early, j.c.due_at), else_=j.c.run_at),
    "dispatch": j.c.dispatch + sa.case((_is_early, 0), else_=1),
    "needs_publish": ~_is_early,
    "publish_after": NOW,
    "queued_at": sa.case((_is_early, j.c.queued_at), else_=sa.func.coalesce(j.c.queued_at, NOW)),
    **NOT_HELD,
}
"""The values written when a job is held no longer: queued at its old place, or scheduled for ``due_at``."""
