"""Figures of a run, from its history: how fast jobs came back, how long they waited, what it cost."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from tests.faults import flow_control
from tests.faults.checker import HELD_UP, Verdict
from tests.faults.excuses import NOBODY_INJECTED
from tests.faults.history import FINAL, Fault, History, Move, pid_of
from tests.faults.recovery import Claim, cause_of, claims, seen_paths

_CLOCK_SLACK_SECONDS = 0.02
_BLOCKED = ("event_loop_block", "gil_hold", "deaf_thread")
"""Faults that one job makes by itself, from its start on."""


def figures(history: History, verdict: Verdict) -> dict[str, Any]:
    """Return what the report prints, as JSON values."""
    owned = list(claims(history).values())
    ended = sum(row.status in FINAL for row in history.jobs.values())
    reruns = verdict.reruns
    seconds = (history.drained or history.quiet_since) - history.started
    return {
        "jobs": len(history.jobs),
        "ended": ended,
        "seconds": round(seconds, 1),
        "jobs_per_second": round(ended / seconds, 1) if seconds > 0 else 0.0,
        "runs": len(history.runs),
        "enqueues_unknown": sum(one.outcome == "unknown" for one in history.tries),
        "faults": dict(sorted(Counter(fault.name for fault in history.faults if fault.fired).items())),
        "process_kills": process_kills(history),
        "lost": verdict.count("lost"),
        "unexpected": verdict.count("unexpected"),
        "completed_twice": verdict.count("completed twice"),
        "innocents_failed": verdict.count("wrong end"),
        "duplicate_runs_explained": sum(rerun.excuse is not None for rerun in reruns),
        "duplicate_runs_unexplained": verdict.count("unexplained duplicate runs"),
        "duplicate_runs_by_cause": dict(sorted(Counter(rerun.cause for rerun in reruns).items())),
        "pauses_nobody_injected": sum(rerun.excuse in NOBODY_INJECTED for rerun in reruns),
        "slow_seconds": round(sum(end - start for start, end in history.slow), 1),
        "crowded_seconds": round(sum(end - start for start, end in history.crowded), 1),
        "overlapping_runs": len(verdict.overlaps),
        "rejected_late_writes": rejected(history),
        "resets": dict(sorted(Counter(filter(None, map(cause_of, owned))).items())),
        "false_resets": verdict.count("false resets"),
        "held": sum(event.event == "held" for event in history.events),
        "over_limit": verdict.count(flow_control.OVER_LIMIT),
        "instants": sum(row.schedule is not None for row in history.jobs.values()),
        "wrong_instants": verdict.count(flow_control.INSTANTS),
        "workflows": len(history.workflows),
        "batches": history.batches,
        "wrong_batches": verdict.count(flow_control.BATCHES),
        "lost_places": verdict.count(flow_control.PLACES),
        "held_up": verdict.count(HELD_UP),
        "longest_idle": round(max((until - since for _, since, until in history.idle), default=0.0), 2),
        "taken_back": by_fault(history, owned, taken_back=True),
        "recovery": by_fault(history, owned, taken_back=False),
        "recovery_after_connect": after_connect(history, owned),
        "queue_latency": percentiles(queue_latencies(history)),
        "messages_per_job": round(history.published / max(1, len(history.jobs)), 2),
        "drained_in": None if history.drained is None else round(history.drained - history.quiet_since, 2),
        "paths_seen": sorted(path for path in seen_paths(history) if not path.startswith("log: ")),
        "log_events": dict(sorted(history.log_events.items())),
        "findings": {rule: found[:20] for rule, found in verdict.findings.items() if found},
    }


def process_kills(history: History) -> int:
    """Return how many processes were killed, by the harness or by their own job."""
    kills = sum(len(fault.pids) for fault in history.faults if fault.fired and _is_kill(fault))
    return kills + sum(run.kind == "poisonous" for run in history.runs)


def _is_kill(fault: Fault) -> bool:
    return fault.name.startswith(("sigkill", "killed_"))


def rejected(history: History) -> dict[str, int]:
    """Count late writes that were refused, by kind."""
    writes = (event.detail.get("write") for event in history.events if event.event == "rejected")
    return dict(sorted(Counter(map(str, writes)).items()))


def by_fault(history: History, owned: list[Claim], *, taken_back: bool) -> dict[str, dict[str, float]]:
    """Return the seconds from a kill until its victims' jobs were taken back, or ran again.

    A job that was put off on purpose (from its second stall on) counts only as taken back.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for fault in history.faults:
        if _is_kill(fault):
            for claim in _victims(fault, owned):
                if taken_back and claim.end is not None:
                    found[fault.name].append(claim.end - fault.start)
                elif not taken_back and (again := _next_start(history, claim)) is not None:
                    found[fault.name].append(again - fault.start)
        elif not taken_back and fault.name in _BLOCKED:
            for runs in map(history.runs_of.__getitem__, fault.jobs):
                found[fault.name] += [again.start - runs[0].start for again in runs[1:2]]
    return {name: percentiles(seconds) for name, seconds in sorted(found.items())}


def after_connect(history: History, owned: list[Claim]) -> dict[str, dict[str, float]]:
    """Return the seconds from the connection of a pod's next life until its former jobs ran again."""
    found: dict[str, list[float]] = defaultdict(list)
    for fault in history.faults:
        if fault.name not in ("sigkill_parent", "sigkill_both"):
            continue
        births = (
            life.ticks[0]
            for life in history.lives
            if life.pod in fault.pods and life.ticks and life.ticks[0] > fault.start
        )
        born = min(births, default=None)
        for claim in _victims(fault, owned):
            again = _next_start(history, claim)
            if born is not None and again is not None:
                found[fault.name].append(max(0.0, again - born))
    return {name: percentiles(seconds) for name, seconds in sorted(found.items())}


def _victims(fault: Fault, owned: list[Claim]) -> Iterable[Claim]:
    for claim in owned:
        alive = claim.start <= fault.start + _CLOCK_SLACK_SECONDS
        held = claim.end is None or claim.end > fault.start
        lost = (cause_of(claim) or "").startswith("reset")
        if alive and held and lost and pid_of(claim.worker) in fault.pids:
            yield claim


def _next_start(history: History, claim: Claim) -> float | None:
    """Return when the job of a claim that was taken back ran again, unless it was put off."""
    if claim.last is None or claim.last.now not in ("queued", "processing"):
        return None
    starts = (run.start for run in history.runs_of.get(claim.job, []) if run.token > claim.token)
    return min(starts, default=None)


def queue_latencies(history: History) -> list[float]:
    """Return the seconds for which jobs that were never held waited in the queue for their first claim."""
    held = {event.job for event in history.events if event.event == "held"}
    first: dict[str, Move] = {}
    for move in sorted(history.moves, key=lambda move: move.seq):
        if move.is_claim:
            first.setdefault(move.job, move)
    rows = ((history.jobs.get(job), move) for job, move in first.items() if job not in held)
    return [move.at - row.created for row, move in rows if row is not None and row.workflow is None]


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum."""
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": round(ordered[math.ceil(0.5 * len(ordered)) - 1], 3),
        "p99": round(ordered[math.ceil(0.99 * len(ordered)) - 1], 3),
        "max": round(ordered[-1], 3),
    }
