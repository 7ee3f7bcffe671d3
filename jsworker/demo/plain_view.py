"""The demo's view where there is no terminal: one line for each key moment."""

from collections.abc import Hashable

from rich.console import Console
from rich.text import Text

from jsworker.demo.snapshot import Snapshot, WorkerView, jobs, thresholds_line


class PlainView:
    """Prints one line for each key moment: workers started, killed, a job run again, a repository done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[tuple[str, Hashable]] = set()

    def show(self, snapshot: Snapshot) -> None:
        """Print what has happened since the last snapshot."""
        self._say_once(snapshot, "thresholds", "", thresholds_line(snapshot.thresholds))
        for worker in snapshot.workers:
            self._show_worker(snapshot, worker)
        for place, recovery in enumerate(snapshot.recoveries):
            if recovery.worker:
                after = f"{recovery.seconds:.1f} s after the kill"
                words = f"{recovery.label} runs again on {recovery.worker}, {after}"
                self._say_once(snapshot, "recovery", place, words)
        for place, repository in enumerate(snapshot.repositories):
            if repository.completed == repository.jobs:
                words = f"{repository.name}: {repository.completed:,} of {jobs(repository.jobs)} completed"
                self._say_once(snapshot, "repository", place, words)

    def _show_worker(self, snapshot: Snapshot, worker: WorkerView) -> None:
        who = f"{worker.name} (process {worker.pid})"
        if worker.state == "running":
            self._say_once(snapshot, "running", worker.name, f"{who} runs")
        elif worker.state == "killed":
            words = f"{who} killed with SIGKILL while it owned {jobs(len(worker.running))}"
            self._say_once(snapshot, "killed", worker.name, words)

    def _say_once(self, snapshot: Snapshot, kind: str, subject: Hashable, words: str) -> None:
        if (kind, subject) in self._said:
            return
        self._said.add((kind, subject))
        self._console.print(Text(f"{snapshot.seconds:6.1f} s  {words}"), soft_wrap=True)
