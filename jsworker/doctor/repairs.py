"""Repairs: what may be mended at any time, twice too. Each is what workers do by themselves sooner or later.

Nothing here takes a job from its owner, ends one, or touches data that is not jsworker's own bookkeeping. A
repair returns in one line what it did, None when the facts do not ask for it or do not allow it.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from jsworker.client import JobClient
from jsworker.core.errors import JsworkerError
from jsworker.core.events import Event, Events
from jsworker.core.names import is_kind
from jsworker.core.settings import Settings
from jsworker.doctor.finding import Finding, counted
from jsworker.doctor.gather import Facts, Unknown, opened, served_kinds
from jsworker.ownership.transitions.publish import promote
from jsworker.ownership.transitions.refused_rows import RefusedRows, try_again
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.diagnostics import ConsumerReport
from jsworker.stream.jetstream import ensured_stream

_CONNECT_SECONDS: Final = 5.0
_PROMOTE_AT_ONCE: Final = 500


async def repair(facts: Facts) -> list[Finding]:
    """Mend what these facts ask for and return what was done."""
    done = [await _attempt(name, mend, facts) for name, mend in _REPAIRS.items()]
    nothing = Finding("fix.nothing", "ok", "there was nothing that may be mended without you")
    return [finding for finding in done if finding is not None] or [nothing]


async def _attempt(name: str, mend: Callable[[Facts], Awaitable[str | None]], facts: Facts) -> Finding | None:
    try:
        done = await mend(facts)
    except JsworkerError as error:
        says = f"could not be mended: {' '.join(str(error).split())}"
        return Finding(name, "error", says, "See the findings below.")
    return None if done is None else Finding(name, "ok", done)


async def _ensure_stream(facts: Facts) -> str | None:
    """Make stream and consumers, or change them, as a worker that starts would."""
    if not _may_ensure(facts):
        return None
    changes: list[Event] = []
    ack_waits, events = _kinds_to_ensure(facts), Events()
    events.on("stream.changed", changes.append)
    async with opened(facts.settings) as database:
        installation = await installation_id(database)
    async with ensured_stream(
        facts.settings,
        installation,
        list(ack_waits),
        ack_waits,
        events=events,
        client_name="jsworker doctor",
        seconds=_CONNECT_SECONDS,
    ):
        pass
    there = {report.name for report in _reports(facts)}
    made = [f"made consumer {kind}" for kind in ack_waits if kind not in there]
    return "; ".join([*map(_change, changes), *made]) or "a worker was faster to mend the stream"


def _may_ensure(facts: Facts) -> bool:
    """Return whether a worker that starts would make or change anything, and would not be refused."""
    if isinstance(facts.stream, Unknown) or isinstance(facts.rows, Unknown):
        return False
    report = facts.stream
    if report is None:
        return True
    if report.installation not in {None, str(facts.rows.installation)}:
        return False
    if any(not each.changeable for each in report.differences):
        return False
    return bool(report.differences) or bool(_kinds_to_ensure(facts))


def _kinds_to_ensure(facts: Facts) -> dict[str, float]:
    """Return the consumers to make or change, each with the longer of its own and the settings' ack wait."""
    if isinstance(facts.rows, Unknown) or isinstance(facts.stream, Unknown):
        return {}
    if isinstance(facts.consumers, Unknown) and facts.stream is not None:
        return {}  # they may be as they must be
    reports, asked_for = _reports(facts), facts.settings.ack_wait
    kinds = {
        report.name: max(report.ack_wait, asked_for)
        for report in reports
        if is_kind(report.name) and _changes(report, facts.settings)
    }
    there = {report.name for report in reports}
    missing = [kind for kind in served_kinds(facts.rows) if kind not in there]
    return kinds | dict.fromkeys(missing, asked_for)


def _reports(facts: Facts) -> list[ConsumerReport]:
    return [] if isinstance(facts.consumers, Unknown) else facts.consumers


def _changes(report: ConsumerReport, settings: Settings) -> bool:
    """Return whether a consumer can be changed and must be; one that only waits longer need not."""
    if any(not each.changeable for each in report.differences):
        return False
    others = [each for each in report.differences if each.setting != "ack_wait"]
    return bool(others) or report.ack_wait < settings.ack_wait


def _change(event: Event) -> str:
    fields = event.fields
    if fields["setting"] == "created":
        return f"made {fields['what']}"
    return f"{fields['what']}: {fields['setting']} is {_shown(fields['is'])} now, was {_shown(fields['was'])}"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


async def _queue_and_publish(facts: Facts) -> str | None:
    if isinstance(facts.rows, Unknown) or not (facts.rows.unpublished.jobs or facts.rows.overdue.jobs):
        return None
    queued = 0
    async with opened(facts.settings) as database:
        refused_rows = RefusedRows(database, worker_id=None)
        while True:
            promoted = await promote(database, limit=_PROMOTE_AT_ONCE, refused_rows=refused_rows)
            queued += promoted
            if promoted < _PROMOTE_AT_ONCE:
                break
    done = f"queued {counted(queued, 'scheduled job')}"
    if isinstance(facts.nats, Unknown):
        return f"{done}; nothing was published because {facts.nats.because}"
    async with JobClient(facts.settings) as client:
        published = await client.publish_pending()
        refused = f"; others were not: {client.unpublished_because}" if client.unpublished_because else ""
    return f"{done}, published {counted(published, 'message')}{refused}"


async def _try_refused_rows(facts: Facts) -> str | None:
    if isinstance(facts.rows, Unknown) or not facts.rows.refused:
        return None
    async with opened(facts.settings) as database:
        found = await try_again(database)
    return f"{counted(found, 'refused row')} tried again by the workers' next rounds"


_REPAIRS: Final = {
    "fix.stream": _ensure_stream,
    "fix.jobs": _queue_and_publish,
    "fix.refused_rows": _try_refused_rows,
}
