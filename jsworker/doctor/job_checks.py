"""Checks of the rows: jobs that wait without need, owners without signs of life, unfinished work."""

from collections.abc import Iterator, Sequence
from typing import Final

from jsworker.core.names import printable, shell_word
from jsworker.core.settings import Settings
from jsworker.doctor.finding import Finding, counted, error, info, listed, ok, seconds, warning
from jsworker.doctor.gather import Facts, Unknown, served_kinds
from jsworker.ownership.queries.job_report import (
    BOUND,
    MOST_HELD_KEYS,
    MOST_MARKS,
    MOST_QUEUES,
    MOST_SCHEDULED_KINDS,
    DeadMessages,
    EndedSample,
    KeyLimit,
    Late,
    LeftBatches,
    QueuedKind,
    RefusalGroup,
    RegisteredWorker,
    SchedulesOfKind,
    SilentOwner,
    declared_limit,
)
from jsworker.ownership.transitions.limits import named
from jsworker.ownership.transitions.refused_rows import REFERENCED

_FEW_ENDED: Final = 20
_MANY_FAILED: Final = 0.1
_LAG_SECONDS: Final = 86_400.0
_RECENT_SECONDS: Final = 3_600.0
_TAKEN: Final = "23505"
"""SQLSTATE unique_violation."""
_EVENTS_KEY: Final = "job_events_pkey"
_RUN_A_WORKER: Final = "Run a worker: `jsworker run MODULE:CLASS`."
_IDLE_SECONDS: Final = 60.0
# The jobs of a limit's key that was used more recently keep beginning, though one of its slots is free now.
_UNUSED_SECONDS: Final = 120.0
"""Several scan intervals: a worker that scans would have woken held jobs in this time."""
_ANY: Final = 1_000_000
_SET_SEQUENCE: Final = (
    "As the tables' owner: SELECT setval(pg_get_serial_sequence('jsworker.job_events', 'id'), max(id)) "
    "FROM jsworker.job_events; then `jsworker doctor --fix`"
)
_CLEAR: Final = "`jsworker clear --stale-for SECONDS --reason …`"


def outbox(unpublished: Late, overdue: Late) -> Iterator[Finding]:
    """No message and no scheduled job is due for long."""
    if unpublished.jobs:
        yield warning(
            f"{counted(unpublished.jobs, 'queued job', bound=BOUND)} not published, the oldest due for "
            f"{seconds(unpublished.oldest)}: no relay runs, or NATS takes nothing",
            "Run a worker, for each has a relay; `jsworker doctor --fix` publishes them now.",
        )
    if overdue.jobs:
        yield warning(
            f"{counted(overdue.jobs, 'scheduled job', bound=BOUND)} due and not queued, the oldest for "
            f"{seconds(overdue.oldest)}: no relay runs",
            "Run a worker, for each has a relay; `jsworker doctor --fix` queues and publishes them now.",
        )


def workers(registered: Sequence[RegisteredWorker], facts: Facts) -> Iterator[Finding]:
    """Workers are alive, all with one version."""
    alive = [worker for worker in registered if worker.alive]
    versions = sorted({worker.version for worker in alive})
    if len(versions) > 1:
        yield info(
            f"workers of {counted(len(versions), 'version')} are alive: {listed(versions)}",
            "Finish the roll-out; versions beside each other work meanwhile.",
        )
    drained = [worker.id for worker in alive if worker.state == "drained"]
    if drained:
        processes = counted(len(drained), "worker process", plural="worker processes")
        yield info(
            f"{processes} drained by operators: {printable(listed(drained), 600)}",
            "`jsworker undrain ID`, should it claim jobs again.",
        )
    if working := len(alive) - len(drained):
        processes = counted(working, "worker process", plural="worker processes")
        yield ok(f"{processes} alive, for {listed(served_kinds(registered))}")
        return
    none = "every worker that is alive is drained" if drained else "no worker is alive"
    if _jobs_wait(facts):
        yield warning(f"{none}, and jobs wait", "`jsworker undrain ID`." if drained else _RUN_A_WORKER)
    elif not drained:
        yield info(none, _RUN_A_WORKER)


