"""Why a job ran more than once: its runs in words, told from its row and its timeline."""

from collections.abc import Mapping, Sequence
from typing import Any

from jsworker.cli.words import cell, headline

_CAUSES = {
    "stale": "its heartbeats stopped for longer than the stale threshold",
    "crashed": "its heartbeats stopped and nobody answered for it on NATS",
    "dead": "its process was proven to have ended",
    "operator": "an operator said so",
}
_ENDS = frozenset({"reset", "error", "failed", "cancelled", "released"})


def runs_in_words(found: Mapping[str, Any], timeline: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line for each run of a job: by whom, and how it ended. The fencing token numbers them.

    Args:
        found: the job's columns.
        timeline: its events, the oldest first.
    """
    return [_run(token, found, timeline) for token in range(1, int(found["fencing_token"]) + 1)]


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
    return found.get("worker_id")


def _end(event: Mapping[str, Any]) -> str:
    detail = event["detail"] or {}
    match event["event"]:
        case "reset":
            cause = _CAUSES.get(str(detail.get("cause")), "")
            if detail.get("cause") == "dead" and detail.get("reason"):
                cause += f" ({cell(detail['reason'])})"
            counted = f"stall {detail.get('stalls')}" if detail.get("counted") else "not counted as a stall"
            return f"taken back by {cell(event['worker_id'] or 'an operator')}, because {cause}; {counted}"
        case "released":
            return f"handed back: {cell(detail.get('reason'))}"
        case "cancelled":
            return "cancelled"
        case name:
            return f"{name}: {headline(event['error'])}"


def _present(found: Mapping[str, Any]) -> str:
    return "still running" if found["status"] == "processing" else str(found["status"])


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
