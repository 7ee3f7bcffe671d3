"""Repairs: what may be mended at any time, by anybody, twice. Each is what workers do by themselves one day.

Nothing here takes a job from its owner, ends one, or touches data that is not jsworker's own bookkeeping.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from jsworker.client import JobClient
from jsworker.core.errors import InvalidName, JsworkerError
from jsworker.core.events import Event, Events
from jsworker.core.names import check_kind
from jsworker.core.settings import Settings
from jsworker.doctor.facts import Facts, Unknown
from jsworker.doctor.finding import Finding, counted
from jsworker.doctor.gather import opened
from jsworker.ownership.transitions.orphaned_events import delete_orphaned_events
from jsworker.ownership.transitions.publish import promote
from jsworker.ownership.transitions.refused_rows import RefusedRows, try_again
from jsworker.ownership.transitions.workers import forget_workers, installation_id
from jsworker.stream.diagnostics import ConsumerReport
from jsworker.stream.jetstream import Stream
from jsworker.worker.recovery.earlier_lives import FORGOTTEN_AFTER_SECONDS

_CONNECT_SECONDS: Final = 5.0
_PROMOTE_AT_ONCE: Final = 500
_ENTRIES_AT_ONCE: Final = 5_000
_LONGEST_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Repair:
    """Something that can be mended.

    Attributes:
        name: as findings name it.
        wanted: whether these facts ask for it, and allow it.
        mend: does it and says in one line what it did.
    """

    name: str
    wanted: Callable[[Facts], bool]
    mend: Callable[[Facts], Awaitable[str]]


async def repair(facts: Facts) -> list[Finding]:
    """Mend what these facts ask for and return what was done."""
    done = [await _attempt(each, facts) for each in REPAIRS if each.wanted(facts)]
    return done or [Finding("fix.nothing", "ok", "there was nothing that may be mended without you")]


async def _attempt(wanted: Repair, facts: Facts) -> Finding:
    try:
        return Finding(wanted.name, "ok", await wanted.mend(facts))
    except JsworkerError as error:
        return Finding(
            wanted.name,
            "error",
            f"could not be mended: {' '.join(str(error).split())}",
            "See the findings below.",
        )


def _stream_differs(facts: Facts) -> bool:
    """Tell whether a worker that starts would make or change anything, and would not be refused."""
    if isinstance(facts.stream, Unknown) or isinstance(facts.rows, Unknown):
        return False
    report = facts.stream.stream
    if report is None:
        return True
    if report.installation not in {None, str(facts.rows.installation)}:
        return False
    if any(not each.changeable for each in report.differences):
        return False
    return bool(report.differences) or bool(_kinds_to_ensure(facts))


async def _ensure_stream(facts: Facts) -> str:
    told: list[Event] = []
    ack_waits, events = _kinds_to_ensure(facts), Events()
    events.on("stream.changed", told.append)
    async with opened(facts.settings) as database:
        installation = await installation_id(database)
    stream = Stream(
        facts.settings, installation_id=installation, events=events, client_name="jsworker doctor"
    )
    await stream.connect(_CONNECT_SECONDS)
    try:
        await stream.ensure(list(ack_waits), ack_waits)
    finally:
        await stream.close()
    there = {report.name for report in _reports(facts)}
    made = [f"made consumer {kind}" for kind in ack_waits if kind not in there]
    return "; ".join([*map(_change, told), *made]) or "somebody else was faster to mend the stream"


def _kinds_to_ensure(facts: Facts) -> dict[str, float]:
    """Return the consumers to make or change, each with the longer of its own and the settings' ack wait."""
    if isinstance(facts.rows, Unknown) or isinstance(facts.stream, Unknown):
        return {}
    if isinstance(facts.consumers, Unknown) and facts.stream.stream is not None:
        return {}  # they may be as they must be
    reports, asked_for = _reports(facts), facts.settings.ack_wait
    kinds = {
        report.name: max(report.ack_wait, asked_for)
        for report in reports
        if _is_kind(report.name) and _changes(report, facts.settings)
    }
    there = {report.name for report in reports}
    served = {kind for worker in facts.rows.workers if worker.alive for kind in worker.kinds}
    return kinds | dict.fromkeys(sorted(served - there), asked_for)


def _reports(facts: Facts) -> list[ConsumerReport]:
    return [] if isinstance(facts.consumers, Unknown) else facts.consumers


def _changes(report: ConsumerReport, settings: Settings) -> bool:
    """Tell whether a consumer can be changed and must be; one that only waits longer need not."""
    if any(not each.changeable for each in report.differences):
        return False
    others = [each for each in report.differences if each.setting != "ack_wait"]
    return bool(others) or report.ack_wait < settings.ack_wait


def _is_kind(name: str) -> bool:
    try:
        return bool(check_kind(name))
    except InvalidName:
        return False


def _change(event: Event) -> str:
    fields = event.fields
    if fields["setting"] == "created":
        return f"made {fields['what']}"
    return f"{fields['what']}: {fields['setting']} is {_shown(fields['is'])} now, was {_shown(fields['was'])}"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def _jobs_are_late(facts: Facts) -> bool:
    return not isinstance(facts.rows, Unknown) and bool(
        facts.rows.unpublished.jobs or facts.rows.overdue.jobs
    )


async def _queue_and_publish(facts: Facts) -> str:
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


def _rows_are_refused(facts: Facts) -> bool:
    return not isinstance(facts.rows, Unknown) and bool(facts.rows.refused)


async def _try_refused_rows(facts: Facts) -> str:
    async with opened(facts.settings) as database:
        found = await try_again(database)
    return f"{counted(found, 'refused row')} tried again by the workers' next rounds"


def _workers_are_forgotten(facts: Facts) -> bool:
    return not isinstance(facts.rows, Unknown) and bool(facts.rows.forgettable)


async def _forget_workers(facts: Facts) -> str:
    async with opened(facts.settings) as database:
        gone = await forget_workers(database, silent_for=FORGOTTEN_AFTER_SECONDS)
    return f"deleted {counted(gone, 'worker')} of long ago from the registry"


def _entries_are_orphaned(facts: Facts) -> bool:
    return not isinstance(facts.rows, Unknown) and bool(facts.rows.orphaned_events)


async def _delete_orphaned_events(facts: Facts) -> str:
    began, deleted, last = time.monotonic(), 0, 0
    async with opened(facts.settings) as database:
        while time.monotonic() - began < _LONGEST_SECONDS:
            gone, end = await delete_orphaned_events(database, after=last, limit=_ENTRIES_AT_ONCE)
            deleted += gone
            if end is None:
                break
            last = end
        else:
            return f"{_deleted(deleted)}; stopped after {_LONGEST_SECONDS:g} s, so run it again"
    return _deleted(deleted)


def _deleted(entries: int) -> str:
    found = counted(entries, "timeline entry", plural="timeline entries")
    return f"deleted {found} without a job"


REPAIRS: Final = (
    Repair("fix.stream", _stream_differs, _ensure_stream),
    Repair("fix.jobs", _jobs_are_late, _queue_and_publish),
    Repair("fix.refused_rows", _rows_are_refused, _try_refused_rows),
    Repair("fix.registry", _workers_are_forgotten, _forget_workers),
    Repair("fix.timelines", _entries_are_orphaned, _delete_orphaned_events),
)
