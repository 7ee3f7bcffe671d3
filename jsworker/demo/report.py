"""What the demo says at its end: lines by language over time, the summary, and both as one JSON object."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from jsworker.demo.samples import OTHER, RepositoryLines, Sample, evenly, other_lines

MOST_ROWS = 12

TOTAL = "total"

_DATE_WIDTH, _COMMIT_WIDTH, _PADDING = 10, 8, 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run of the demo ended.

    Attributes:
        jobs: jobs enqueued.
        completed: jobs completed.
        recovered: jobs taken back from the killed worker.
        recovery_seconds: from the kill until the last of them ran again; None when nothing was killed.
        failed: jobs that failed for good.
        lost: jobs without any outcome.
        seconds: from the first enqueued job to the last completed one.
        repositories: what was counted.
    """

    jobs: int
    completed: int
    recovered: int
    recovery_seconds: float | None
    failed: int
    lost: int
    seconds: float
    repositories: Sequence[RepositoryLines]


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as the JSON object that ``--json`` prints."""
    recovery = outcome.recovery_seconds
    return {
        "jobs": outcome.jobs,
        "completed": outcome.completed,
        "recovered": outcome.recovered,
        "recovery_seconds": None if recovery is None else round(recovery, 3),
        "lost": outcome.lost,
        "seconds": round(outcome.seconds, 3),
        "repositories": [
            {
                "repository": repository.repository,
                "samples": [
                    {"date": sample.date.isoformat(), "commit": sample.commit, "lines": sample.lines}
                    for sample in repository.samples
                ],
            }
            for repository in outcome.repositories
        ],
    }


def lines_table(repository: RepositoryLines, width: int) -> Table:
    """Return a table of lines by language over time.

    Args:
        repository: with at least one sample.
        width: the columns of the terminal; languages that find no room are summed up as ``other``.
    """
    columns = _columns_that_fit(repository, width)
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
    first, last = (_numbers(sample, columns) for sample in (repository.samples[0], repository.samples[-1]))
    for column, before, after in zip(columns, first, last, strict=True):
        table.add_column(Text(column), footer=f"{after - before:+,}", justify="right", no_wrap=True)
    for sample in evenly(repository.samples, MOST_ROWS):
        numbers = (f"{number:,}" for number in _numbers(sample, columns))
        table.add_row(f"{sample.date:%Y-%m-%d}", sample.commit[:_COMMIT_WIDTH], *numbers)
    return table


def summary_table(outcome: Outcome) -> Table:
    """Return the table that sums a run up."""
    table = Table(box=None, padding=(0, _PADDING, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_row("jobs", f"{outcome.jobs:,}")
    table.add_row(
        "completed", Text(f"{outcome.completed:,}", style=_verdict(good=outcome.completed == outcome.jobs))
    )
    if outcome.failed:
        table.add_row("failed", Text(f"{outcome.failed:,}", style=_verdict(good=False)))
    table.add_row("recovered", f"{outcome.recovered:,}")
    if outcome.recovery_seconds is not None:
        table.add_row("kill to re-run", f"{outcome.recovery_seconds:.1f} s")
    table.add_row("lost", Text(f"{outcome.lost:,}", style=_verdict(good=outcome.lost == 0)))
    table.add_row("run time", f"{outcome.seconds:.1f} s")
    return table


def _columns_that_fit(repository: RepositoryLines, width: int) -> list[str]:
    """Return the headers of the number columns: languages, ``other`` when some are left over, the total."""
    widest_number = max(len(f"{sample.total:+,}") for sample in repository.samples)

    def column_width(header: str) -> int:
        return max(widest_number, len(header)) + _PADDING

    room = width - (_DATE_WIDTH + _PADDING) - (_COMMIT_WIDTH + _PADDING) - column_width(TOTAL)
    languages = repository.top_languages()
    named: list[str] = []
    for language in languages:
        rest = 0 if len(named) == len(languages) - 1 else column_width(OTHER)
        room -= column_width(language)
        if room < rest:
            break
        named.append(language)
    left_over = [OTHER] if named and len(named) < len(languages) else []
    return [*named, *left_over, TOTAL]


def _numbers(sample: Sample, columns: Sequence[str]) -> list[int]:
    special = {TOTAL: sample.total, OTHER: other_lines(sample, columns)}
    return [special.get(column, sample.lines.get(column, 0)) for column in columns]


def _verdict(*, good: bool) -> str:
    return "bold green" if good else "bold red"
