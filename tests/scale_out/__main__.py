"""``python -m tests.scale_out``: take servers away under load, at default settings, and print the figures."""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jsworker.embedded import EmbeddedNats
from tests.faults.report import surroundings
from tests.scale_out.lost_commits import Aftermath, lose_commits
from tests.scale_out.nats_cluster import clustered
from tests.scale_out.pods import DEFAULTS
from tests.scale_out.scenarios import Figures, leader_killed, nodes_restarted, standby_promoted
from tests.support.servers import new_servers_folder

RATE = 100.0
BETWEEN = 500
PROMOTIONS = 3
KILLS = 6


def main() -> int:
    """Return 0 when nothing was lost but by PostgreSQL itself, and nothing was done twice; else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale_out", description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=SCENARIOS, help="some of the scenarios")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="jsworker-scale-out-"))
    names = options.only or list(SCENARIOS)
    results: list[dict[str, Any]] = []
    for name in names:
        found = asyncio.run(SCENARIOS[name](folder))
        _print(found)
        results += found
        if options.json:
            text = json.dumps({**surroundings(), "rate": RATE, "scenarios": results}, indent=2)
            options.json.write_text(f"{text}\n", encoding="utf-8")
    good = all(row["ok"] for row in results)
    if good:
        shutil.rmtree(folder)
    else:
        Console().print(f"records and logs: {folder}", markup=False, soft_wrap=True)
    return 0 if good else 1


async def _restarts(folder: Path) -> list[dict[str, Any]]:
    rows = []
    async with clustered() as cluster:
        for name, duck in (
            ("NATS: nodes restarted, SIGTERM", False),
            ("NATS: nodes restarted, lame duck", True),
        ):
            figures = await nodes_restarted(
                cluster, _new(folder), timing=DEFAULTS, rate=RATE, lame_duck=duck, between=BETWEEN
            )
            rows.append(_row(name, [figures]))
    return rows


async def _leader(folder: Path) -> list[dict[str, Any]]:
    async with clustered() as cluster:
        figures = await leader_killed(
            cluster, _new(folder), timing=DEFAULTS, rate=RATE, kills=KILLS, between=BETWEEN
        )
    return [_row("NATS: the stream's leader killed", [figures])]


async def _promotions(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for name, silent in (("killed", False), ("silent", True)):
        rounds = []
        for _ in range(PROMOTIONS):
            servers = new_servers_folder()
            with EmbeddedNats(servers / "nats") as nats:
                rounds.append(
                    await standby_promoted(
                        _new(folder), nats.url, timing=DEFAULTS, rate=RATE, between=BETWEEN, silent=silent
                    )
                )
            shutil.rmtree(servers)
        rows.append(_row(f"PostgreSQL: primary {name}, synchronous standby promoted", rounds))
    return rows


async def _lost_commits(folder: Path) -> list[dict[str, Any]]:
    servers = new_servers_folder()
    with EmbeddedNats(servers / "nats") as nats:
        after = await lose_commits(_new(folder), nats.url, timing=DEFAULTS, no_row_seconds=None)
    shutil.rmtree(servers)
    return [_lossy_row(after)]


SCENARIOS = {
    "restarts": _restarts,
    "leader": _leader,
    "promotions": _promotions,
    "lost-commits": _lost_commits,
}


def _new(folder: Path) -> Path:
    new = folder / f"run-{len(list(folder.iterdir()))}"
    new.mkdir()
    return new


def _row(name: str, rounds: Sequence[Figures]) -> dict[str, Any]:
    outcomes = [figures.outcome for figures in rounds]
    seconds = sorted(each for figures in rounds for each in figures.seconds())
    switched = [figures.switched for figures in rounds if figures.switched is not None]
    lost, twice = sum(each.lost for each in outcomes), sum(each.twice for each in outcomes)
    return {
        "scenario": name,
        "ok": lost == twice == 0,
        "events": len(seconds),
        "enqueued": sum(each.enqueued for each in outcomes),
        "unclear_calls": sum(each.unclear for each in outcomes),
        "lost": lost,
        "twice": twice,
        "first_new_completion_seconds": [round(each, 2) for each in seconds],
        "first_new_completion_median": round(statistics.median(seconds), 2),
        "first_new_completion_longest": round(seconds[-1], 2),
        "longest_gap_seconds": round(max(each.longest_gap() for each in outcomes), 2),
        "longest_wait_seconds": round(max(each.longest_wait() for each in outcomes), 2),
        "promoted_after_seconds": [round(each, 2) for each in switched],
        "database_changed": sum(len(figures.changes) for figures in rounds),
    }


def _lossy_row(after: Aftermath) -> dict[str, Any]:
    groups = after.groups
    kept, gone = groups.kept, groups.gone
    again = [job for job in kept if len(after.tokens[job]) > 1]
    completed = [job for job in kept if after.rows[job][0] == "completed"]
    return {
        "scenario": "PostgreSQL: standby promoted that lacked commits",
        "ok": len(completed) == len(kept) and max(after.completions.values()) == 1,
        "events": 1,
        "enqueued": len(kept) + len(gone),
        "lost": len(kept) - len(completed),
        "lost_by_postgresql": len(gone),
        "twice": sum(count > 1 for count in after.completions.values()),
        "kept": len(kept),
        "run_again": len(again),
        "dead_messages": len(after.dead),
        "kept_ended_after_seconds": round(after.seconds, 2),
        "database_changed": len(after.changes),
    }


def _print(results: Sequence[dict[str, Any]]) -> None:
    table = Table("scenario", "figure", "value")
    for row in results:
        for number, (name, value) in enumerate(row.items()):
            if name != "scenario":
                table.add_row(row["scenario"] if number == 1 else "", name.replace("_", " "), str(value))
        table.add_section()
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
