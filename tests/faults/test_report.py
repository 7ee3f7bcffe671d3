"""What a run found can be read by people, by machines and on the page that publishes it."""

import argparse
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.faults.campaign import EVERY_PATH, TIME_SCALE, Plan, fleet_settings
from tests.faults.checker import check
from tests.faults.document import document
from tests.faults.figures import figures
from tests.faults.history import Fault, History
from tests.faults.journal import Journal
from tests.faults.nemeses.processes import has_obeyed
from tests.faults.report import close_run, print_report, surroundings, write_json
from tests.faults.test_checker import HEARTBEAT, recovered


def result_of(history: History) -> dict[str, object]:
    verdict = check(history, heartbeat_interval=HEARTBEAT)
    planned = {"rate": 20.0, "kill_seconds": 1.2, "slowed": 3.0, "must_see": sorted(history.must_see)}
    return {"ok": verdict.ok, **planned, "seed": 42, **surroundings(), **figures(history, verdict)}


def printed(history: History) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(result_of(history), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_of_a_good_run() -> None:
    told = printed(recovered())
    assert "verdict: good" in told
    assert "p50 2.40  p99 2.40  max 2.40 s  (1)" in told


def test_the_report_tells_which_paths_the_verdict_demanded() -> None:
    history = recovered()
    assert "had to be seen: reset: stale" in printed(history)
    assert "had to be seen: reset: stale" in document([result_of(history)])
    history.must_see = frozenset()
    assert "had to be seen: none: not a long run" in printed(history)


def test_the_page_says_how_much_longer_the_times_of_a_run_were() -> None:
    assert "; 3 × the time scale.\n" in document([result_of(recovered())])
    times = Plan(seed=1, slowed=3.0).times
    assert times == {name: 3.0 * seconds for name, seconds in TIME_SCALE.items()}
    assert fleet_settings(Plan(seed=1, slowed=3.0)).items() >= times.items()


def test_paths_are_demanded_of_long_runs_only() -> None:
    assert Plan(seed=1, kills=500).must_see == EVERY_PATH
    assert Plan(seed=1, kills=60).must_see == frozenset()
    assert Plan(seed=1, kills=500, only=("poison",)).must_see == frozenset()


def test_a_strike_counts_when_the_struck_process_has_written_it_down(tmp_path: Path) -> None:
    record = Journal(tmp_path, "run")
    record.note("tick")
    assert not has_obeyed(tmp_path, [os.getpid()], "after_reset_before_wake")
    record.note("struck", point="after_reset_before_wake", signal=9)
    record.close()
    assert has_obeyed(tmp_path, [1, os.getpid()], "after_reset_before_wake")
    assert not has_obeyed(tmp_path, [os.getpid()], "after_claim_before_run")
    assert not has_obeyed(tmp_path, [1], "after_reset_before_wake")


def test_the_table_of_a_bad_run_names_rule_and_job() -> None:
    history = recovered()
    history.jobs["b"] = replace(history.jobs["b"], status="queued")
    told = printed(history)
    assert "verdict: bad" in told
    assert "two was promised and is queued" in told


def test_each_run_is_one_line_of_json(tmp_path: Path) -> None:
    for _ in range(2):
        write_json(result_of(recovered()), tmp_path / "results")
    first, second = (tmp_path / "results").read_text().splitlines()
    assert json.loads(first)["seed"] == 42
    assert json.loads(first) == json.loads(second)


def test_the_page_tells_figures_seed_and_faults() -> None:
    quiet = recovered()
    quiet.faults.clear()
    cluster = recovered()
    cluster.faults.append(Fault("cluster_leader_killed", 1.0, 2.0, frozenset({"nats"})))
    defaults = {"defaults": {"without_restart_seconds": 17.1, "with_restart_seconds": 2.2}}
    page = document([*map(result_of, (recovered(), cluster, quiet)), defaults])
    for title in ("A kill every 1.2 s, then", "Three nats-servers", "No fault at all", "Default settings"):
        assert f"## {title}" in page
    assert "| jobs lost | 0 |" in page
    assert "| sigkill_child | median 2.40, p99 2.40, longest 2.40 (1) |" in page
    assert "Seed 42" in page
    assert "ran again after 17.1 s" in page


def closed(
    folder: Path, name: str, asked: dict[str, Any], found: dict[str, Any], *, ok: bool = True
) -> tuple[int, str]:
    """The exit code of a run of one feature, and the page of its result alone."""
    file = folder / name
    code = close_run(name, argparse.Namespace(**asked, json=file), found, ok=ok)
    return code, document([json.loads(line) for line in file.read_text().splitlines()])


@pytest.mark.parametrize(
    ("name", "asked", "tells"),
    [
        (
            "limits_under_kills",
            {"workers": 8, "keys": 40, "jobs": 5000},
            "8 workers, one of which is killed every 2 s, and 5,000 jobs of 40 keys with",
        ),
        ("schedules_under_kills", {}, "three workers, one of which is killed every 2 s"),
        ("workflows_under_kills", {"workflows": 200}, "200 workflows of two batches of 50 jobs"),
    ],
)
def test_runs_of_one_feature_are_on_the_page(
    name: str, asked: dict[str, Any], tells: str, tmp_path: Path
) -> None:
    code, page = closed(tmp_path, name, {"seconds": 60.0, "every": 2.0, **asked}, {"kills": 1234})
    assert code == 0
    assert tells in page
    assert "| kills | 1,234 |" in page
    assert f"Commit {surroundings()['commit']}" in page
    assert "; 60 s." in page
    assert "Not everything" not in page


def test_a_bad_run_of_one_feature_is_called_bad(tmp_path: Path) -> None:
    asked = {"seconds": 60.0, "every": 2.0}
    code, page = closed(tmp_path, "schedules_under_kills", asked, {"without a job": 3}, ok=False)
    assert code == 1
    assert "**Not everything was well:**" in page
    assert "| without a job | 3 |" in page


def test_without_a_file_a_run_of_one_feature_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert close_run("schedules_under_kills", argparse.Namespace(json=None), {"kills": 3}, ok=True) == 0
    assert capsys.readouterr().out == "{'kills': 3}\n"


def test_limits_beside_peers_are_on_the_page() -> None:
    own = {"runs": 4935, "exceeded": 0, "most": 4, "busy": 0.664, "standstill": 1.62, "twice": 0, "kills": 45}
    peers = own | {"exceeded": 7, "most": 11, "twice": 13}
    result = {
        "asked": {"seconds": 45.0, "every": 1.0, "workers": 4, "limit": 4},
        "python": "3.11.7",
        "machine": {"cpus": 2, "cpu_model": "a processor"},
        "versions": {"jsworker": "1.0", "pgqueuer": "0.26", "PostgreSQL": "18.4", "nats-server": "2.15.1"},
        "systems": {"jsworker": own, "pgqueuer": peers},
    }
    page = document([{"limits_beside_peers": result}])
    assert "One key with a limit of 4, 4 worker processes, one of which is killed" in page
    assert "jsworker 1.0, pgqueuer 0.26, PostgreSQL 18.4, nats-server 2.15.1, Python 3.11.7; 2 CPUs" in page
    assert "| jsworker | 45 | 4,935 | 0 | 4 | 66% | 1.6 s | 0 |" in page
    assert "| pgqueuer | 45 | 4,935 | 7 | 11 | 66% | 1.6 s | 13 |" in page