def _jobs_wait(facts: Facts) -> bool:
    due = not isinstance(facts.overdue, Unknown) and facts.overdue.jobs > 0
    known = (rows for rows in (facts.queues, facts.silent_owners) if not isinstance(rows, Unknown))
    return due or any(known)


def time_limits(registered: Sequence[RegisteredWorker], settings: Settings) -> Iterator[Finding]:
    """Every kind of the workers that are alive has a timeout or a progress_timeout of its own."""
    kinds = sorted({kind for worker in registered if worker.alive for kind in worker.kinds_without_timeout})
    if not kinds:
        return
    whose = f"no timeout or progress_timeout of their own: {printable(listed(kinds), 600)}"
    do = "Give the classes a timeout, or a progress_timeout to those that call update_progress."
    if settings.job_timeout is None:
        yield warning(f"{whose}; JSWORKER_JOB_TIMEOUT is none: a run that hangs is never taken back", do)
    else:
        ends = f"a run that hangs ends after {seconds(settings.job_timeout)} (JSWORKER_JOB_TIMEOUT)"
        yield info(f"{whose}; {ends}", do)


def queues(queues: Sequence[QueuedKind], registered: Sequence[RegisteredWorker]) -> Iterator[Finding]:
    """No job waits for a worker."""
    served = served_kinds(registered)
    for queue in queues:
        kind = printable(queue.kind, 64)
        jobs = counted(queue.jobs, "queued job", bound=BOUND)
        says = f"{jobs} of kind {kind}, the oldest waiting for {seconds(queue.oldest)}"
        if queue.kind in served:
            yield ok(says)
        else:
            yield warning(
                f"{says}, and no worker claims them",
                f"Run a worker for {kind}, or undrain one; or cancel them: "
                f"`jsworker cancel --status queued --kind {kind}`.",
            )
    if len(queues) >= MOST_QUEUES:
        yield info(
            f"no more than {counted(len(queues), 'kind')} were looked at; jobs of others may wait too",
            "See every kind: `jsworker status --limit 1000`; `jsworker cancel --status queued --kind KIND` "
            "takes those that are not to be done.",
        )


def owners(silent_owners: Sequence[SilentOwner]) -> Iterator[Finding]:
    """Every running job has an owner that shows signs of life."""
    for owner in silent_owners:
        known = "" if owner.registered else ", which is not in the registry"
        yield warning(
            f"{counted(owner.jobs, 'running job', bound=10_000)} of worker {printable(owner.worker_id, 120)}"
            f"{known}, silent for {seconds(owner.seconds_silent)}",
            f"Some have no stale threshold and may wait for a day, or for ever: {_CLEAR} takes them back."
            if owner.never_stale
            else f"Workers take them back by themselves, so run one; at once: {_CLEAR}.",
        )


