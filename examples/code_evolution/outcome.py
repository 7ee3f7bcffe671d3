"""The outcome of a run: figures, and whether they agree with each other and with the rows of the jobs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from code_evolution.view import jobs
from code_evolution.watch import STUCK_SECONDS, Held, Watch
from jsworker import JobInfo

OTHER = "other"

_SHOWN_FAILURES = 10
_TOO_BUSY = "taken back from workers that lived: this machine is too busy for times as short as the demo's"


@dataclass(frozen=True, slots=True)
class Sample:
    """The non-blank lines of one commit by language; its date and its full object id."""

    date: datetime
    commit: str
    lines: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {"date": self.date.isoformat(), "commit": self.commit, "lines": self.lines}

    @property
    def total(self) -> int:
        """Lines of all languages."""
        return sum(self.lines.values())

    def other_than(self, languages: Sequence[str]) -> int:
        """Return the lines that belong to none of these languages."""
        return self.total - sum(self.lines.get(language, 0) for language in languages)


@dataclass(frozen=True, slots=True)
class RepositoryLines:
    """The samples of one repository in the order of its history; its path and its name."""

    path: str
    name: str
    samples: Sequence[Sample]

    def languages(self) -> list[str]:
        """Return the languages, those with the most lines at their peak first."""
        peaks: Counter[str] = Counter()
        for sample in self.samples:
            peaks |= Counter(sample.lines)
        return sorted(peaks, key=lambda language: (-peaks[language], language))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        lost: jobs without any outcome.
        recovered: jobs of the killed worker that ran again, ``recovered_job`` among them.
        recovery_seconds: from the kill until the last of them ran again; None when nothing was killed.
        complaints: the faults, one line each; none if all is well.
        remarks: facts worth knowing that are no faults, one line each.
    """

    jobs: int
    completed: int
    failed: int
    lost: int
    recovered: int
    recovery_seconds: float | None
    seconds: float
    repositories: Sequence[RepositoryLines]
    recovered_job: UUID | None
    complaints: Sequence[str]
    remarks: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        recovery_seconds = self.recovery_seconds
        return {
            "jobs": self.jobs,
            "completed": self.completed,
            "recovered": self.recovered,
            "recovery_seconds": None if recovery_seconds is None else round(recovery_seconds, 3),
            "lost": self.lost,
            "seconds": round(self.seconds, 3),
            "repositories": [
                {"repository": repository.path, "samples": [each.as_json() for each in repository.samples]}
                for repository in self.repositories
            ],
        }


def conclude(
    watch: Watch, rows: Mapping[UUID, JobInfo], resets: frozenset[Held], *, kill_wanted: bool
) -> Outcome:
    """Return the outcome of a run whose jobs have ended, or are stuck.

    Args:
        watch: the jobs as they were seen, up to the last look.
        rows: the rows of the jobs, read once more.
        resets: the runs that were taken back from their workers.
        kill_wanted: whether a worker was to be killed.
    """
    counts = Counter[str](row.status for row in rows.values())
    held = watch.kill.held if watch.kill else frozenset()
    innocent = resets - held
    began = min((row.created_at for row in watch.ended.values()), default=None)
    ended = max((row.finished_at for row in watch.ended.values() if row.finished_at), default=None)
    return Outcome(
        jobs=len(watch.tasks),
        completed=counts["completed"],
        failed=counts["failed"],
        lost=watch.open,
        recovered=len(watch.takeovers),
        recovery_seconds=max((each.seconds for each in watch.recoveries() if each.worker_id), default=None),
        seconds=(ended - began).total_seconds() if began and ended else 0.0,
        repositories=[_lines(watch, place) for place in range(len(watch.repositories))],
        recovered_job=next(iter(watch.takeovers), None),
        complaints=[
            *_job_faults(watch),
            *_row_faults(watch, counts),
            *_kill_faults(watch, held, resets, kill_wanted=kill_wanted),
        ],
        remarks=[f"{jobs(len(innocent))} {_TOO_BUSY}"] if innocent else [],
    )


def _lines(watch: Watch, place: int) -> RepositoryLines:
    repository = watch.repositories[place]
    results = [row.result for task, row in watch.completed() if task.repository == place]
    samples = [
        Sample(datetime.fromisoformat(each["date"]), each["commit"], each["lines"]) for each in results
    ]
    return RepositoryLines(str(repository.path), repository.name, samples)


def _job_faults(watch: Watch) -> Iterator[str]:
    failed = sorted(job_id for job_id, row in watch.ended.items() if row.status != "completed")
    for job_id in failed[:_SHOWN_FAILURES]:
        row = watch.ended[job_id]
        reason = f": {row.last_error.splitlines()[0]}" if row.status == "failed" and row.last_error else ""
        yield f"{watch.tasks[job_id].label} {row.status}{reason}"
    if len(failed) > _SHOWN_FAILURES:
        yield f"{jobs(len(failed) - _SHOWN_FAILURES)} more did not complete"
    if watch.open:
        yield f"{jobs(watch.open)} without an outcome: nothing has moved for {STUCK_SECONDS:g} s"


def _row_faults(watch: Watch, counts: Mapping[str, int]) -> Iterator[str]:
    seen = Counter(row.status for row in watch.ended.values())
    if sum(counts.values()) != len(watch.tasks) or any(counts.get(status) != seen[status] for status in seen):
        rows = ", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "none"
        yield f"the rows do not agree with {jobs(len(watch.tasks))} enqueued: {rows}"


def _kill_faults(
    watch: Watch, held: frozenset[Held], resets: frozenset[Held], *, kill_wanted: bool
) -> Iterator[str]:
    if kill_wanted and watch.kill is None:
        yield "no worker was caught while it owned a job, so none was killed"
    if missing := held - resets:
        yield f"{jobs(len(missing))} of the killed worker never taken back from it"
    if missing_runs := {job_id for job_id, _ in held} - watch.takeovers.keys():
        yield f"{jobs(len(missing_runs))} of the killed worker never run again"
