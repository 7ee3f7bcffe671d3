"""Shows the demo while it runs: one line for each key moment, and progress bars on a terminal."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from code_evolution.watch import Watch
from code_evolution.workers import WorkerProcess

_BAR_WIDTH = 24
_JOB_BAR_WIDTH = 12

Show = Callable[[Watch, Sequence[WorkerProcess]], None]


@contextmanager
def open_view(console: Console) -> Iterator[Show]:
    """Print key moments as lines; on a terminal progress bars stand below them."""
    moments = KeyMoments(console)
    if not console.is_terminal or console.is_dumb_terminal:
        yield moments.show
        return
    with Live(console=console, auto_refresh=False) as live:

        def show(watch: Watch, workers: Sequence[WorkerProcess]) -> None:
            moments.show(watch, workers)
            live.update(render(watch, workers), refresh=True)

        yield show


class KeyMoments:
    """Prints one line for each key moment: workers started, killed, a job run again, a repository done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[Hashable] = set()

    def show(self, watch: Watch, workers: Sequence[WorkerProcess]) -> None:
        """Print what has happened since the last call."""
        names = {worker.id: worker.name for worker in workers}
        for worker in workers:
            who = f"{worker.name} (process {worker.process.pid})"
            if worker.state == "running":
                self._print_once(watch, ("running", who), f"{who} runs")
            elif worker.killed and watch.kill:
                owned = jobs(len(watch.kill.held))
                self._print_once(watch, ("killed", who), f"{who} killed with SIGKILL while it owned {owned}")
        for place, each in enumerate(watch.recoveries()):
            if each.worker_id:
                again = f"{each.label} runs again on {names.get(each.worker_id, each.worker_id)}"
                after = f"{each.seconds:.1f} s after the kill"
                self._print_once(watch, ("recovery", place), f"{again}, {after}")
        for place, (name, completed, total) in enumerate(watch.progress()):
            if completed == total:
                done = f"{name}: {completed:,} of {jobs(total)} completed"
                self._print_once(watch, ("repository", place), done)

    def _print_once(self, watch: Watch, moment: Hashable, text: str) -> None:
        if moment not in self._printed:
            self._printed.add(moment)
            self._console.print(Text(f"{watch.seconds:6.1f} s  {text}"), soft_wrap=True)


def jobs(count: int) -> str:
    """Return a number of jobs in words."""
    return "1 job" if count == 1 else f"{count:,} jobs"


def render(watch: Watch, workers: Sequence[WorkerProcess]) -> RenderableType:
    """Return the progress bars of this moment."""
    repositories = _grid(3, elastic=0)
    for name, done, total in watch.progress():
        style = "green" if done == total else "cyan"
        bar = ProgressBar(total, done, _BAR_WIDTH, complete_style=style, finished_style="green")
        repositories.add_row(_cut(name, "bold"), bar, Text(f"{done:,} of {total:,}", justify="right"))
    completed = Counter(row.result["pid"] for _, row in watch.completed())
    processes = _grid(6, elastic=5)
    for worker in workers:
        job_bar, work = _bar_and_work(watch, worker)
        processes.add_row(
            _cut(worker.name, "bold"),
            Text(str(worker.process.pid), style="dim", justify="right"),
            Text(worker.state, style={"running": "green", "killed": "bold red"}.get(worker.state, "dim")),
            Text(f"{completed[worker.process.pid]:,} done", justify="right"),
            job_bar or "",
            _cut(work, "red" if worker.killed else ""),
        )
    return Group(repositories, Text(f"{watch.seconds:.1f} s\n", style="dim"), processes)


def _bar_and_work(watch: Watch, worker: WorkerProcess) -> tuple[ProgressBar | None, str]:
    """Return how far the worker's first job is, and the jobs that it owns in words."""
    if worker.killed:
        waiting = sum(1 for each in watch.recoveries() if each.worker_id is None)
        return None, f"{jobs(waiting)} to take back" if waiting else ""
    owned = sorted(job for job, row in watch.live.items() if row.worker_id == worker.id)
    if worker.id is None or not owned:
        return None, ""
    first = watch.live[owned[0]]
    stage = f" ({first.stage})" if first.stage else ""
    more = f" and {len(owned) - 1} more" if len(owned) > 1 else ""
    bar = ProgressBar(1.0, first.progress or 0.0, _JOB_BAR_WIDTH)
    return bar, f"{watch.tasks[owned[0]].label}{stage}{more}"


def _grid(columns: int, *, elastic: int) -> Table:
    """Return a table without lines, of which one column gives way when the terminal is narrow."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for place in range(columns):
        grid.add_column(no_wrap=place != elastic)
    return grid


def _cut(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)
