"""The timeline of a job in words: a line for each entry, and one for each run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final

from jsworker.core.names import cell, headline

CANCELLATIONS: Final = {
    "needs": "what it needs has failed or was cancelled",
    "expired": "it had not begun by the time at which it expires",
    "superseded": "another job of its unique key waited already when it came back to the queue",
}
"""Reasons of a cancellation that no person asked for."""

_CAUSES: Final = {
    "stale": "its heartbeats stopped for longer than the stale threshold",
    "crashed": "its heartbeats stopped and no process answered for it on NATS",
    "dead": "its process was proven to have ended",
    "operator": "an operator said so",
}
ENDS: Final = frozenset({"reset", "error", "failed", "cancelled", "released", "snoozed"})
"""Events that end a run; ``cancelled`` may also be of a job that is not running."""
_BY_OWNER: Final = frozenset(
    {
        "cancelled",
        "child_jobs",
        "claimed",
        "error",
        "error_after_completion",
        "failed",
        "fenced",
        "rejected",
        "released",
        "sleep",
        "snoozed",
        "step",
    }
)
"""Events that the owner of a run writes; other events may name the owner in their details."""
_ENTRIES: Final = {
    "released": "handed back: {reason}",
    "snoozed": "put off: {reason}",
    "step": "step {step} was done",
    "child_jobs": "jobs enqueued with its completion: {jobs} ({kinds})",
    "sleep": "sleep {step} began, until {until}",
    "cancelled": "cancelled{because}{error_before}",
    "error": "attempt failed: {error}",
    "error_after_completion": "raised after its transaction had completed the job: {error}",
    "retried": "put back into the queue by hand; it had {ended}",
    "cancel_requested": "{owner} was asked to stop it",
    "skipped": "{who} skipped a message about it: {owner} has it",
    "rejected": "a late {write} by {who} was refused",
    "fenced": "{who} stopped it: its heartbeats were not answered for {seconds_without_heartbeat} s",
    "deferred": "waits for job {behind} of its unique key, which runs",
    "republished": "its message was lost, and published again",
    "held": "held by {held_by} {key}",
    "woken": "woken: it was held by {held_by} {key}",
    "rescheduled": "it was put off to {run_at}, from {was}",
    "priority_set": "its priority was set to {priority}, from {was}",
}
"""The words for events, but those of ``_claim`` and ``_end``.

A name in braces is of the details, or is added by ``_filled``.
"""
_NOTES: Final = {
    "error_after_completion": "it raised afterwards: {error}",
    "rejected": "its late {write} was refused",
    "fenced": "it stopped itself, because its heartbeats were not answered",
    "skipped": "{who} skipped a message about it",
}
"""Notes that are added to the line of a run, by event."""


def readable(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with text or numbers as details, as workers write them: a row may hold any JSON."""
    detail = event["detail"]
    if not isinstance(detail, dict):
        return {**event, "detail": None}
    return {**event, "detail": {name: _text(value) for name, value in detail.items()}}


def _text(value: Any) -> str | float | None:
    if value is None or isinstance(value, str | int | float):
        return value
    try:
        return str(value)
    except RecursionError:
        return "nested too deeply to be shown"


def entry_lines(timeline: Sequence[Mapping[str, Any]], *, zone: tzinfo | None) -> Iterator[str]:
    """Yield a line in words for each entry; see ``entry_line``."""
    released = {event["fencing_token"] or 0 for event in timeline if event["event"] == "released"}
    for event in timeline:
        yield entry_line(event, zone=zone, handed_back=(event["fencing_token"] or 0) - 1 in released)


def entry_line(event: Mapping[str, Any], *, zone: tzinfo | None, handed_back: bool = False) -> str:
    """Return the line in words for an entry, with times in ``zone``; None: in this machine's.

    ``handed_back``: whether the run before was handed back and not taken back, which a claim does not tell.
    """
    detail, name = event["detail"] or {}, event["event"]
    if name in ENDS:
        return f"{_end(event)}{_again(detail.get('run_at'), zone)}"
    if name == "claimed":
        return _claim(event, detail, "handed back" if handed_back else "taken back")
    if name in _ENTRIES:
        return _filled(_ENTRIES[name], event, zone)
    pairs = [f"{cell(key)}={cell(value)}" for key, value in detail.items()]
    return ", ".join(filter(None, (cell(name), headline(event["error"]), *pairs)))


