import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from jsworker.demo.live import open_view, render
from jsworker.demo.snapshot import (
    Recovery,
    RepositoryProgress,
    RunningJob,
    Snapshot,
    Threshold,
    WorkerState,
    WorkerView,
)

THRESHOLDS = [Threshold("heartbeat", 0.5, 5), Threshold("crash", 1.5, 15), Threshold("stale", 2, 300)]


def snapshot(
    *,
    second: WorkerState = "running",
    completed: int = 3,
    repositories: int = 1,
    recoveries: Sequence[Recovery] = (),
) -> Snapshot:
    return Snapshot(
        seconds=4.25,
        thresholds=THRESHOLDS,
        repositories=[RepositoryProgress(f"project-{n}", completed, 48) for n in range(repositories)],
        workers=[
            WorkerView(
                "worker-1",
                4711,
                "running",
                2,
                [RunningJob("commit ab12", "count", 0.5), RunningJob("commit cd34")],
            ),
            WorkerView("worker-2", 4712, second, 1, [RunningJob("commit ef56", "list")]),
            WorkerView("worker-3", 4713, "starting", 0),
        ],
        recoveries=recoveries,
    )


def console(**options: Any) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, color_system=None, **options), out


def picture(shown: Snapshot, width: int = 100) -> str:
    page, out = console(width=width)
    page.print(render(shown))
    return out.getvalue()


def test_shows_repositories_workers_and_thresholds() -> None:
    text = picture(snapshot())

    assert "project-0" in text
    assert "3 of 48" in text
    assert "4.2 s" in text
    assert "worker-1  4711  running   2 done  ━━━━━━        commit ab12 (count) and 1 more" in text
    assert "worker-3  4713  starting  0 done" in text
    assert "in this demo      0.5 s  1.5 s    2 s" in text
    assert "by default          5 s   15 s  300 s" in text
    assert "killed" not in text


def test_shows_a_kill_and_each_recovery_with_its_seconds() -> None:
    text = picture(
        snapshot(
            second="killed",
            recoveries=[Recovery("commit ef56", 1.75), Recovery("commit 0a0b", 2.25, "worker-1")],
        )
    )

    assert "worker-2  4712  killed    1 done                1 job to take back" in text
    assert "commit ef56  1.8 s  waits" in text
    assert "commit 0a0b  2.2 s  runs again on worker-1" in text


@pytest.mark.parametrize("width", [50, 80, 132])
def test_fits_a_terminal_whatever_happens(width: int) -> None:
    recoveries = [
        Recovery(f"commit {n} {'long ' * 30}", 1.0, "worker-1" if n % 2 else None) for n in range(30)
    ]

    lines = picture(snapshot(second="killed", repositories=40, recoveries=recoveries), width).splitlines()

    assert max(map(len, lines)) <= width
    assert len(lines) <= 25
    assert any(line.startswith("35 more") for line in lines)
    assert any("120 of 1,920" in line for line in lines)
    assert any("25 more" in line and "13 run again" in line for line in lines)


def test_a_terminal_shows_the_last_moment_when_it_ends() -> None:
    page, out = console(width=100, force_terminal=True)

    with open_view(page) as view:
        view.show(snapshot(completed=3))
        view.show(snapshot(completed=48))

    assert "48 of 48" in out.getvalue().rpartition(" 3 of 48")[2]
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


@pytest.mark.parametrize(
    "options", [{"force_terminal": False}, {"force_terminal": True, "_environ": {"TERM": "dumb"}}]
)
def test_without_a_terminal_each_key_moment_is_one_line(options: dict[str, Any]) -> None:
    page, out = console(width=40, **options)
    waiting, again = Recovery("commit ef56", 1.0), Recovery("commit ef56", 2.25, "worker-1")

    with open_view(page) as view:
        view.show(snapshot(second="starting", completed=0))
        for _ in range(3):
            view.show(snapshot())
        for recovery in (waiting, waiting, again, again):
            view.show(snapshot(second="killed", recoveries=[recovery]))
        view.show(snapshot(second="killed", completed=48, recoveries=[again], repositories=2))

    assert out.getvalue().splitlines() == [
        "   4.2 s  Short for the demo: heartbeat 0.5 s · crash 1.5 s · stale 2 s (defaults: 5 · 15 · 300)",
        "   4.2 s  worker-1 (process 4711) runs",
        "   4.2 s  worker-2 (process 4712) runs",
        "   4.2 s  worker-2 (process 4712) killed with SIGKILL while it owned 1 job",
        "   4.2 s  commit ef56 runs again on worker-1, 2.2 s after the kill",
        "   4.2 s  project-0: 48 of 48 jobs completed",
        "   4.2 s  project-1: 48 of 48 jobs completed",
    ]
