"""Repairs that are safe at any time, also twice. Workers make each of them by themselves sooner or later.

No repair takes a job from its owner, ends a job, or changes data other than jsworker's own bookkeeping. A
repair yields one line on what it did, unless the facts do not require it or do not allow it; and how many
jobs, refused rows, or parts of the stream it has changed, as soon as they are, which may be before the line.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Final

from jsworker.client.job_client import JobClient
from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError, StreamRefused
from jsworker.core.events import Event, Events
from jsworker.core.names import is_kind
from jsworker.doctor.finding import Finding, counted
from jsworker.doctor.gather import Facts, Unknown, opened, served_kinds
from jsworker.doctor.nats_checks import is_usable
from jsworker.ownership.refusals import needed_right
from jsworker.ownership.transitions.audit import AuditEntry
from jsworker.ownership.transitions.publish import promote
from jsworker.ownership.transitions.refused_rows import RefusedRows, try_again
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.diagnostics import ConsumerReport
from jsworker.stream.jetstream import ensured_stream
from jsworker.stream.message import lane_of
from jsworker.stream.topology import shown

_CONNECT_SECONDS: Final = 5.0
_PROMOTE_AT_ONCE: Final = 500
_MARKS_AT_ONCE: Final = 1_000

Mended = tuple[str | None, int]
"""The line of a repair, or None if it goes on, and how much it has changed since it last yielded."""


async def repair(facts: Facts, *, seconds: float = math.inf, actor: str | None = None) -> list[Finding]:
    """Make the repairs that these facts require, and return what was done.

    With an ``actor``, who does it, each repair that changes something gets an entry in the audit. After about
    ``seconds`` no more jobs are queued or published, and after twice as long all is ended, for a server may
    be silent.
    """
    done: list[Finding] = []
    try:
        async with asyncio.timeout(2 * seconds if math.isfinite(seconds) else None) as limit:
            limited = dict(REPAIRS) | {"fix.jobs": partial(_queue_and_publish, seconds=seconds)}
            for name, mend in limited.items():
                entry = AuditEntry("doctor.repair", {"checks": [name]}, actor=actor)
                try:
                    async for says, changed in mend(facts):
                        if says is not None:
                            done.append(Finding(name, "ok", says))
                        if actor is not None and changed:
                            untold = await _note(facts, name, entry, changed)
                            done += [each for each in untold if each not in done]
                except JsworkerError as error:
                    because = f"could not be mended: {' '.join(str(error).split())}"
                    done.append(Finding(name, "error", because, "See the findings below."))
    except TimeoutError:
        if not limit.expired():
            raise
        says = f"it took longer than {2 * seconds:g} s and was ended: the rest may have been done, or not"
        done.append(Finding("fix.time", "warning", says, "Run `jsworker doctor --fix`, which waits."))
    if reasons := {fact.because: None for fact in _asked_for(facts) if isinstance(fact, Unknown)}:
        what = "more" if done else "anything"
        says = f"it is not known whether {what} has to be mended, because {'; '.join(reasons)}"
        done.append(Finding("fix.unknown", "warning", says, "Remove the reason, then repair again."))
    return done or [Finding("fix.nothing", "ok", "there was nothing that may be mended without you")]


async def _note(facts: Facts, name: str, entry: AuditEntry, changed: int) -> list[Finding]:
    try:
        async with opened(facts.settings) as database:
            with needed_right("an entry", "INSERT on jsworker.audit", "jsworker_operator"):
                await database.in_transaction(lambda transaction: entry.note(transaction, changed=changed))
    except JsworkerError as error:
        says = f"{name} is not in the audit: {' '.join(str(error).split())}"
        return [Finding("fix.audit", "warning", says, "Nothing: what was mended stays so.")]
    return []


def _asked_for(facts: Facts) -> tuple[object, ...]:
    """Return the facts that tell the repairs what to do."""
    stream = facts.stream
    of_nats = stream if stream is None or isinstance(stream, Unknown) else facts.consumers
    return facts.installation, facts.registered, facts.unpublished, facts.overdue, facts.refusals, of_nats


async def _ensure_stream(facts: Facts) -> AsyncIterator[Mended]:
    """Create the stream and its consumers, or correct them, as a worker does when it starts."""
    stream, registered, reports = facts.stream, facts.registered, facts.consumers
    if (
        isinstance(stream, Unknown)
        or isinstance(registered, Unknown)
        or isinstance(facts.installation, Unknown)
        or not is_usable(stream, facts.installation)
    ):
        return
    if isinstance(reports, Unknown):
        if stream is not None:
            return  # the consumers may be correct already
        reports = []
    at_least = facts.settings.ack_wait
    served = set(served_kinds(registered))
    missing = sorted(served - {report.name for report in reports})
    ack_waits = dict.fromkeys(missing, at_least)
    for report in reports:
        kind, _ = lane_of(report.name)
        is_foreign = (report.takes or report.apart) and kind not in served
        if is_kind(kind) and not is_foreign and _can_be_mended(report, at_least):
            ack_waits[report.name] = max(report.ack_wait, at_least)
    if stream is not None and not stream.differences and not ack_waits:
        return
    done: list[str] = []
    refused: list[str] = []
    events = Events()
    events.on("stream.changed", lambda event: done.append(_change(event)))
    async with opened(facts.settings) as database:
        installation = await installation_id(database)
    try:
        async with ensured_stream(
            facts.settings,
            installation,
            events=events,
            client_name="jsworker doctor",
            seconds=_CONNECT_SECONDS,
        ) as ensured:
            for name in ack_waits:
                try:
                    await ensured.ensure([name], ack_waits)
                except StreamRefused as refusal:  # others can still be mended
                    refused.append(str(refusal))
                else:
                    done += [f"made consumer {name}"] if name in missing else []
    except JsworkerError as error:  # raised again below, behind what was done
        refused.append(str(error))
    if done:
        yield "; ".join(done), len(done)
    if refused:
        raise StreamRefused("; ".join(refused))


def _can_be_mended(report: ConsumerReport, at_least: float) -> bool:
    """Return whether a consumer must be changed and can be; a longer ack_wait need not be changed."""
    others = any(each.setting != "ack_wait" for each in report.differences)
    return (others or report.ack_wait < at_least) and all(each.changeable for each in report.differences)


def _change(event: Event) -> str:
    fields = event.fields
    if fields["setting"] == "created":
        return f"made {fields['what']}"
    return f"{fields['what']}: {fields['setting']} is {shown(fields['is'])} now, was {shown(fields['was'])}"


async def _queue_and_publish(facts: Facts, seconds: float = math.inf) -> AsyncIterator[Mended]:
    late = [each for each in (facts.unpublished, facts.overdue) if not isinstance(each, Unknown)]
    if not any(each.jobs for each in late):
        return
    queued, promoted = 0, _PROMOTE_AT_ONCE
    began_at = boottime()
    async with opened(facts.settings) as database:
        refused_rows = RefusedRows(database, worker_id=None)
        while promoted == _PROMOTE_AT_ONCE and boottime() - began_at < seconds / 2:
            promoted = await promote(database, limit=_PROMOTE_AT_ONCE, refused_rows=refused_rows)
            queued += promoted
            yield None, promoted
    done = f"queued {counted(queued, 'scheduled job')}"
    if promoted == _PROMOTE_AT_ONCE:
        done += f" in {seconds / 2:g} s and left others to workers"
    if isinstance(facts.nats, Unknown):
        yield f"{done}; nothing was published because {facts.nats.because}", 0
        return
    left = max(began_at + seconds - boottime(), 0.0)
    async with JobClient(facts.settings) as client:
        try:
            async with asyncio.timeout(left if math.isfinite(left) else None) as limit:
                published = await client.publish_pending()
        except TimeoutError:
            if not limit.expired():
                raise
            yield f"{done}, published for {left:.0f} s and left other messages to workers", 0
            return
        refused = f"; others were not: {client.unpublished_because}" if client.unpublished_because else ""
    # Most messages are those of the jobs that were queued, which are counted already.
    yield f"{done}, published {counted(published, 'message')}{refused}", max(published - queued, 0)


async def _try_refused_rows(facts: Facts) -> AsyncIterator[Mended]:
    if isinstance(facts.refusals, Unknown) or not facts.refusals:
        return
    tried, found = 0, _MARKS_AT_ONCE
    async with opened(facts.settings) as database:
        while found > _MARKS_AT_ONCE // 2:  # one that a worker notes again meanwhile is left
            found = await try_again(database, limit=_MARKS_AT_ONCE)
            tried += found
            yield None, found
    if tried:
        yield f"{counted(tried, 'refused row')} tried again by the workers' next rounds", 0


REPAIRS: Final[Mapping[str, Callable[[Facts], AsyncIterator[Mended]]]] = {
    "fix.stream": _ensure_stream,
    "fix.jobs": _queue_and_publish,
    "fix.refused_rows": _try_refused_rows,
}
"""The repairs by the names of their findings, in their order."""
