"""``python -m benchmarks``: what it accepts, and a small real run to its file, table and chart."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as command
from benchmarks import measures
from benchmarks.figures import RAW, Figure
from benchmarks.measures import throughput


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "a,z"], "no measure is called 'z'; there are a, b, c"),
        (["--only", ","], "name at least one measure"),
        (["--rounds", "0"], "'0' must be a whole number from 1"),
        (["--only", "a", "--full"], "exclude each other"),
        (["--chart", "folder"], "give --json"),
        (["--quickly"], "unrecognized arguments: --quickly"),
    ],
)
def test_wrong_usage_is_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(arguments)

    written = capsys.readouterr()
    assert left.value.code == 2
    assert reason in written.err
    assert written.err.count("\n") == 1
    assert written.out == ""


def test_a_file_of_somebody_else_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.json"
    path.write_text("no json")

    with pytest.raises(SystemExit) as left:
        command.main(["--only", "a", "--json", str(path)])

    assert left.value.code == 2
    assert str(path) in capsys.readouterr().err
    assert path.read_text() == "no json"


def test_every_letter_has_its_module() -> None:
    found = {letter: measures.measure_of(letter) for letter in measures.MODULES}

    assert [loaded.LETTER for loaded in found.values()] == list(measures.MODULES)
    assert all(loaded.TITLE for loaded in found.values())


@pytest.mark.thorough
def test_a_run_ends_in_table_file_and_chart_and_tells_who_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _only(monkeypatch, partial(throughput.measure, jobs=400, systems=["absent", RAW]))

    code = command.main(
        ["--only", "a", "--rounds", "1", "--json", str(tmp_path / "b.json"), "--chart", str(tmp_path)]
    )

    out = capsys.readouterr().out
    measured = json.loads((tmp_path / "b.json").read_text())["measures"]["a"]
    assert code == 1
    assert throughput.TITLE in out
    assert "\nabsent: failed: " in out
    assert measured["failures"] == ["absent: failed: 'absent'"]
    assert [(figure["system"], len(figure["values"])) for figure in measured["figures"]] == [(RAW, 1)]
    assert measured["postgresql_settings"]["fsync"] == "on"
    assert (tmp_path / "benchmarks.svg").exists()


def test_a_run_without_failures_exits_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _only(monkeypatch, lambda rounds, _show: [Figure("a", "speed", RAW, "jobs/s", (1.0,) * rounds)])

    assert command.main(["--only", "a", "--rounds", "2"]) == 0
    assert "1.00 jobs/s" in capsys.readouterr().out


def test_a_measure_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(rounds: int, show: Callable[[str], None]) -> None:
        show("on it")
        raise RuntimeError(f"not even {rounds} round")

    _only(monkeypatch, broken)

    assert command.main(["--only", "a,b", "--rounds", "1"]) == 1
    assert capsys.readouterr().out.count("failed: not even 1 round") == 2


def _only(monkeypatch: pytest.MonkeyPatch, measure: Callable[..., object]) -> None:
    loaded = SimpleNamespace(LETTER="a", TITLE=throughput.TITLE, measure=measure)
    monkeypatch.setattr(measures, "measure_of", lambda _letter: loaded)