def _filled(words: str, event: Mapping[str, Any], zone: tzinfo | None = None) -> str:
    details = {name: cell(value) for name, value in (event["detail"] or {}).items()}
    details.setdefault("key", "")
    if details.get("until"):
        details["until"] = _time(details["until"], zone)
    why = (event["detail"] or {}).get("reason")
    details["because"] = f": {CANCELLATIONS[why]}" if why in CANCELLATIONS else ""
    if details.get("was") == "cancelled":
        why = details.get("failed_for")
        details["ended"] = f"been cancelled: {CANCELLATIONS.get(why, why)}" if why else "been cancelled"
    else:
        details["ended"] = f"failed: {details.get('failed_for', '?')}"
    error = headline(event["error"])
    details["error_before"] = f"; its error: {error}" if error else ""
    details |= {"who": cell(event["worker_id"]) or "an operator", "error": error}
    return words.format_map(defaultdict(lambda: "?", details)).rstrip()


def _claim(event: Mapping[str, Any], detail: Mapping[str, Any], how: str) -> str:
    silent = f" from {cell(detail['owner'])}, whose heartbeats stopped" if detail.get("owner") else ""
    again = f", after it was {how}: {cell(detail['clear_reason'])}" if detail.get("clear_reason") else ""
    return f"claimed by {cell(event['worker_id'])}{silent} for attempt {cell(detail.get('attempt'))}{again}"


def _again(run_at: Any, zone: tzinfo | None) -> str:
    return "" if run_at is None else f"; to run again from {_time(run_at, zone)}"


def _time(stored: Any, zone: tzinfo | None) -> str:
    try:
        return f"{datetime.fromisoformat(str(stored)).astimezone(zone):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError):  # for example infinity
        return cell(stored)


def run_line(token: int, found: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> str:
    """Return a line about the run with a fencing token: its owner, its end, and notes."""
    events = [event for event in timeline if event["fencing_token"] == token]
    owner = run_owner(token, found, timeline)
    end = next((_end(event) for event in events if event["event"] in ENDS), None)
    if end is None and (claim := taken_over(token, timeline)) is not None:
        stalls = claim["detail"].get("stalls")
        end = f"taken over by {cell(claim['worker_id'])}, because {_CAUSES['stale']}; stall {stalls}"
    if token == found["fencing_token"]:
        end = end or _present(found)
    by = f" by {cell(owner)}" if owner else ""
    notes = [_filled(_NOTES[event["event"]], event) for event in events if event["event"] in _NOTES]
    return "; ".join([f"run {token}{by}: {end or 'ended without a trace'}", *notes])


def run_owner(token: int, found: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the worker that owned a job at a fencing token; None if it is unknown."""
    events = (event for event in timeline if event["fencing_token"] == token)
    owner = next(filter(None, map(_owner, events)), None)
    if owner is None and (claim := taken_over(token, timeline)) is not None:
        owner = str(claim["detail"]["owner"])
    if owner is None and token == found["fencing_token"]:
        owner = found["worker_id"] or found["completed_by"]
    return owner


def taken_over(token: int, timeline: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the claim that took the job from the silent owner of the run with a token; None if none did."""
    for event in timeline:
        if event["fencing_token"] == token + 1 and event["event"] == "claimed":
            return event if (event["detail"] or {}).get("owner") else None
    return None


def _owner(event: Mapping[str, Any]) -> str | None:
    by_owner = event["event"] in _BY_OWNER
    owner = event["worker_id"] if by_owner else (event["detail"] or {}).get("owner")
    return None if owner is None else str(owner)


def _end(event: Mapping[str, Any]) -> str:
    detail = event["detail"] or {}
    match event["event"]:
        case "reset":
            cause = _CAUSES.get(str(detail.get("cause")), cell(detail.get("cause")))
            if detail.get("reason") and detail.get("cause") in {"dead", "operator"}:
                cause += f" ({cell(detail['reason'])})"
            counted = f"stall {detail.get('stalls')}" if detail.get("counted") else "not counted as a stall"
            return f"taken back by {cell(event['worker_id']) or 'an operator'}, because {cause}; {counted}"
        case "failed":
            reason = f" ({cell(detail['reason'])})" if detail.get("reason") else ""
            return f"failed for good{reason}: {headline(event['error'])}"
        case "error" if detail.get("stalls"):
            return f"{headline(event['error'])}; stall {cell(detail['stalls'])}"
        case name:
            return _filled(_ENTRIES[name], event)


def _present(found: Mapping[str, Any]) -> str:
    match found["status"]:
        case "processing":
            return "still running"
        case "completed" if (took := seconds_taken(found)) is not None:
            return f"completed after {took:.3g} s"
        case status:
            return str(status)


def seconds_taken(job: Mapping[str, Any]) -> float | None:
    """Return the seconds of a job's last run, if it has ended."""
    if job["claimed_at"] is None or job["finished_at"] is None:
        return None
    took: timedelta = job["finished_at"] - job["claimed_at"]
    return max(took.total_seconds(), 0.0)
