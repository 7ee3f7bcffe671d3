"""``python -m tests.faults.document RESULTS FILE`` writes docs/reliability.md from the results of runs."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.faults.report import demanded

_HEAD = """# Reliability, measured

This page is written by `make chaos` (`python -m tests.faults.document`); do not edit it. What a fault run
does, and how its history is judged, stands in [tests/faults](../tests/faults). Servers and workers
are real processes: two supervisors with two workers of eight job slots each, all on the servers' own machine.
Time scale: heartbeat 0.3 s, crash threshold 0.9 s, stale threshold 2 s, scan 0.4 s, watchdog 1.5 s.

Where processes die faster than two cores can start new ones, jobs queue, and the seconds until they run again
tell of the queue: the calm run tells of recovery. From its second stall on a job waits out a back-off of 5 s.

Among the jobs are some with a limit (four keys, one to three at once), some with a rate (5 a second), one of
each second by a schedule, and workflows of four nodes, one of which adds members to its batch; operators
pause keys and retry what has failed. SQL in [flow_control.py](../tests/faults/flow_control.py) looks, at
commits and every half second, whether no key has more runs than its limit, each instant has one job, and each
batch finishes once, after its last member. Something is left alone when nobody claims what a key may begin,
finishes a batch or fires a schedule for 15 s in which the database can be reached and the machine is not too
busy.
"""

_CALM_SECONDS = 3.0
_COUNTS = (
    ("jobs a second", "rate"),
    ("jobs", "jobs"),
    ("processes killed", "process_kills"),
    ("jobs lost", "lost"),
    ("jobs completed twice", "completed_twice"),
    ("innocent jobs that failed", "innocents_failed"),
    ("duplicate runs that a fault, an error or a release explains", "duplicate_runs_explained"),
    ("of these, only by a busy machine", "pauses_nobody_injected"),
    ("duplicate runs that nothing explains", "duplicate_runs_unexplained"),
    ("false resets", "false_resets"),
    ("times a job was held for a limit, a rate or a pause", "held"),
    ("moments with more runs of a key than its limit", "over_limit"),
    ("jobs of the schedule", "instants"),
    ("instants without a job, or with two", "wrong_instants"),
    ("workflows", "workflows"),
    ("ends of their batches, again after a retry too", "batches"),
    ("batches that did not finish once, after their last member", "wrong_batches"),
    ("held jobs that lost their place in the order", "lost_places"),
    ("times that something was left alone", "held_up"),
    ("messages published for each job", "messages_per_job"),
)


def document(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    pages = [_defaults(result["defaults"]) if "defaults" in result else _run(result) for result in results]
    return "\n".join([_HEAD, *pages])


def _run(result: dict[str, Any]) -> str:
    late = _counted(result["rejected_late_writes"])
    surroundings = f"Seed {result['seed']}, commit {result['commit']}, Python {result['python']}"
    loops = " and ".join(result["event_loops"])
    lines = [
        f"## {_title(result)}",
        *([] if result["ok"] else ["", f"**Not everything was seen or well:** {_findings(result)}."]),
        "",
        f"{surroundings}, {result['machine']}, pods on {loops} in turn; {result['seconds']:.0f} s.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {result[name]} |" for label, name in _COUNTS),
        f"| late writes that were refused | {late} |",
        f"| seconds in the queue | {_seconds(result['queue_latency'])} |",
    ]
    if result["recovery"]:
        lines += ["", "| fault | seconds until its victims' jobs ran again |", "|---|---|"]
        lines += [f"| {name} | {_seconds(found)} |" for name, found in result["recovery"].items()]
        lines += [
            f"| {name}, from the next life's connection | {_seconds(found)} |"
            for name, found in result["recovery_after_connect"].items()
        ]
    return "\n".join(
        [
            *lines,
            "",
            f"Faults: {_counted(result['faults'])}.",
            "",
            f"Paths that had to be seen: {demanded(result)}.",
            "",
        ]
    )


def _findings(result: dict[str, Any]) -> str:
    found = (f"{name}: {line[0]} {line[1]}" for name, lines in result["findings"].items() for line in lines)
    return "; ".join(found)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _title(result: dict[str, Any]) -> str:
    if not result["faults"]:
        return "No fault at all"
    if any(name.startswith("cluster_") for name in result["faults"]):
        return "Three nats-servers"
    if result["kill_seconds"] > _CALM_SECONDS:
        return f"A kill every {result['kill_seconds']:g} s: how fast jobs run again"
    return f"A kill every {result['kill_seconds']:g} s, then every other fault: is anything lost?"


def _defaults(result: dict[str, Any]) -> str:
    away, back = result["without_restart_seconds"], result["with_restart_seconds"]
    told = f"A killed pod's jobs ran again after {away} s when it stayed away"
    return f"## Default settings, in real time\n\n{told}, and {back} s after its next life began.\n"


def _seconds(found: dict[str, float]) -> str:
    if not found["count"]:
        return "none"
    percentiles = f"median {found['p50']:.2f}, p99 {found['p99']:.2f}, longest {found['max']:.2f}"
    return f"{percentiles} ({found['count']:.0f})"


def main() -> None:
    """Read the results and write the page."""
    source, target = map(Path, sys.argv[1:])
    results = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    target.write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main()
