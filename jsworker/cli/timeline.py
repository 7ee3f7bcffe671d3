"""What happened to a job, in words: its runs one by one, and the entries of its timeline."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jsworker.cli.words import cell, headline, moment

CAUSES: Final = {
    "stale": "its heartbeats stopped for longer than the stale threshold",
    "crashed": "its heartbeats stopped and nobody answered for it on NATS",
    "dead": "its process was proven to have ended",
    "operator": "an operator said so",
}
_ENDS: Final = frozenset({"reset", "error", "failed", "cancelled", "released"})
_ENTRIES: Final = {
    "retried": "put back into the queue by hand; it had failed: {failed_for}",
    "cancel_requested": "{owner} was asked to stop it",
    "skipped": "{who} skipped a message about it: {owner} has it",
    "rejected": "a late {write} by {who} was refused",
    "fenced": "{who} stopped it: its heartbeats were not answered for {seconds_without_heartbeat} s",
    "republished": "its message was lost, and published again",
}
"""What other entries tell; names in braces are those of their details."""


def runs_in_words(found: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each run of a job: by whom, and how it ended. The fencing token numbers them.

    Args:
        found: the job's columns.
        timeline: its events, the oldest first.
    """
    return [_run(token, found, timeline) for token in range(1, int(found["fencing_token"]) + 1)]


def entry_in_words(event: Mapping[str, Any]) -> str:
    """Return what an entry of a job's timeline tells."""
    detail = event["detail"] or {}
    if event["event"] in _ENDS:
        return f"{_end(event)}{_again(detail)}"
    if event["event"] == "claimed":
        return _claim(event, detail)
    words = _ENTRIES.get(event["event"])
    if words is None:
        pairs = [f"{cell(name)}={cell(value)}" for name, value in detail.items()]
        return ", ".join(part for part in (cell(event["event"]), headline(event["error"]), *pairs) if part)
    told = {name: cell(value) for name, value in detail.items()}
    return words.format_map(defaultdict(lambda: "?", told, who=cell(event["worker_id"]) or "an operator"))


def _claim(event: Mapping[str, Any], detail: Mapping[str, Any]) -> str:
    silent = f" from {cell(detail['owner'])}, whose heartbeats stopped" if detail.get("owner") else ""
    again = f", after it was taken back: {cell(detail['clear_reason'])}" if detail.get("clear_reason") else ""
    return f"claimed by {cell(event['worker_id'])}{silent} for attempt {cell(detail.get('attempt'))}{again}"


def _again(detail: Mapping[str, Any]) -> str:
    if detail.get("run_at") is None:
        return ""
    try:
        return f"; to run again from {moment(datetime.fromisoformat(str(detail['run_at'])))}"
    except ValueError:  # infinity, say
        return f"; to run again from {cell(detail['run_at'])}"


def _run(token: int, found: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> str:
    events = [event for event in timeline if event["fencing_token"] == token]
    last = token == found["fencing_token"]
    ends = [event for event in events if event["event"] in _ENDS]
    end = _end(ends[0]) if ends else _present(found) if last else "ended without a trace"
    by = f" by {cell(owner)}" if (owner := _owner(events, found if last else {})) else ""
    notes = "".join(f"; {note}" for note in map(_note, events) if note)
    return f"run {token}{by}: {end}{notes}"


def _owner(events: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str | None:
    for event in events:
        if event["event"] in {"claimed", "error", "failed", "released", "fenced", "rejected"}:
            return str(event["worker_id"])
        if event["event"] in {"reset", "skipped", "cancel_requested"} and (event["detail"] or {}).get(
            "owner"
        ):
            return str(event["detail"]["owner"])
    return found.get("worker_id") or found.get("completed_by")


def _end(event: Mapping[str, Any]) -> str:
    detail = event["detail"] or {}
    match event["event"]:
        case "reset":
            cause = CAUSES.get(str(detail.get("cause")), cell(detail.get("cause")))
            if detail.get("reason") and detail.get("cause") in {"dead", "operator"}:
                cause += f" ({cell(detail['reason'])})"
            counted = f"stall {detail.get('stalls')}" if detail.get("counted") else "not counted as a stall"
            return f"taken back by {cell(event['worker_id']) or 'an operator'}, because {cause}; {counted}"
        case "released":
            return f"handed back: {cell(detail.get('reason'))}"
        case "cancelled":
            return "cancelled"
        case "error":
            return f"attempt failed: {headline(event['error'])}"
        case _:
            reason = f" ({cell(detail['reason'])})" if detail.get("reason") else ""
            return f"failed for good{reason}: {headline(event['error'])}"


def _present(found: Mapping[str, Any]) -> str:
    match found["status"]:
        case "processing":
            return "still running"
        case "completed" if (took := _seconds_between(found["claimed_at"], found["finished_at"])) is not None:
            return f"completed after {took:.3g} s"
        case status:
            return str(status)


def _seconds_between(start: Any, end: Any) -> float | None:
    if isinstance(start, datetime) and isinstance(end, datetime):
        return max((end - start).total_seconds(), 0.0)
    return None


def _note(event: Mapping[str, Any]) -> str:
    detail = event["detail"] or {}
    match event["event"]:
        case "rejected":
            return f"its late {cell(detail.get('write'))} was refused"
        case "fenced":
            return "it stopped itself, because its heartbeats were not answered"
        case "skipped":
            return f"{cell(event['worker_id'])} skipped a message about it"
        case _:
            return ""
