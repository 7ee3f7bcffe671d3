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
mostly measure the queue; the section with a kill every 6 s measures recovery itself. From its second stall on
a job waits out a back-off of 5 s.

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


_OF_ONE_FEATURE = {
    "limits_under_kills": """## Keys with limits under kills

{workers} workers, one of which is killed every {every:g} s, and {jobs:,} jobs of {keys} keys with limits of
1 to 3 (`python -m tests.faults.limits`). A trigger counts the runs of a key at each commit that begins one.
Runs write down when they begin and end; one whose worker was killed went on until then.
*Longest idle*: seconds for which a key had jobs and a free slot.
""",
    "schedules_under_kills": """## A schedule under kills

A schedule of every second, and three workers, one of which is killed every {every:g} s
(`python -m tests.faults.schedules`).
""",
    "workflows_under_kills": """## Workflows under kills

{workflows} workflows of two batches of 50 jobs and a last job, and three workers, one of which is killed
every {every:g} s (`python -m tests.faults.workflows`). *Told*: batches whose end stands in a worker's log,
which a kill may prevent.
""",
}
_PEERS = """## Limits beside peers under kill -9

One key with a limit of {limit}, {workers} worker processes, one of which is killed with `kill -9` every
{every:g} s, for {seconds:g} s (`python -m benchmarks.limits`). *Standstill* is the longest time in which jobs
waited and not one ran; *slots in use*: while processes were killed.
"""
_PEERS_COUNTS = {
    "kills": "{kills}",
    "runs": "{runs:,}",
    "limit exceeded": "{exceeded}",
    "most at once": "{most}",
    "slots in use": "{busy:.0%}",
    "standstill": "{standstill:.1f} s",
    "ended twice": "{twice}",
}


def document(results: list[dict[str, Any]]) -> str:
    """Return the page."""
    return "\n".join([_HEAD, *map(_section, results)])


def _section(result: dict[str, Any]) -> str:
    match list(result.items()):
        case [("defaults", found)]:
            return _defaults(found)
        case [("limits_beside_peers", found)]:
            return _beside_peers(found)
        case [(name, found)]:
            return _of_one_feature(_OF_ONE_FEATURE[name], found)
    return _run(result)


def _run(result: dict[str, Any]) -> str:
    late = _counted(result["rejected_late_writes"])
    surroundings = f"Seed {result['seed']}, commit {result['commit']}, Python {result['python']}"
    loops = " and ".join(result["event_loops"])
    slowed = "" if result["slowed"] == 1 else f"; {result['slowed']:g} × the time scale"
    lines = [
        f"## {_title(result)}",
        *([] if result["ok"] else ["", f"**Not everything was seen or well:** {_findings(result)}."]),
        "",
        f"{surroundings}, {result['machine']}, pods on {loops} in turn; {result['seconds']:.0f} s{slowed}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {result[name]} |" for label, name in _COUNTS),
        f"| late writes that were refused | {late} |",
        f"| seconds in the queue | {_seconds(result['queue_latency'])} |",
    ]
    if result["recovery"]:
        lines += ["", "| fault | seconds until its victims' jobs ran again |", "|---|---|"]
        lines += [
            f"| {name} | {_seconds(found)} |" for name, found in result["recovery"].items() if found["count"]
        ]
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
            *([f"Paths that had to be seen: {demanded(result)}.", ""] if result["must_see"] else []),
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


def _of_one_feature(setup: str, result: dict[str, Any]) -> str:
    surroundings = f"Commit {result['commit']}, Python {result['python']}, {result['machine']}"
    return "\n".join(
        [
            setup.format(**result["asked"]),
            *([] if result["ok"] else ["**Not everything was well:** see the table.", ""]),
            f"{surroundings}; {result['asked']['seconds']:.0f} s.",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {number:,} |" for name, number in result["found"].items()),
            "",
        ]
    )


def _beside_peers(result: dict[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    names = ("jsworker", "pgqueuer", "PostgreSQL", "nats-server")
    software = ", ".join(f"{name} {versions[name]}" for name in names)
    rows = [
        [name, *(count.format(**counts) for count in _PEERS_COUNTS.values())]
        for name, counts in result["systems"].items()
    ]
    return "\n".join(
        [
            _PEERS.format(**result["asked"]),
            f"{software}, Python {result['python']}; {machine['cpus']} CPUs ({machine['cpu_model']}).",
            "",
            f"| | {' | '.join(_PEERS_COUNTS)} |",
            "|---" * (len(_PEERS_COUNTS) + 1) + "|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
        ]
    )


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
