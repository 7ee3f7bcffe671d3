"""What a run found can be read by people, by machines and on the page that publishes it."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.faults.campaign import EVERY_PATH, Plan
from tests.faults.checker import check
from tests.faults.document import document
from tests.faults.figures import figures
from tests.faults.history import Fault, History
from tests.faults.journal import Journal
from tests.faults.nemeses.processes import has_obeyed
from tests.faults.report import print_report, surroundings, write_json
from tests.faults.test_checker import HEARTBEAT, recovered


def result_of(history: History) -> dict[str, object]:
    verdict = check(history, heartbeat_interval=HEARTBEAT)
    planned = {"rate": 20.0, "kill_seconds": 1.2, "must_see": sorted(history.must_see)}
    return {"ok": verdict.ok, **planned, **surroundings(42), **figures(history, verdict)}


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
