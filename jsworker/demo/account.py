"""What a run of the demo came to: the figures, and whether they agree with each other and with the rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from jsworker.core.names import printable
from jsworker.demo.report import Outcome
from jsworker.demo.samples import RepositoryLines, Sample
from jsworker.demo.snapshot import jobs
from jsworker.demo.watch import STUCK_SECONDS, Watch
from jsworker.demo.work import Project
from jsworker.ownership.database import Database
from jsworker.ownership.queries import survey
from jsworker.ownership.transitions.heartbeat import Held

_SHOWN_FAILURES = 10
_SHOWN_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Account:
    """What a run came to.

    Attributes:
        outcome: the figures.
        complaints: what is not as it must be, one line each; none when all is well.
        remarks: what is worth knowing and no fault, one line each.
        recovered_job: one of those taken over from the killed worker, if there is any.
    """

    outcome: Outcome
    complaints: Sequence[str]
    remarks: Sequence[str]
    recovered_job: UUID | None


async def draw_up(watch: Watch, database: Database, *, kill_wanted: bool) -> Account:
    """Draw up the account of a run whose jobs have ended, or are stuck.

    Args:
        watch: what was seen, up to the last look.
        database: where the rows are counted once more.
        kill_wanted: whether a worker was to be killed.
    """
    counts = await survey.count_by_status(database, watch.tasks)
    resets = await survey.resets(database, watch.tasks)
    recovered = watch.recovered()
    outcome = Outcome(
        jobs=len(watch.tasks),
        completed=counts.get("completed", 0),
        recovered=len(recovered),
        recovery_seconds=max(recovered.values(), default=None),
        failed=counts.get("failed", 0),
        lost=len(watch.tasks) - len(watch.ended),
        seconds=_seconds(watch),
        repositories=[_lines(watch, place, project) for place, project in enumerate(watch.projects)],
    )
    complaints = [
        *_failures(watch),
        *_open_jobs(watch),
        *_row_faults(watch, counts),
        *_kill_faults(watch, resets, kill_wanted=kill_wanted),
    ]
    return Account(outcome, complaints, list(_remarks(watch, resets)), next(iter(recovered), None))


def _seconds(watch: Watch) -> float:
    """Return the seconds from the first enqueued job to the last one that ended, by the database's clock."""
    begun = [job.created_at for job in watch.ended.values()]
    done = [job.finished_at for job in watch.ended.values() if job.finished_at is not None]
    return (max(done) - min(begun)).total_seconds() if done else 0.0


def _lines(watch: Watch, place: int, project: Project) -> RepositoryLines:
    results = [
        watch.ended[job_id].result
        for job_id, task in watch.tasks.items()
        if task.project == place and job_id in watch.ended and watch.ended[job_id].status == "completed"
    ]
    return RepositoryLines(
        repository=str(project.repository.path),
        name=project.repository.name,
        samples=[
            Sample(datetime.fromisoformat(result["date"]), result["commit"], result["lines"])
            for result in results
        ],
    )


def _failures(watch: Watch) -> Iterator[str]:
    failed = [job for job in watch.ended.values() if job.status != "completed"]
    for job in sorted(failed, key=lambda each: each.id)[:_SHOWN_FAILURES]:
        reason = (job.error or "").partition("\n")[0]
        why = f": {printable(reason, _SHOWN_CHARACTERS)}" if reason else ""
        yield f"{watch.tasks[job.id].label} {job.status}{why}"
    if len(failed) > _SHOWN_FAILURES:
        yield f"{jobs(len(failed) - _SHOWN_FAILURES)} more did not complete"


def _open_jobs(watch: Watch) -> Iterator[str]:
    if watch.open:
        yield f"{jobs(watch.open)} without an outcome: nothing has moved for {STUCK_SECONDS:g} s"


def _row_faults(watch: Watch, counts: dict[str, int]) -> Iterator[str]:
    seen = Counter(job.status for job in watch.ended.values())
    ended = {status: number for status, number in counts.items() if status in seen}
    if sum(counts.values()) != len(watch.tasks) or ended != seen:
        rows = ", ".join(f"{number} {status}" for status, number in sorted(counts.items())) or "none"
        yield f"the rows do not agree with {jobs(len(watch.tasks))} enqueued: {rows}"


def _kill_faults(watch: Watch, resets: set[Held], *, kill_wanted: bool) -> Iterator[str]:
    if kill_wanted and watch.kill is None:
        yield "no worker was caught with a job in its hands, so none was killed"
    held = watch.kill.held if watch.kill else frozenset()
    if missing := held - resets:
        yield f"{jobs(len(missing))} of the killed worker never taken back from it"
    if missing_runs := {job_id for job_id, _ in held} - watch.recovered().keys():
        yield f"{jobs(len(missing_runs))} of the killed worker never run again"


def _remarks(watch: Watch, resets: set[Held]) -> Iterator[str]:
    innocent = resets - (watch.kill.held if watch.kill else frozenset())
    if innocent:
        yield (
            f"{jobs(len(innocent))} taken back from workers that lived: this machine is too busy for times "
            "as short as the demo's"
        )