def schedules(
    schedules: Sequence[SchedulesOfKind], registered: Sequence[RegisteredWorker]
) -> Iterator[Finding]:
    """Every schedule is fired in time, and workers are for the kinds of its jobs."""
    served = served_kinds(registered)
    for each in schedules:
        name, kind = printable(each.next, 100), printable(each.kind, 64)
        if each.late:
            others = f"; {counted(each.late - 1, 'other')} of this kind late, too" if each.late > 1 else ""
            yield warning(
                f"schedule {name} of kind {kind} has been due for {seconds(each.seconds_late)}{others}",
                "Run a worker, for each fires schedules; look for schedule.refused in the workers' logs.",
            )
        elif each.kind not in served:
            which = f"schedule {name} enqueues"
            if each.schedules > 1:
                which = f"schedule {name} and {counted(each.schedules - 1, 'other')} enqueue"
            yield warning(
                f"{which} jobs of kind {kind}, which no worker claims",
                f"{_RUN_A_WORKER} Or undrain one, or `jsworker schedules pause {name}`.",
            )
        if each.ahead:
            others = f"; {counted(each.ahead - 1, 'other')} of this kind, too" if each.ahead > 1 else ""
            name, word = printable(each.furthest, 100), shell_word(each.furthest)
            ahead = seconds(each.seconds_ahead)
            yield warning(
                f"schedule {name} of kind {kind} enqueues nothing for {ahead}, which had their jobs while "
                f"PostgreSQL's clock was ahead{others}",
                f"`jsworker schedules pause {word}`, then `jsworker schedules resume {word}`: it goes on "
                "from the present.",
            )
    if len(schedules) >= MOST_SCHEDULED_KINDS:
        yield info(
            f"the schedules of no more than {counted(len(schedules), 'kind')} were looked at",
            "See all of them: `jsworker schedules`.",
        )


def limits(limits: Sequence[KeyLimit]) -> Iterator[Finding]:
    """What is held waits for something, and pauses are meant."""
    for each in limits:
        name = printable(named(each.kind, each.key), 200)
        is_unused = each.unused_for is None or each.unused_for > _UNUSED_SECONDS
        if each.paused_for is not None:
            by = printable(each.paused_by or "somebody", 100)
            why = f": {printable(each.reason, 200)}" if each.reason else ""
            key = f" {shell_word(each.key)}" if each.key else ""
            key = f" --{key}" if each.key.startswith("-") else key  # else taken for an option
            resume = f"`jsworker resume {printable(each.kind, 64)}{key}`"
            yield info(
                f"{name} has been paused for {seconds(each.paused_for)} by {by}{why}",
                f"{resume}, should it go on.",
            )
        elif each.free and each.held_for is not None and each.held_for > _IDLE_SECONDS and is_unused:
            free = each.free if each.free < _ANY else "any number"
            jobs = counted(each.held, "job", bound=BOUND)
            yield warning(
                f"{jobs} of {name} held for up to {seconds(each.held_for)}, "
                f"though {free} may begin: no worker scans",
                _RUN_A_WORKER,
            )
    if len(limits) >= MOST_HELD_KEYS:
        yield info(
            f"no more than {counted(len(limits), 'key')} with held jobs or a pause were looked at",
            "See all of them: `jsworker limits`.",
        )


def declared_limits(registered: Sequence[RegisteredWorker]) -> Iterator[Finding]:
    """The workers that are alive declare the same limits of each kind."""
    declared: dict[str, dict[str, list[str]]] = {}
    for worker in registered:
        if worker.alive and worker.limits is not None:
            for kind in worker.kinds:
                limit = declared_limit(worker.limits, kind)
                said = ", ".join(f"{name} {value}" for name, value in limit.items() if value is not None)
                declared.setdefault(kind, {}).setdefault(said or "none", []).append(worker.id)
    for kind, workers_of in sorted(declared.items()):
        if len(workers_of) > 1:
            differ = [f"{said} ({listed(sorted(ids))})" for said, ids in sorted(workers_of.items())]
            yield warning(
                f"workers declare different limits of kind {kind}: {printable(' or '.join(differ), 1000)}",
                "Finish the roll-out; the numbers of the worker that started last hold: `jsworker limits`.",
            )


def workflows(left_batches: LeftBatches) -> Iterator[Finding]:
    """Every batch and workflow whose jobs have ended is finished, and what waits for needs has some."""
    left = left_batches
    look = (
        "Run a worker, for each does it in its scan; look for worker.degraded and row.refused in their logs."
    )
    if left.batches:
        yield warning(
            f"{counted(left.batches, 'batch', plural='batches', bound=1000)} of workflows not "
            "looked after for a minute since the last member ended",
            look,
        )
    if left.workflows:
        workflows = counted(left.workflows, "workflow", bound=1000)
        yield warning(f"{workflows} not finished a minute after the last batch", look)
    if left.without_needs:
        yield warning(
            f"{counted(left.without_needs, 'job', bound=1000)} held by needs, of which none is unfinished: "
            "nothing will wake them",
            "Their producer wrote no needs: `jsworker jobs --status scheduled`, then cancel them.",
        )


