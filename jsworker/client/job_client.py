"""The client: enqueue jobs, read them, and cancel, retry or clear them."""

import asyncio
import builtins  # Python 3.14 reads annotations late: there, list is the method
import os
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from datetime import datetime, timedelta
from typing import Any, Self, overload
from uuid import UUID

from typing_extensions import Unpack

from jsworker.client.client_publisher import ClientPublisher
from jsworker.client.enqueueing import (
    JobOptions,
    Kind,
    SharedInserts,
    check_count,
    chunks_of_new_jobs,
    insert,
    keys_of,
    kind_name,
    new_jobs,
    one_for_each,
    priority_of,
)
from jsworker.client.job_info import JobDetails, JobEvent, JobInfo, JobStatus, StepInfo, job_uuid
from jsworker.client.limits import Limits
from jsworker.client.results import JobHandle, Results
from jsworker.client.schedules import Schedules
from jsworker.client.selected_jobs import REASON_CHARACTERS, JobConditions, SelectedJobs
from jsworker.client.terms import instant_of, is_due
from jsworker.client.workflows import Flow, Workflows
from jsworker.core import fault_points, tracing
from jsworker.core.codec import Codec
from jsworker.core.contents import Contents
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import JobNotFound, TransitionRefused
from jsworker.core.events import Events
from jsworker.core.garbage import fewer_collections, no_collection
from jsworker.core.names import printable, shown
from jsworker.core.priorities import NORMAL, Priority, priority_number
from jsworker.core.processor import AsyncProcessorOf, Payload, ProcessorOf, Returned
from jsworker.core.settings import Settings, load_settings
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import RunAge
from jsworker.ownership.queries import listing
from jsworker.ownership.queries.job_filter import JobFilter, Selection
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.schema import STATUSES
from jsworker.ownership.transitions import control, priorities, reset, workers
from jsworker.ownership.transitions.audit import Action, AuditEntry, list_actions, os_user
from jsworker.ownership.transitions.control import Cancelled
from jsworker.ownership.transitions.enqueue import NewJob
from jsworker.ownership.transitions.publish import Outgoing
from jsworker.ownership.transitions.reschedule import reschedule_all
from jsworker.ownership.transitions.reset import Reset
from jsworker.ownership.transitions.steps import steps_of
from jsworker.stream.message import subject_of
from jsworker.stream.result_hints import HintReceiver

_PUBLISH_EVERY_SECONDS = 1.0
"""The seconds after which a long ``enqueue_many`` lets publishing begin; both compete for this process."""
_MOST_LISTED = 2**31 - 1
_NOT_OPEN = "not open: use `async with`, or call open()"
_CLOSED = "closed"
_OTHER_LOOP = (
    "the client was opened in another event loop, and works in that one only: open a client in each loop"
    " (each asyncio.run has its own), or use SyncJobClient"
)
_OTHER_PROCESS = (
    "the client was opened before this process was forked, and its connections belong to the parent process:"
    " open a client here, or use SyncJobClient"
)


