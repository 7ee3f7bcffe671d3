"""The demo's live view: how far the repositories are, what each worker does, recoveries as they happen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jsworker.demo.plain_view import PlainView
from jsworker.demo.snapshot import Recovery, Snapshot, Threshold, WorkerView, jobs

MOST_REPOSITORIES = 5
MOST_RECOVERIES = 5

_BAR_WIDTH = 24
_JOB_BAR_WIDTH = 12


class View(Protocol):
    """Whoever shows snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show how things stand now."""
        ...


@contextmanager
def open_view(console: Console) -> Iterator[View]:
    """Open the live view on a terminal, or plain lines for the key moments where there is none.

    Args:
        console: where to show it; standard error, when standard output belongs to ``--json``.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield PlainView(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _LiveView(live)


class _LiveView:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(render(snapshot), refresh=True)


def render(snapshot: Snapshot) -> RenderableType:
    """Return the picture of one moment."""
    parts: list[RenderableType] = [
        _repositories(snapshot),
        Padding(_workers(snapshot.workers), (1, 0, 0, 0), expand=False),
    ]
    if snapshot.recoveries:
        parts.append(Padding(_recoveries(snapshot.recoveries), (1, 0, 0, 0), expand=False))
    parts.append(Padding(_thresholds(snapshot.thresholds), (1, 0, 0, 0), expand=False))
    return Group(*parts)


def _repositories(snapshot: Snapshot) -> RenderableType:
    grid = _grid(3, elastic=0)
    shown = snapshot.repositories[:MOST_REPOSITORIES]
    for repository in shown:
        _add_bar(grid, repository.name, repository.completed, repository.jobs)
    left = snapshot.repositories[MOST_REPOSITORIES:]
    if left:
        _add_bar(grid, f"{len(left)} more", sum(r.completed for r in left), sum(r.jobs for r in left))
    if len(snapshot.repositories) > 1:
        everything = snapshot.repositories
        _add_bar(grid, "all", sum(r.completed for r in everything), sum(r.jobs for r in everything))
    return Group(grid, Text(f"{snapshot.seconds:.1f} s", style="dim"))


def _add_bar(grid: Table, name: str, completed: int, total: int) -> None:
    style = "green" if completed == total else "cyan"
    bar = ProgressBar(
        total=max(total, 1),
        completed=completed,
        width=_BAR_WIDTH,
        complete_style=style,
        finished_style="green",
    )
    grid.add_row(_cut(name, style="bold"), bar, Text(f"{completed:,} of {total:,}", justify="right"))


def _workers(workers: Sequence[WorkerView]) -> RenderableType:
    grid = _grid(6, elastic=5)
    for worker in workers:
        style = {"running": "green", "killed": "bold red"}.get(worker.state, "dim")
        grid.add_row(
            _cut(worker.name, style="bold"),
            Text(str(worker.pid), style="dim", justify="right"),
            Text(worker.state, style=style),
            Text(f"{worker.completed:,} done", justify="right"),
            _job_bar(worker),
            _cut(_in_hand(worker), style="red" if worker.state == "killed" else ""),
        )
    return grid


def _job_bar(worker: WorkerView) -> RenderableType:
    """Return how far the worker's first job is."""
    if not worker.running or worker.state == "killed":
        return ""
    return ProgressBar(total=1.0, completed=worker.running[0].progress or 0.0, width=_JOB_BAR_WIDTH)


def _in_hand(worker: WorkerView) -> str:
    if not worker.running:
        return ""
    if worker.state == "killed":
        return f"{jobs(len(worker.running))} to take back"
    first, *more = worker.running
    stage = f" ({first.stage})" if first.stage else ""
    return f"{first.label}{stage}" + (f" and {len(more)} more" if more else "")


def _recoveries(recoveries: Sequence[Recovery]) -> RenderableType:
    grid = _grid(3, elastic=0)
    for recovery in recoveries[:MOST_RECOVERIES]:
        fate = (
            Text(f"runs again on {recovery.worker}", style="green")
            if recovery.worker
            else Text("waits", style="red")
        )
        grid.add_row(_cut(recovery.label), Text(f"{recovery.seconds:.1f} s", justify="right"), fate)
    left = recoveries[MOST_RECOVERIES:]
    if left:
        again = sum(1 for recovery in left if recovery.worker)
        grid.add_row(Text(f"{len(left)} more"), Text(), Text(f"{again} run again" if again else "wait"))
    return Group(Text("Jobs of the killed worker, seconds since the kill", style="dim"), grid)


def _thresholds(thresholds: Sequence[Threshold]) -> RenderableType:
    grid = _grid(len(thresholds) + 1, elastic=0)
    grid.style = "dim"
    rows = [
        ("", [each.name for each in thresholds]),
        ("in this demo", [f"{each.seconds:g} s" for each in thresholds]),
        ("by default", [f"{each.default_seconds:g} s" for each in thresholds]),
    ]
    for head, cells in rows:
        grid.add_row(head, *(Text(cell, justify="right") for cell in cells))
    return grid


def _grid(columns: int, *, elastic: int) -> Table:
    """Return a table without lines, of which one column gives way when the terminal is narrow."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for place in range(columns):
        grid.add_column(no_wrap=place != elastic)
    return grid


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)