def dead_messages(dead_messages: DeadMessages) -> Iterator[Finding]:
    """There are no messages that no worker could use."""
    if dead_messages.newest is None:
        return
    judge = warning if dead_messages.newest < _RECENT_SECONDS else info
    messages = counted(dead_messages.messages, "dead message", bound=MOST_MARKS)
    yield judge(
        f"{messages}, the newest {seconds(dead_messages.newest)} old: "
        "they could not be read, or named no job",
        "Look at them: `jsworker dead-messages`; then `jsworker dead-messages replay ID`, or drop.",
    )


def refused_rows(refusals: Sequence[RefusalGroup]) -> Iterator[Finding]:
    """No job's row is refused by PostgreSQL."""
    for each in refusals:
        constraint = "" if each.constraint is None else f", {printable(each.constraint, 120)}"
        jobs = counted(each.jobs, "job", bound=MOST_MARKS)
        says = (
            f"{jobs} set aside: PostgreSQL refuses to {each.attempted}, SQLSTATE {each.sqlstate}"
            f"{constraint}, first {seconds(each.oldest)} ago, one of them {each.job_id}"
        )
        if each.attempted == "prune" and each.sqlstate in REFERENCED:
            yield info(
                f"{jobs} kept beyond JSWORKER_RETENTION: a foreign key refers to them{constraint}",
                "Leave it, or give the foreign key ON DELETE CASCADE or SET NULL (docs/runbook/queue.md).",
            )
        elif (each.sqlstate, each.constraint) == (_TAKEN, _EVENTS_KEY):
            yield error(
                f"{says}: the sequence of jsworker.job_events is behind its rows, as logical replication and"
                " a restore of data alone leave it, so most jobs can neither fail nor be taken back",
                _SET_SEQUENCE,
            )
        else:
            yield warning(
                says,
                "A trigger, a constraint or a value of the row; once that is mended, `jsworker doctor --fix` "
                "tries them again at once.",
            )


def failures(ended: EndedSample) -> Iterator[Finding]:
    """None of the jobs that ended last has failed."""
    if ended.within is None or not ended.failed:
        return
    many = ended.jobs >= _FEW_ENDED and ended.failed >= _MANY_FAILED * ended.jobs
    judge = warning if many else info
    yield judge(
        f"{ended.failed:,} of the last {counted(ended.jobs, 'ended job')} failed, within "
        f"{seconds(ended.within)}",
        "Look at them: `jsworker jobs --status failed`; `jsworker retry --status failed` queues them again.",
    )


def pruning(ended: EndedSample, refusals: Sequence[RefusalGroup], settings: Settings) -> Iterator[Finding]:
    """No ended job is kept for longer than it is to be."""
    oldest, kept = ended.oldest, settings.retention
    if kept is None:
        return
    if any(each.attempted == "prune" for each in refusals):
        yield info("ended jobs are kept that PostgreSQL refuses to delete: see jobs.refused_rows")
    if oldest is not None and oldest > kept + _LAG_SECONDS:
        yield warning(
            f"the oldest ended job is {seconds(oldest)} old, though JSWORKER_RETENTION is {seconds(kept)}",
            "Run a worker, or `jsworker prune`; look for prune.failed in the workers' logs.",
        )


CHECKS: Final = (
    *(workers, time_limits, outbox, queues, schedules, limits, declared_limits, workflows, owners),
    *(refused_rows, failures, pruning, dead_messages),
)