class JobClient:
    """Enqueues jobs and acts on them. Open one per process: ``async with JobClient.from_env() as client``.

    A job is accepted once it is committed. NATS may be away: the client connects in the background, and
    workers publish what the client could not. Without JSWORKER_NATS_URL the client uses no NATS at all.

    Attributes:
        events: emits ``worker.degraded`` and ``worker.restored``, with ``what="publishing"`` for a stream to
            which the client cannot publish.
        database: the connections of the client.
        publisher: publishes what the client has enqueued, in the background.
    """

    def __init__(self, settings: Settings, *, codec: Codec | None = None) -> None:
        """Prepare; nothing connects yet.

        Args:
            settings: the same settings as those of the workers.
            codec: encodes the contents of jobs, instead of the codec of the settings.

        Raises:
            SettingsError: the codec of the settings cannot be created.
            TypeError: ``settings`` are no Settings.
        """
        if not isinstance(settings, Settings):
            hint = "JobClient.from_env() makes them, JobClient.from_env(database_url=…) with changes"
            raise TypeError(f"JobClient takes Settings, not {type(settings).__name__}: {hint}")
        self._settings = settings
        self._contents = Contents.of(settings, codec)
        self.events = Events()
        dsn, seconds = settings.current_database_dsn, settings.statement_timeout
        self.database = Database(dsn, statement_timeout=seconds, owner="client")
        self.publisher = ClientPublisher(settings, self.database, self.events, died=self._died)
        self._inserts = SharedInserts(
            self.database, publish_after=self.publisher.reserved_seconds, died=self._died
        )
        self._results = Results(self.database, self._contents)
        self._unusable_because: str | None = _NOT_OPEN
        self._opened_in: tuple[int, asyncio.AbstractEventLoop] | None = None

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """Return a client with the environment's settings; ``overrides``, in lower case, replace some.

        Raises SettingsError if a setting is wrong or missing.
        """
        return cls(load_settings(**overrides))

    @property
    def schedules(self) -> Schedules:
        """Schedules, which enqueue jobs by the clock: list, add, pause, resume, run now, remove."""
        return Schedules(self._opened(), self._settings, self.publisher, self._result, self._contents)

    @property
    def settings(self) -> Settings:
        """The settings of this client."""
        return self._settings

    @property
    def codec(self) -> Codec | None:
        """The codec of contents, to be given to ``enqueue_statement``; None: they are stored unchanged."""
        return self._contents.codec

    @property
    def limits(self) -> Limits:
        """Limits of the jobs of a kind or a key that run at once or begin in a period: list, set, reset."""
        return Limits(self._opened())

    async def pause(
        self,
        kind: Kind,
        key: str | None = None,
        *,
        until: datetime | timedelta | None = None,
        reason: str | None = None,
        actor: str | None = None,
    ) -> datetime | None:
        """Start no more jobs of a kind, or of one of its limit keys; running jobs continue.

        The pause of a key takes effect at once, that of a kind within half a second
        (``JSWORKER_RELAY_INTERVAL``). Pausing again replaces ``until`` and ``reason``.

        Args:
            kind: the kind, or its processor.
            key: a limit key; None: the whole kind.
            until: the end of the pause, with a time zone, or how long it lasts by the database's clock; None:
                until ``resume`` is called.
            reason: shown to operators.
            actor: who does it, for ``audit``; left out: the user of this process.

        Returns:
            The end of the pause, by the database's clock; None if it has none.

        Raises:
            InvalidName: the kind or the key is not allowed.
            ValueError: ``until`` has passed, has no time zone, or is more than ten years ahead.
        """
        return await self.limits.pause(kind, key, until=until, reason=reason, actor=actor)

    async def resume(self, kind: Kind, key: str | None = None, *, actor: str | None = None) -> int:
        """End the pause of a kind or a key.

        Returns:
            How many other pauses keep jobs of it from starting: of a key, 1 if its kind is paused, too; of a
            kind, how many of its keys are.

        Raises:
            TransitionRefused: it is not paused.
        """
        pauses = await self.limits.resume(kind, key, actor=actor)
        self.publisher.publish_in_background()
        return pauses

    async def drain_worker(self, worker_id: str, *, actor: str | None = None) -> None:
        """Let a worker claim no more jobs, until ``undrain_worker`` or the next start of its process.

        The worker learns of it with its next heartbeat. It then hands back at once the jobs that it has
        claimed ahead, and its running jobs continue; its state is then ``drained``. ``actor`` is who does it,
        for ``audit``; left out: the user of this process.

        Raises TransitionRefused if the worker has stopped or does not exist.
        """
        entry = AuditEntry("drain", {"worker": worker_id}, actor=os_user() if actor is None else actor)
        with operators_rights("drain_worker", "UPDATE on jsworker.workers"):
            await workers.drain(self._opened(), worker_id, entry=entry)

    async def undrain_worker(self, worker_id: str, *, actor: str | None = None) -> None:
        """Let a drained worker claim jobs again. Raises TransitionRefused if it was not drained."""
        entry = AuditEntry("undrain", {"worker": worker_id}, actor=os_user() if actor is None else actor)
        with operators_rights("undrain_worker", "UPDATE on jsworker.workers"):
            await workers.undrain(self._opened(), worker_id, entry=entry)

    @property
    def workflows(self) -> Workflows:
        """Workflows that were enqueued by ``workflow``: list, get, cancel, retry."""
        return Workflows(self._opened(), self.publisher)

    @property
    def unpublished_because(self) -> str | None:
        """Why messages were left to workers; None if none was, or ``publish_pending`` has published all."""
        return self.publisher.unpublished_because

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect. If NATS does not answer, this succeeds and ``unpublished_because`` says so.

        A client that was closed can be opened again, also in another event loop.

        Raises:
            DatabaseUnavailable, DatabaseRefused, MigrationMissing: PostgreSQL cannot be used.
            StreamRefused: the login or the stream cannot be used as configured.
            RuntimeError: the client is open already.
        """
        if self._unusable_because not in (_NOT_OPEN, _CLOSED):
            self._check_process_and_loop()
            raise RuntimeError("the client is open already: close() it first, or use the one that is open")
        self._unusable_because = "being opened"
        self._opened_in = os.getpid(), asyncio.get_running_loop()
        self.database.open()
        try:
            await self.database.check_usable()
            await self.publisher.open()
            stream = self.publisher.stream
            self._results.open(None if stream is None else HintReceiver(stream.connection))
        except BaseException:
            await self.close()
            self._unusable_because = _NOT_OPEN
            raise
        self._unusable_because = None

    async def close(self) -> None:
        """Finish publishing the enqueued jobs, within seconds, and disconnect.

        Raises RuntimeError if the client was opened in another event loop, or before this process was forked.
        """
        self._check_process_and_loop()
        self._unusable_because = _CLOSED
        try:
            await self._results.close()
            await self.publisher.end_publishing()
            await self._inserts.flush()
        finally:  # also of a close that is cancelled
            try:
                await self.publisher.close()
            finally:
                self._opened_in = None
                await self.database.close()

    @overload
    async def enqueue(
        self,
        kind: type[AsyncProcessorOf[Payload, Returned]],
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle[Returned]: ...

    @overload
    async def enqueue(
        self,
        kind: type[ProcessorOf[Payload, Returned]],
        payload: Payload,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle[Returned]: ...

    @overload
    async def enqueue(
        self,
        kind: str,
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle: ...

    async def enqueue(
        self,
        kind: str | type[Any],
        payload: Any,
        *,
        unique_key: str | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> JobHandle:
        """Enqueue a job in a transaction of its own and publish it; see ``EnqueueOptions`` for ``options``.

        Returns a handle with the job's id, and whether the job was created or a live one holds the unique
        key. ``result`` of the handle waits for the job's end. It returns the value that ``process`` returned
        if the job was enqueued by its processor, else the JSON value of it.

        Raises:
            DatabaseUnavailable: it is unclear whether the job was stored; with a ``unique_key`` a second try
                creates no other job while the job lives, with ``unique_for`` none within that time.
            DatabaseRefused: PostgreSQL refused the login, the statement or the job.
            TransitionRefused: an expired job holds the ``unique_key`` and the login may not cancel it, or the
                key was taken and freed again several times during the call. Try again later.
            RuntimeError: the client is not open, or closed; every other call raises this, too.
        """
        job_options = JobOptions.of(self._settings.max_payload_bytes, options, self._contents)
        [job] = new_jobs(kind, [payload], [unique_key], job_options)
        name = kind_name(kind)
        with tracing.creating(self._subject_of(name, job.priority), job_id=job.id) as context:
            self._opened()
            enqueued = await self._inserts.insert(name, job._replace(**context._asdict()))
            if enqueued.created and is_due(job):
                await fault_points.reach("after_commit_before_publish")
                await self.publisher.publish(
                    Outgoing(enqueued.id, name, 1, False, None, *context, job.priority)
                )
            return JobHandle.of(enqueued, self._result, kind)

    @overload
    async def enqueue_many(
        self,
        kind: type[AsyncProcessorOf[Payload, Returned]],
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[JobHandle[Returned]]: ...

    @overload
    async def enqueue_many(
        self,
        kind: type[ProcessorOf[Payload, Returned]],
        payloads: Iterable[Payload],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[JobHandle[Returned]]: ...

    @overload
    async def enqueue_many(
        self,
        kind: str,
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[JobHandle]: ...

    async def enqueue_many(
        self,
        kind: str | type[Any],
        payloads: Iterable[Any],
        *,
        unique_keys: Sequence[str | None] | None = None,
        **options: Unpack[EnqueueOptions],
    ) -> builtins.list[JobHandle]:
        """Enqueue a job for each payload, in statements of up to 5,000, and publish them in the background.

        ``unique_keys`` has a key or None for each payload; see ``enqueue`` for the rest. The handles are in
        the order of the payloads. After an error the jobs of earlier statements stay stored. Raises TypeError
        if ``payloads`` or ``unique_keys`` cannot be used as a list.
        """
        given = one_for_each("payloads", payloads)
        keys = keys_of(given, unique_keys)
        name = kind_name(kind)
        job_options = JobOptions.of(self._settings.max_payload_bytes, options, self._contents)
        subject = self._subject_of(name, priority_of(kind, job_options.priority))
        enqueued: list[JobHandle] = []
        with fewer_collections(), tracing.creating(subject, jobs=len(given)) as context:
            jobs: list[NewJob] = []
            for chunk in chunks_of_new_jobs(kind, given, keys, job_options, context):
                jobs += chunk
                if len(jobs) < len(given):
                    await asyncio.sleep(0)
            clock = asyncio.get_running_loop().time
            began = clock()
            keyed = any(key is not None for key in keys)
            reserved_seconds = self.publisher.reserved_seconds_for
            inserts = insert(self._opened(), name, jobs, keyed=keyed, reserved_seconds=reserved_seconds)
            try:
                async with aclosing(inserts) as inserted:
                    async for batch in inserted:
                        with no_collection():
                            enqueued += [JobHandle.of(each, self._result, kind) for each in batch.answers]
                        self.publisher.keep(name, batch, since=began)
                        if clock() >= began + _PUBLISH_EVERY_SECONDS:
                            self.publisher.start_publishing()
            except BaseException:  # some jobs may have been stored
                self.publisher.publish_in_background(since=began)
                raise
            self.publisher.start_publishing()
        return enqueued

    async def result(self, job_id: UUID | str, timeout: float | timedelta | None = None) -> Any:  # noqa: ASYNC109 -- as asyncio.wait_for
        """Return the result of a job, a JSON value, once it has completed.

        If attempts fail, this waits for the last one. Cancelling the call ends the waiting, not the job.
        PostgreSQL may be away meanwhile; without NATS the end is found up to two seconds later.

        Args:
            job_id: the job's id; its enqueue must be committed.
            timeout: seconds, or a timedelta, until the waiting ends; None: it does not end.

        Raises:
            JobFailed: the job has failed for good; ``error`` is the text of its last error, ``reason`` why no
                attempt followed. An operator may retry it: call this again to wait for that.
            JobCancelled: the job was cancelled.
            JobGone: there is no such job: it was pruned after its end, or is not committed.
            TimeoutError: the job has not ended in time; it goes on.
            UsageError: called inside a job, for a job of a kind that the same worker serves: waiting jobs
                could take all of its slots.
            DatabaseRefused: the login may not read jobs (role jsworker_reader).
        """
        return await self._result(job_uuid(job_id), timeout)

    def workflow(self, name: str) -> Flow:
        """Return a workflow to be filled in an ``async with`` block, at whose end all of it is enqueued."""
        return Flow(
            name,
            database=self._opened(),
            settings=self._settings,
            publisher=self.publisher,
            contents=self._contents,
        )

    async def publish_pending(self, *, wait: bool = True) -> int:
        """Publish the outbox, for example after your own transaction, and return the number of messages.

        With ``wait=False`` what became due in the last five seconds is published in the background, and 0 is
        returned: a request then does not publish everything that others have left.

        Raises nothing for messages that workers publish later; ``unpublished_because`` says why. Once NATS
        has failed to answer, this returns 0 without waiting, until NATS answers again. If the login may only
        INSERT (see ``deploy/postgres/roles.sql``), workers publish everything, within RELAY_INTERVAL.
        """
        self._opened()
        if not wait:
            self.publisher.publish_in_background()
            return 0
        return await self.publisher.publish_pending()

    async def get(self, job_id: UUID | str) -> JobDetails:
        """Return a job with its payload, checkpoint and result.

        Without a codec, encoded contents are returned as they are stored.

        Raises:
            JobNotFound: no job has this id.
            KeyMissing, ContentRefused: its contents cannot be decoded.
        """
        row = await listing.get_job(self._opened(), job_uuid(job_id))
        return JobDetails.of_row(self._contents.decode_row(row))

    async def timeline(self, job_id: UUID | str) -> builtins.list[JobEvent]:
        """Return the timeline of a job, oldest first: claims after the first, errors, resets, refusals.

        Of a longer timeline, these are the last 1,000 entries.
        """
        return list(map(JobEvent.of_row, await listing.timeline(self._opened(), job_uuid(job_id))))

    async def steps(self, job_id: UUID | str) -> builtins.list[StepInfo]:
        """Return the steps of a job in their order."""
        return list(map(StepInfo.of_row, await steps_of(self._opened(), job_uuid(job_id))))

    async def list(
        self,
        *,
        status: JobStatus | None = None,
        kind: Kind | None = None,
        limit: int = 50,
        after: UUID | str | None = None,
        stale_for: float | None = None,
        running_for: float | None = None,
        no_progress_for: float | None = None,
        priority: Priority | None = None,
        **where: Unpack[JobConditions],
    ) -> builtins.list[JobInfo]:
        """Return jobs, without payload and result.

        The newest jobs come first; scheduled jobs are in the order of their due times, queued ones begin with
        the last queued. There is no index of completed jobs by kind: those of a rare kind are searched from
        the newest job on, which may take long. Running jobs that are chosen by their age begin with the
        oldest, by their last progress, claim or heartbeat.

        Args:
            status: scheduled, queued, processing, completed, failed or cancelled.
            kind: a kind's name or its processor.
            limit: the most jobs to return.
            after: begin behind this job, the last one of the previous list.
            stale_for: only running jobs without a heartbeat of their worker for so many seconds.
            running_for: only running jobs whose run began at least so many seconds ago.
            no_progress_for: only running jobs whose run has reported no progress, saved no checkpoint and
                announced no quiet phase for so many seconds.
            priority: only jobs of this priority: high, normal or low.
            where: further conditions, for which all jobs that meet the others are searched: see
                ``JobConditions``.

        Raises:
            JobNotFound: the place of the job ``after`` is no longer known.
            InvalidName: ``kind`` cannot be a kind's name.
            ValueError: ``limit`` is less than 1, ``status`` or ``priority`` does not exist, or an age is not
                a number of seconds, or is given with another status than processing.
            TypeError: ``limit`` is not a whole number.
        """
        check_count("limit", limit, _MOST_LISTED)
        age = RunAge(stale_for, running_for, no_progress_for)
        _check_status(status, age)
        page = await listing.list_jobs(
            self._opened(),
            status=status,
            kind=None if kind is None else kind_name(kind),
            limit=limit,
            after=None if after is None else job_uuid(after),
            age=age,
            priority=None if priority is None else priority_number(priority),
            where=JobFilter(**where),
        )
        return list(map(JobInfo.of_row, page.jobs))

    def select(
        self,
        *,
        status: JobStatus,
        kind: Kind | None = None,
        stale_for: float | None = None,
        running_for: float | None = None,
        no_progress_for: float | None = None,
        priority: Priority | None = None,
        **where: Unpack[JobConditions],
    ) -> SelectedJobs:
        """Return a selection of jobs, to count, retry, cancel, clear, reorder or reschedule them.

        Takes the conditions of ``list``, but refuses completed jobs, to which nothing can be done.

        Raises:
            InvalidName, ValueError: as for ``list``.
        """
        age = RunAge(stale_for, running_for, no_progress_for)
        _check_status(status, age)
        if status == "completed":
            raise ValueError("status='completed': nothing can be done to a completed job")
        name = None if kind is None else kind_name(kind)
        lane = None if priority is None else priority_number(priority)
        selection = Selection((status,), name, lane, age, JobFilter(**where))
        return SelectedJobs(self._opened(), self.publisher, selection)

    async def audit(self, *, limit: int = 50, after: UUID | str | None = None) -> Sequence[Action]:
        """Return the actions on jobs, kinds and schedules, with their actors, the last action first.

        Actions are kept for 400 days; those on single jobs only if the call named an ``actor``. With
        ``after`` the list begins behind that action.
        """
        check_count("limit", limit, _MOST_LISTED)
        behind = None if after is None else job_uuid(after)
        return await list_actions(self._opened(), limit=limit, after=behind)

    async def cancel(self, *job_ids: UUID | str, actor: str | None = None) -> Cancelled:
        """Cancel waiting jobs at once; running jobs are asked to stop within one heartbeat.

        A job that another transaction keeps locked for a second is ``refused``; the calls below raise
        TransitionRefused for it. If ``actor`` names who does it, ``audit`` lists the action; the same applies
        to these calls.
        """
        ids = [job_uuid(job_id) for job_id in job_ids]
        with operators_rights("cancel"):
            return await control.cancel(self._opened(), ids, entry=_entry("cancel", ids, actor))

    async def retry(self, job_id: UUID | str, *, actor: str | None = None) -> None:
        """Put a failed or cancelled job back into the queue, with its counters at zero; its steps stay done.

        Raises TransitionRefused if the job is neither failed nor cancelled, was cancelled with its workflow
        or because a need of it failed or was cancelled, or if a live job holds its unique key.
        """
        with operators_rights("retry"):
            wanted = job_uuid(job_id)
            entry = _entry("retry", [wanted], actor)
            (await control.retry_all(self._opened(), [wanted], entry=entry)).check()
        self.publisher.publish_in_background()

    async def set_priority(self, job_id: UUID | str, priority: Priority, *, actor: str | None = None) -> None:
        """Give a waiting job another priority; a queued job gets a message in its new lane.

        Raises:
            TransitionRefused: the job does not wait, or does not exist.
            ValueError: the priority does not exist.
        """
        number, wanted = priority_number(priority), job_uuid(job_id)
        entry = _entry("set_priority", [wanted], actor, to=priority)
        with operators_rights("set_priority"):
            (await priorities.set_priorities(self._opened(), [wanted], number, entry=entry)).check()
        self.publisher.publish_in_background()

    async def reschedule(self, job_id: UUID | str, run_at: datetime, *, actor: str | None = None) -> None:
        """Change the due time of a job that waits for a time, for example for its next attempt.

        With a time in the past it begins at once. With a time after its ``expires_at`` it expires.

        Raises:
            TransitionRefused: the job does not wait for a time, or does not exist.
            ValueError, TypeError: ``run_at`` has no time zone, or is before 2000 or more than ten years
                ahead.
        """
        when, wanted = instant_of("run_at", run_at), job_uuid(job_id)
        entry = _entry("reschedule", [wanted], actor, to=when.isoformat())
        with operators_rights("reschedule"):
            (await reschedule_all(self._opened(), [wanted], when, entry=entry)).check()

    async def clear_and_reenqueue(
        self, job_id: UUID | str, reason: str, *, actor: str | None = None
    ) -> Reset:
        """Take a running job from its owner and queue it again, counting no attempt and no stall.

        Its steps stay done. Its next run finds ``reason`` in ``job.clear_reason``, as one line of at most
        1,000 characters. One of the workers emits the event ``job.cleared`` with the cause ``operator``.

        Raises:
            JobNotFound: no job has this id.
            TransitionRefused: the job is not running, or was settled or taken back just now.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason={shown(reason)} must be text, not {type(reason).__name__}")
        wanted = job_uuid(job_id)
        with operators_rights("clear_and_reenqueue"):
            seen = (await listing.look_up(self._opened(), [wanted])).get(wanted)
            if seen is None:
                raise JobNotFound(f"no job has id {wanted}")
            if seen.status != "processing":
                raise TransitionRefused(f"job {wanted} is {seen.status}; only a running job can be cleared")
            line = printable(reason, REASON_CHARACTERS)
            taken = await reset.reset_by_operator(
                self.database,
                seen=[(wanted, seen.fencing_token)],
                reason=line,
                entry=_entry("clear", [wanted], actor, reason=line),
            )
        if wanted in taken.refused:
            raise TransitionRefused(f"job {wanted} cannot be cleared: {taken.refused[wanted]}")
        if not taken.resets:
            raise TransitionRefused(f"job {wanted} was settled or taken back just now: look at it again")
        self.publisher.publish_in_background()
        return taken.resets[0]

    def _opened(self) -> Database:
        if self._unusable_because is not None:
            raise RuntimeError(f"the client is {self._unusable_because}")
        self._check_process_and_loop()
        return self.database

    def _check_process_and_loop(self) -> None:
        """Raise RuntimeError where the connections cannot be used: a wait for them would never end there."""
        if self._opened_in is None:
            return
        process, loop = self._opened_in
        if process != os.getpid():
            raise RuntimeError(_OTHER_PROCESS)
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:  # plain code that prepares a call, such as ``client.select``
            return
        if here is not loop:
            raise RuntimeError(_OTHER_LOOP)

    async def _result(self, job_id: UUID, timeout: float | timedelta | None) -> Any:  # noqa: ASYNC109 -- see result
        self._opened()
        return await self._results.result(job_id, timeout)

    def _subject_of(self, kind: str, priority: int = NORMAL) -> str:
        return subject_of(self._settings.subject_prefix, kind, priority)

    def _died(self, name: str, error: BaseException) -> None:
        self.events.emit("worker.degraded", what=name, reason=f"{type(error).__name__}: {error}")


def _check_status(status: str | None, age: RunAge) -> None:
    if status is not None and status not in STATUSES:
        raise ValueError(f"status={shown(status)} must be one of {', '.join(STATUSES)}")
    if age and status not in (None, "processing"):
        raise ValueError(f"status={shown(status)} with an age: only jobs that are processing have one")


def _entry(action: str, ids: Sequence[UUID], actor: str | None, **how: str) -> AuditEntry | None:
    return None if actor is None else AuditEntry.of_jobs(action, ids, actor=actor, **how)
