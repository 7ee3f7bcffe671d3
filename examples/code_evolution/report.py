"""What the demo prints before and after the work: tables for people, or one JSON object."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from code_evolution.chart import ChartNotWritten, draw_charts
from code_evolution.git import shown
from code_evolution.history import Repository, evenly
from code_evolution.outcome import OTHER, Outcome, RepositoryLines
from code_evolution.workers import SHORT
from jsworker import Settings

MOST_ROWS = 12

_PADDING = 2
_DATE_AND_COMMIT = 10 + _PADDING + 8 + _PADDING


def complain(text: str) -> None:
    """Print on standard error what is wrong."""
    # A console whose print was interrupted may never write again: each complaint gets a new one.
    Console(stderr=True).print(Text(text, style="red"), soft_wrap=True)


def print_beginning(console: Console, repositories: Sequence[Repository], data: Path) -> None:
    """Print what is going to be counted, with which thresholds, and where the servers keep their data."""
    for repository in repositories:
        chosen, history = len(repository.commits), repository.history
        commits = f"all {history:,} commits" if chosen == history else f"{chosen:,} of {history:,} commits"
        first, last = repository.commits[0], repository.commits[-1]
        shallow = " (a shallow clone: older ones are not here)" if repository.shallow else ""
        line = Text(repository.name, style="bold")
        line.append(f"  {commits}, {first.date:%Y-%m-%d} to {last.date:%Y-%m-%d}{shallow}", style="not bold")
        console.print(line, soft_wrap=True)
    short = " · ".join(f"{name.replace('_', ' ')} {seconds:g} s" for name, seconds in SHORT.items())
    usual = " · ".join(f"{Settings.model_fields[name].default:g}" for name in SHORT)
    _remark(console, f"Short for the demo: {short} (defaults: {usual})")
    _remark(console, f"Starting NATS and PostgreSQL in {shown(data)}")
    console.print()


def print_end(console: Console, outcome: Outcome, *, charts: Path, data: Path, as_json: bool) -> bool:
    """Draw the charts, print what was counted and what came of it; return whether all is well.

    Args:
        console: for people; standard error, when standard output belongs to the JSON object.
        outcome: the outcome of the run.
        charts: the folder to draw the charts into.
        data: the data folder, for the command that shows the jobs afterwards.
        as_json: whether to print one JSON object instead of tables.
    """
    complaints = list(outcome.complaints)
    counted = [each for each in outcome.repositories if each.samples]
    if as_json:
        sys.stdout.write(f"{json.dumps(outcome.as_json(), ensure_ascii=False)}\n")
        sys.stdout.flush()
    else:
        for repository in counted:
            console.print("", lines_table(repository, console.width), sep="\n")
        console.print("", summary_table(outcome), "", sep="\n")
        job = outcome.recovered_job
        look = ["jsworker", "job", str(job)] if job else ["jsworker", "jobs"]
        command = shlex.join(["jsworker", "dev", "--data", str(data), "--", *look])
        _remark(console, f"{'What befell a recovered job' if job else 'All jobs'}: {command}")
    try:
        for svg, png in draw_charts(counted, charts):
            _remark(console, f"Chart: {shown(svg)} and {shown(png.name)}")
    except ChartNotWritten as error:
        complaints.append(str(error))
    for text in outcome.remarks:
        _remark(console, text)
    for text in complaints:
        complain(text)
    return not complaints


def lines_table(repository: RepositoryLines, width: int) -> Table:
    """Return a table of lines by language over time.

    Args:
        repository: with at least one sample.
        width: the columns of the terminal; languages that do not fit in are summed up as ``other``.
    """
    first, last = repository.samples[0], repository.samples[-1]
    languages = repository.languages()
    named = _those_that_fit(languages, width, max(len(f"{each.total:+,}") for each in repository.samples))
    table = Table(
        title=Text(repository.name, style="bold", overflow="ellipsis", no_wrap=True),
        title_justify="left",
        box=None,
        padding=(0, _PADDING, 0, 0),
        header_style="dim",
        footer_style="bold",
        show_footer=True,
    )
    table.add_column("date", footer="growth", no_wrap=True)
    table.add_column("commit", style="dim", no_wrap=True)

    def add_column(header: str, growth: int) -> None:
        table.add_column(Text(header), f"{growth:+,}", justify="right", no_wrap=True)

    for language in named:
        add_column(language, last.lines.get(language, 0) - first.lines.get(language, 0))
    if len(named) < len(languages):
        add_column(OTHER, last.other_than(named) - first.other_than(named))
    add_column("total", last.total - first.total)
    for each in evenly(repository.samples, MOST_ROWS):
        numbers = [each.lines.get(language, 0) for language in named]
        others = [each.other_than(named)] if len(named) < len(languages) else []
        cells = (f"{number:,}" for number in [*numbers, *others, each.total])
        table.add_row(f"{each.date:%Y-%m-%d}", each.commit[:8], *cells)
    return table


def _those_that_fit(languages: Sequence[str], width: int, widest_number: int) -> Sequence[str]:
    """Return the first languages whose columns fit in beside date, commit, other and total."""
    room = width - _DATE_AND_COMMIT - 2 * (max(widest_number, len(OTHER)) + _PADDING)
    for place, language in enumerate(languages):
        room -= max(widest_number, len(language)) + _PADDING
        if room < 0:
            return languages[:place]
    return languages


def summary_table(outcome: Outcome) -> Table:
    """Return the table that sums a run up."""
    table = Table(box=None, padding=(0, _PADDING, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("jobs", f"{outcome.jobs:,}")
    table.add_row("completed", _judged(outcome.completed, good=outcome.completed == outcome.jobs))
    if outcome.failed:
        table.add_row("failed", _judged(outcome.failed, good=False))
    table.add_row("recovered", f"{outcome.recovered:,}")
    if outcome.recovery_seconds is not None:
        table.add_row("kill to re-run", f"{outcome.recovery_seconds:.1f} s")
    table.add_row("lost", _judged(outcome.lost, good=outcome.lost == 0))
    table.add_row("run time", f"{outcome.seconds:.1f} s")
    return table


def _judged(number: int, *, good: bool) -> Text:
    return Text(f"{number:,}", style="bold green" if good else "bold red")


def _remark(console: Console, text: str) -> None:
    console.print(Text(text, style="dim"), soft_wrap=True)
