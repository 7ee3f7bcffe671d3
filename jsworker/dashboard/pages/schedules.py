"""Schedules: rules that enqueue jobs by the clock; run one now, pause and resume."""

from collections.abc import Mapping
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.core.names import printable
from jsworker.dashboard.filters import plural
from jsworker.dashboard.visit import Done, Question, Visit, needed
from jsworker.ownership.transitions.schedules import list_schedules

VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "run-now": ("Run now", "One job is enqueued now, in addition to the due times."),
    "pause": ("Pause", "It stays paused until it is resumed, even if workers are restarted."),
    "resume": ("Resume", "Due times during the pause are skipped."),
}
"""The verb, and what will happen."""
_LATE_SECONDS: Final = 5.0
_SHOWN: Final = 500
_LONGEST_NAME: Final = 100
_NAME: Final = "the name of a schedule"


async def read(visit: Visit) -> Mapping[str, Any]:
    """Return the schedules, the next one due first."""
    every = await list_schedules(visit.site.reads, limit=_SHOWN + 1)
    now = visit.site.clock.now()
    shown = [
        each | {"late": 0.0 if each["paused"] else (now - each["next_at"]).total_seconds()}
        for each in every[:_SHOWN]
    ]
    return {"schedules": shown, "more": len(every) > len(shown), "late_seconds": _LATE_SECONDS}


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before a schedule is run, paused or resumed."""
    word, says = VERBS[verb]
    name = needed(form, "name", _NAME)
    return Question(
        verb=f"{word}: schedule {printable(name, _LONGEST_NAME)}",
        says=says,
        values=[("name", name)],
        back=visit.url("schedules"),
        is_harmful=verb == "pause",
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done:
    """Run, pause or resume a schedule."""
    name, actor = needed(form, "name", _NAME), visit.access.name
    schedules, shown = visit.site.client.schedules, f"schedule {printable(name, _LONGEST_NAME)}"
    match verb:
        case "run-now":
            job = await schedules.run_now(name, actor=actor)
            return Done(f"{plural(1, 'job')} of {shown} is enqueued", visit.url("job", id=job.id))
        case "pause":
            await schedules.pause(name, actor=actor)
            return Done(f"{shown} is paused", visit.url("schedules"))
        case _:
            due = await schedules.resume(name, actor=actor)
            return Done(f"{shown} is due at {due:%Y-%m-%d %H:%M:%S} UTC", visit.url("schedules"))
