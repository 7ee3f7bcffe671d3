"""Tables and the JSON file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.figures import JSWORKER, RAW, Figure

OURS = Figure("a", "no-op", JSWORKER, "jobs/s", (10.0, 40.0, 60.0), note="defaults")
BARE = Figure("a", "no-op", RAW, "jobs/s", (100.0, 50.0, 100.0))
BROKEN = Figure("a", "", "slowpoke", "", (), note="failed: out of memory")
FACTS: dict[str, Any] = {"machine": {"cpus": 2}, "python": "3.11.7"}


def test_the_ratio_is_taken_round_by_round() -> None:
    assert report.ratio_text(OURS, [OURS, BARE]) == "0.60"  # of the medians it would be 0.40


def test_no_ratio_without_the_raw_loop_in_the_same_figure() -> None:
    other = Figure("a", "else", RAW, "jobs/s", (1.0, 1.0, 1.0))

    assert report.ratio_text(OURS, [OURS, other]) == ""


def test_the_table_shows_the_best_first_with_its_range() -> None:
    lines = _lines([OURS, BARE, BROKEN])

    rows = [line.split() for line in lines if "jobs/s" in line]
    assert rows == [
        ["raw", "loop", "100", "jobs/s", "50.0", "–", "100", "1.00"],
        ["jsworker", "40.0", "jobs/s", "10.0", "–", "60.0", "0.60"],
    ]
    assert "  jsworker: defaults" in lines
    assert max(map(len, lines)) <= 80


def test_notes_are_told_once() -> None:
    again = replace(OURS, name="again")
    otherwise = replace(OURS, name="otherwise", note="tuned")

    lines = _lines([OURS, again, otherwise])

    assert lines.count("  jsworker: defaults") == 1
    assert lines.count("  jsworker: tuned") == 1


def test_less_is_better_for_times() -> None:
    fast = Figure("d", "start", "fast", "ms", (1.0,), more_is_better=False)
    slow = Figure("d", "start", "slow", "ms", (2.0,), more_is_better=False)

    assert report.best_first([slow, fast]) == [fast, slow]


def test_a_failure_is_one_line() -> None:
    assert report.failures([OURS, BROKEN]) == ["slowpoke: failed: out of memory"]


@pytest.mark.parametrize(
    ("value", "text"), [(21934.4, "21,934"), (100.0, "100"), (17.44, "17.4"), (2.449, "2.45"), (0.0, "0.00")]
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_file_keeps_the_other_measures(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    _merge(path, "c", [Figure("c", "one call", RAW, "jobs/s", (7.0,))])
    _merge(path, "a", [OURS, BARE, BROKEN])
    _merge(path, "c", [Figure("c", "one call", RAW, "jobs/s", (8.0,))])

    held = json.loads(path.read_text())["measures"]
    assert list(held) == ["a", "c"]
    assert held["c"]["figures"][0]["values"] == [8.0]
    assert held["a"]["machine"] == {"cpus": 2}
    assert held["a"]["failures"] == ["slowpoke: failed: out of memory"]
    assert [figure["ratio_to_raw_loop"] for figure in held["a"]["figures"]] == [0.6, 1.0]
    assert report.figures_of(report.read(path), "a") == [OURS, BARE]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("[1]")

    with pytest.raises(ValueError, match="no file of benchmarks"):
        report.read(path)


def _merge(path: Path, letter: str, figures: list[Figure]) -> None:
    report.merge(path, letter, figures, title="title", rounds=3, facts=FACTS)


def _lines(figures: list[Figure]) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(report.tables("a", "No-op", figures))
    return [line.rstrip() for line in captured.get().splitlines()]
