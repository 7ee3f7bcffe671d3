"""The comparison of limits under kills: what a journal says, and each system for a few seconds."""

from pathlib import Path

import pytest
from rich.progress import Progress

from benchmarks.limits import __main__ as command
from benchmarks.limits import journal
from benchmarks.limits.systems import SYSTEMS


def written(folder: Path, *lines: str) -> Path:
    path = folder / "journal"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_what_a_journal_says(tmp_path: Path) -> None:
    second = 10**9
    path = written(
        tmp_path,
        f"{1 * second} begin 7 a",
        f"{2 * second} begin 8 b",
        f"{3 * second} begin 8 c",  # the third of two: 7 was killed, but later
        f"{5 * second} end 8 b",
        f"{6 * second} end 8 c",
        f"{9 * second} begin 9 a",
        f"{10 * second} end 9 a",
        f"{11 * second} begin 9 b",
        f"{12 * second} end 9 b",
    )
    found = journal.judge(path, {7: 4.0}, limit=2, kills_ended=6.0, settled=8.0, until=13.0)
    assert (found.runs, found.ended, found.twice) == (5, 3, 1)
    assert (found.exceeded, found.most, found.most_afterwards) == (1, 3, 1)
    assert found.standstill == 3.0
    assert found.busy == pytest.approx((1 + 2 + 2 + 2 + 1) / (2 * 5))


def test_a_journal_without_a_run(tmp_path: Path) -> None:
    found = journal.judge(written(tmp_path), {}, limit=2, kills_ended=6.0, settled=8.0, until=13.0)
    assert (found.runs, found.exceeded, found.busy) == (0, 0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SYSTEMS)
def test_each_system_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(command, "_WATCH_SECONDS", 1.0)
    found, kills = command.measure(SYSTEMS[name], seconds=8.0, every=2.0, progress=Progress())
    assert kills >= 3
    assert found.ended > 0
