"""What the demo says before and after its live view: for people, or as one JSON object."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jsworker.demo.account import Account
from jsworker.demo.chart import ChartNotWritten, draw_charts
from jsworker.demo.git import shown
from jsworker.demo.report import lines_table, outcome_json, summary_table
from jsworker.demo.samples import RepositoryLines
from jsworker.demo.work import Project


class Output:
    """Where the demo speaks.

    Attributes:
        console: for people: standard output, or standard error when standard output belongs to JSON.
    """

    def __init__(self, *, json_output: bool) -> None:
        self._json_output = json_output
        self.console = Console(stderr=json_output)

    def complain(self, text: str) -> None:
        """Say on standard error what is wrong."""
        # A console whose print was interrupted may never write again: the complaint gets one of its own.
        Console(stderr=True).print(Text(text, style="red"), soft_wrap=True)

    def tell_beginning(self, projects: Sequence[Project], data: Path) -> None:
        """Say what is going to be counted, and where the servers keep their data."""
        for project in projects:
            first, last = project.commits[0], project.commits[-1]
            words = Text(project.repository.name, style="bold")
            words.append(
                f"  {_commits(len(project.commits), project.history)}, "
                f"{first.date:%Y-%m-%d} to {last.date:%Y-%m-%d}",
                style="not bold",
            )
            if project.repository.shallow:
                words.append(" (a shallow clone: older ones are not here)", style="not bold")
            self.console.print(words, soft_wrap=True)
        self._remark(f"Starting NATS and PostgreSQL in {shown(data)}")
        self.console.print()

    def tell_end(self, account: Account, *, charts: Path, data: Path) -> bool:
        """Say what was counted and what came of it; tell whether all is well.

        Args:
            account: what the run came to.
            charts: the folder to draw the charts into.
            data: the data folder, for the command that looks at the jobs afterwards.
        """
        counted = [each for each in account.outcome.repositories if each.samples]
        complaints = list(account.complaints)
        if not self._json_output:
            self._tell_tables(counted)
        try:
            self._tell_charts(counted, charts)
        except ChartNotWritten as error:
            complaints.append(str(error))
        if self._json_output:
            sys.stdout.write(f"{json.dumps(outcome_json(account.outcome), ensure_ascii=False)}\n")
            sys.stdout.flush()
        else:
            self._tell_summary(account, data)
        for remark in account.remarks:
            self._remark(remark)
        for complaint in complaints:
            self.complain(complaint)
        return not complaints

    def _tell_tables(self, repositories: Sequence[RepositoryLines]) -> None:
        for repository in repositories:
            self.console.print()
            self.console.print(lines_table(repository, self.console.width))
        self.console.print()

    def _tell_charts(self, repositories: Sequence[RepositoryLines], folder: Path) -> None:
        for svg, png in draw_charts(repositories, folder):
            self._remark(f"Chart: {shown(svg)} and {shown(png.name)}")

    def _tell_summary(self, account: Account, data: Path) -> None:
        self.console.print()
        self.console.print(summary_table(account.outcome))
        self.console.print()
        job = account.recovered_job
        look = ["jsworker", "job", str(job)] if job else ["jsworker", "jobs"]
        command = shlex.join(["jsworker", "dev", "--data", str(data), "--", *look])
        self._remark(f"{'What befell a recovered job' if job else 'All jobs'}: {command}")

    def _remark(self, text: str) -> None:
        self.console.print(Text(text, style="dim"), soft_wrap=True)


def _commits(chosen: int, history: int) -> str:
    if chosen == history:
        return "its only commit" if history == 1 else f"all {history:,} commits"
    return f"{chosen:,} of {history:,} commits"


def open_chart_folder(folder: Path) -> None:
    """Make the folder for the charts now: nobody wants to learn after all the work that it cannot be used.

    Raises:
        ChartNotWritten: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ChartNotWritten(f"chart folder {shown(folder)}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ChartNotWritten(f"chart folder {shown(folder)}: no permission to write")
