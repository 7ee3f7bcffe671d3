"""One run of one job in memory, by the worker's own code from payload to result, without a server."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from jsworker.client.enqueueing import payload_text, stored_payload
from jsworker.core import strict_json
from jsworker.core.clock import boottime
from jsworker.core.contents import PLAIN
from jsworker.core.errors import JobCancelled, OwnershipLost
from jsworker.core.events import Events
from jsworker.core.job import Job, MemberResult
from jsworker.core.processor import Payload, ProcessorOf
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.given_session import GivenSession
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.testing.shared_servers import settings_without_servers
from jsworker.testing.unit_lease import JobRun, UnitLease, stored_text
from jsworker.worker.pipeline.attempt import open_job, process_job
from jsworker.worker.pipeline.in_flight import Phase, Run, StopReason
from jsworker.worker.pipeline.kinds import call_hook, resolve_kinds
from jsworker.worker.pipeline.outcomes import Completed, Failed, InvalidResult, headline
from jsworker.worker.pipeline.run_writes import LeaseServices

_WORKER_ID: Final = "run_job"
_RUN: Final = "_jsworker_run"
"""The attribute of an error that holds its run."""


def run_of(error: BaseException) -> JobRun:
    """Return the run that ended in an error of ``run_job``; raise ValueError for any other error."""
    run = vars(error).get(_RUN)
    if not isinstance(run, JobRun):
        raise ValueError(f"{type(error).__name__} was raised by no run_job")  # noqa: TRY004 -- it is an error
    return run


async def run_job(
    processor: ProcessorOf[Payload, Any] | type[ProcessorOf[Payload, Any]],
    payload: Payload | Mapping[str, Any],
    *,
    attempt: int = 1,
    cleared: bool = False,
    clear_reason: str | None = None,
    checkpoint: Any = None,
    steps: Mapping[str, Any] | None = None,
    session: GivenSession | None = None,
    draining: bool = False,
    cancel_after: float | None = None,
    lost_after: int | None = None,
    results: Mapping[str, Sequence[MemberResult]] | None = None,
    scheduled_for: datetime | None = None,
    job_id: UUID | None = None,
    settings: Settings | None = None,
) -> JobRun:
    """Run a processor once, with a payload, in memory, and return its run.

    Payload, checkpoint and result are checked and converted to JSON as in a worker, time limits hold,
    ``setup`` and ``teardown`` are called, and a plain ``process`` runs in a thread. ``on_failed`` and
    ``on_lost`` are not called.

    Args:
        processor: a processor, or its class.
        payload: as for ``JobClient.enqueue``; also a model's fields as a dict.
        attempt: the value of ``job.attempt``.
        cleared: the value of ``job.cleared``: whether an earlier run has been taken back.
        clear_reason: the value of ``job.clear_reason``.
        checkpoint: the checkpoint of an earlier run.
        steps: by name, the results of steps that earlier runs have kept, and None for sleeps that are over.
            To continue where another run ended, give ``run_of(error).steps``.
        session: used by ``job.transaction()``, in a savepoint: commit or roll back yourself.
        draining: whether ``job.should_stop`` is True from the beginning.
        cancel_after: seconds after which the job is cancelled, as by ``JobClient.cancel``.
        lost_after: the number of writes (of progress, a checkpoint, a step, members of the batch) after which
            another run owns the job: the next write, or the completion, raises ``OwnershipLost``.
        results: by the name of a node, the members' results that ``job.results_of`` yields.
        scheduled_for: the value of ``job.scheduled_for``.
        job_id: the job's id; None: a new one.
        settings: for limits of sizes and time; None: those of the running test, else the defaults.

    Raises:
        InvalidPayload, InvalidJson: the payload, the checkpoint or the result would be refused.
        JobCancelled: the job was cancelled while it ran.
        TimeoutError: it took longer than its time-out, or gave no sign of life for its progress time-out.
        Exception: any error of the processor, among them ``Retry``, ``Fail`` and ``Snooze``, which a sleep
            raises too. ``run_of(error)`` is the run.
    """
    settings = settings or settings_without_servers()
    given: Any = processor
    [kind] = resolve_kinds([given], settings).values()
    run_id, most = job_id or new_job_id(), settings.max_payload_bytes
    timeout = kind.limits.timeout
    text = stored_payload(payload_text(type(kind.processor), payload), kind.name, run_id, PLAIN, most)
    saved = None if checkpoint is None else strict_json.dumps(checkpoint, what="checkpoint")
    claimed = ClaimedJob(
        id=run_id,
        kind=kind.name,
        payload=stored_text(text),
        fencing_token=attempt,
        dispatch=1,
        attempt=attempt,
        max_attempts=attempt,
        cleared=cleared,
        clear_reason=clear_reason,
        deadline=None if timeout is None else datetime.now(UTC) + timedelta(seconds=timeout),
        checkpoint=None if saved is None else stored_text(saved),
        traceparent=None,
        tracestate=None,
        cancel_requested=False,
        stalls=0,
        max_stalls=1,
        waited=None,
        stored_bytes=0,
        scheduled_for=scheduled_for,
    )
    now = boottime()
    run = Run(claimed, kind, None, beaten_at=now, now=now)
    said = JobRun(
        run_id,
        checkpoint=None if claimed.checkpoint is None else strict_json.loads(claimed.checkpoint),
        steps=dict(steps or {}),
    )
    services = _services(settings, kind.name)
    lease = UnitLease(run, services, said, session=session, results=results or {}, lost_after=lost_after)
    job = run.job = replace(open_job(run, services), _ownership=lease)
    if draining:
        run.drain()
    await call_hook(kind.processor.setup)
    try:
        await _process_and_tear_down(run, job, lease, services, cancel_after)
    except BaseException as error:
        vars(error)[_RUN] = said
        raise
    return said


def _services(settings: Settings, kind: str) -> LeaseServices:
    # Database and Sessions connect at the first statement; nothing here executes one.
    database = Database(settings.database_dsn(), statement_timeout=settings.statement_timeout)
    return LeaseServices(
        worker_id=_WORKER_ID,
        settings=settings,
        contents=PLAIN,
        database=database,
        sessions=Sessions(database, worker_id=_WORKER_ID, size=1, lock_seconds=1.0),
        events=Events(),
        loop=asyncio.get_running_loop(),
        kinds=frozenset({kind}),
    )


async def _process_and_tear_down(
    run: Run, job: Job[Any], lease: UnitLease, services: LeaseServices, cancel_after: float | None
) -> None:
    tear_down = run.kind.processor.teardown
    try:
        await _process(run, job, lease, services, cancel_after)
    except BaseException as error:
        try:
            await call_hook(tear_down)
        except Exception as another:  # noqa: BLE001 -- the test is about what the processor has raised
            error.add_note(f"and teardown raised {headline(another)}")
        raise
    await call_hook(tear_down)


async def _process(
    run: Run, job: Job[Any], lease: UnitLease, services: LeaseServices, cancel_after: float | None
) -> None:
    task: asyncio.Task[Any] = asyncio.create_task(
        _to_the_end(run, job, lease, services), name=f"run_job {run.kind.name}"
    )
    run.task = task
    run.phase = Phase.RUNNING
    timer = None
    if cancel_after is not None:
        timer = services.loop.call_later(cancel_after, run.signal, StopReason.CANCELLED)
    try:
        await asyncio.wait({task})
    finally:
        if timer is not None:
            timer.cancel()
        # Both without effect, unless the caller was cancelled before the task has ended.
        run.abandoned = True
        task.cancel()
    try:
        exited = task.result()
    except asyncio.CancelledError:
        if (words := _stopped(run)) is None:
            raise
        raise words from None
    if exited is not None:
        raise exited


async def _to_the_end(
    run: Run, job: Job[Any], lease: UnitLease, services: LeaseServices
) -> SystemExit | KeyboardInterrupt | None:
    try:
        outcome = await process_job(run, job, services)
    except (SystemExit, KeyboardInterrupt) as exited:
        return exited  # raised by a task, it would end the event loop
    match outcome:
        case Failed(error):  # the result has no JSON form, or is too large
            raise InvalidResult(error)
        case Completed(text) if not lease.said.completed:
            lease.count_write()
            lease.complete(text)
    return None


def _stopped(run: Run) -> Exception | None:
    match run.stop:
        case StopReason.LOST:
            return OwnershipLost(f"job of kind {run.kind.name} was stopped, and its run owns it no longer")
        case StopReason.CANCELLED:
            return JobCancelled(f"job of kind {run.kind.name} was cancelled while it ran")
        case StopReason.TIMEOUT:
            return TimeoutError(f"job of kind {run.kind.name} timed out after {run.kind.limits.timeout:g} s")
        case StopReason.NO_PROGRESS:
            seconds = run.kind.progress_timeout
            return TimeoutError(f"job of kind {run.kind.name} made no progress for {seconds:g} s")
        case _:
            return None
