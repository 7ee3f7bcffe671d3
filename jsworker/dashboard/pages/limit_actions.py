"""Actions on kinds and keys: pause, resume, set and reset limits."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final

from starlette.datastructures import FormData

from jsworker.client.job_client import JobClient
from jsworker.client.limits import Limits
from jsworker.client.terms import LONGEST_DELAY
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import printable, shown
from jsworker.dashboard.filters import moment, pause_reason
from jsworker.dashboard.pages.kinds import in_words
from jsworker.dashboard.visit import Done, Question, Visit, WrongFilter, needed
from jsworker.ownership.pool import FarTime
from jsworker.ownership.transitions.limits import Numbers, pause_of, resumed

_LIMITS: Final = (
    "They replace the limits of the class until they are reset; current runs continue."
    " An empty field means no limit; for a key, the limit of its kind."
)
VERBS: Final[Mapping[str, tuple[str, str]]] = {
    "pause": ("Pause", "No more jobs start; running jobs continue."),
    "resume": ("Resume", "Its jobs start again, unless a pause of its kind or key is left."),
    "set-limits": ("Set the limits of", _LIMITS),
    "reset-limits": ("Reset the limits of", "Those of its class apply again when the next worker starts."),
}
"""The verb, and what will happen."""
_SHOWN: Final = 100
_LONGEST_REASON: Final = 300


async def ask(verb: str, visit: Visit, form: FormData) -> Question:
    """Return the question before a kind or a key is paused, resumed or limited."""
    word, says = VERBS[verb]
    kind, key = _target(form)
    now = await Limits(visit.site.reads).numbers(kind, key=key)
    numbers = {"running": now.max_running, "rate": now.rate, "per": now.per or 1}
    typed = form if form.get("seen") == _in_short(now) else {}  # what others have changed is shown instead
    values = [("kind", kind), *([] if key is None else [("key", key)])]
    is_possible = True
    if verb.endswith("limits"):
        says = f"{says} Current limits: {in_words(now._asdict()) or 'none'}."
        values.append(("seen", _in_short(now)))
        is_possible = verb != "reset-limits" or now != Numbers(None)
    else:
        current = await pause_of(visit.site.reads, kind, key or "")
        if current is not None:
            replaced = " The new pause takes the place of this one." if verb == "pause" else ""
            says = f"{says} {_pause_in_words(visit, current)}{replaced}"
        elif verb == "resume":
            says, is_possible = "It is not paused.", False
        values.append(("seen", _digest(current)))
    return Question(
        verb=f"{word} {_named(kind, key)}",
        says=says,
        values=values,
        back=_back(visit, kind, key),
        fields={"pause": "fields_pause.html", "set-limits": "fields_limits.html"}.get(verb),
        names={
            "longest": int(LONGEST_DELAY),
            "given": {
                **{name: form.get(name, "") for name in ("seconds", "reason")},
                **{name: typed.get(name, "" if value is None else value) for name, value in numbers.items()},
            },
        },
        is_harmful=verb == "pause",
        is_possible=is_possible,
    )


async def act(verb: str, visit: Visit, form: FormData) -> Done | Question:
    """Pause, resume, set or reset; or ask again, if others have changed the limits since the question."""
    kind, key = _target(form)
    client, actor, named = visit.site.client, visit.access.name, _named(kind, key)
    if (changed := await _changed(verb, client, kind, key, form.get("seen"))) is not None:
        again = await ask(verb, visit, form)
        return replace(again, error=f"{changed} since you were asked.")
    match verb:
        case "pause":
            seconds = _number(form, "seconds", least=1, most=LONGEST_DELAY)
            until = None if seconds is None else timedelta(seconds=seconds)
            reason = str(form.get("reason") or "").strip() or None
            ends = await client.pause(kind, key, until=until, reason=reason, actor=actor)
            says = f"{named} is paused" + ("" if ends is None else f" until {_time(ends)}")
        case "resume":
            says = f"{named} {resumed(key or '', await client.resume(kind, key, actor=actor))}"
        case "set-limits":
            await client.limits.set(kind, *_numbers(form), key=key, actor=actor)
            says = f"{named}: {in_words((await client.limits.numbers(kind, key=key))._asdict())}"
        case _:
            await client.limits.reset(kind, key=key, actor=actor)
            says = f"{named}: its limits are reset"
    return Done(says, _back(visit, kind, key))


async def _changed(verb: str, client: JobClient, kind: str, key: str | None, seen: object) -> str | None:
    """Return what others have changed since the question; a pause that has ended need not be resumed."""
    if seen is None:
        return None
    if verb.endswith("limits"):
        now = await client.limits.numbers(kind, key=key)
        return None if seen == _in_short(now) else "They have changed"
    pause = await pause_of(client.database, kind, key or "")
    is_as_seen = seen == _digest(pause) or (verb == "resume" and pause is None)
    return None if is_as_seen else "The pause has changed"


def _digest(pause: Mapping[str, Any] | None) -> str:
    """Return what differs if a pause does, but tells nothing of its reason, which may be a job's error."""
    return "" if pause is None else sha256(repr(sorted(pause.items())).encode()).hexdigest()


def _pause_in_words(visit: Visit, pause: Mapping[str, Any]) -> str:
    ends = "" if pause["paused_until"] is None else f" until {_time(pause['paused_until'])}"
    reason = pause_reason(pause["reason"] or "", visit.access.payloads)
    why = f": {printable(reason, _LONGEST_REASON)}" if reason else ""
    by = printable(pause["paused_by"] or "", _SHOWN)
    return f"It has been paused since {_time(pause['paused_at'])}{ends}, by {by}{why}."


def _time(time: datetime) -> str:
    return str(time) if isinstance(time, FarTime) else f"{moment(time)[:-4]} UTC"


def _in_short(numbers: Numbers) -> str:
    return ",".join("" if each is None else str(each) for each in numbers)


def _target(form: FormData) -> tuple[str, str | None]:
    return needed(form, "kind", "a kind"), str(form.get("key") or "") or None


def _numbers(form: FormData) -> list[Limit | Rate]:
    running, rate = (_whole(form, name, most=1_000_000) for name in ("running", "rate"))
    per = _number(form, "per", least=0.001, most=LONGEST_DELAY)
    if running is None and rate is None:
        raise WrongFilter("a number at once, a rate, or both are needed")
    try:
        limit = [] if running is None else [Limit(running)]
        return [*limit, *([] if rate is None else [Rate(rate, per=per or 1.0)])]
    except ValueError as error:
        raise WrongFilter(str(error)) from None


def _whole(form: FormData, name: str, *, most: int) -> int | None:
    value = _number(form, name, least=1, most=most)
    if value is not None and not value.is_integer():
        raise WrongFilter(f"{name}={value:g} must be a whole number")
    return None if value is None else int(value)


def _number(form: FormData, name: str, *, least: float, most: float) -> float | None:
    text = str(form.get(name) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise WrongFilter(f"{name}={shown(text)} must be a number from {least:g} to {most:g}")
    return value


def _named(kind: str, key: str | None) -> str:
    return f"kind {printable(kind, _SHOWN)}" + ("" if key is None else f", key {printable(key, _SHOWN)}")


def _back(visit: Visit, kind: str, key: str | None) -> str:
    return visit.url("kinds") if key is None else visit.url("keys", {"kind": kind})
