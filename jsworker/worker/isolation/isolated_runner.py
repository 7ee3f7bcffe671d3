"""Runs jobs in processes of their own: in the worker's pool of warm processes, or alone in quarantine."""

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from jsworker.core.errors import JsworkerError, may_answer_later
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.telemetry.worker_status import IsolatedProcesses
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation.isolated_process import Cause, IsolatedProcess, NotReady, NotStarted
from jsworker.worker.isolation.resident_memory import resident_bytes
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.outcomes import Interrupted, Outcome, failed, headline
from jsworker.worker.pipeline.run_writes import LeaseServices, note_beginning
from jsworker.worker.stacks import Stack

MEMORY_LOOK_SECONDS: Final = 0.25
"""The time between two measurements of the memory of isolated processes."""


class IsolatedRunner:
    """Runs jobs in isolated processes, with the settings and the worker id of their owner.

    ``next_waits`` returns whether a run waits for its turn in quarantine; ``on_started`` is called with a run
    whose process there is ready, and gives the next one its turn.
    """

    def __init__(
        self,
        context: WorkerContext,
        services: LeaseServices,
        *,
        next_waits: Callable[[], bool],
        on_started: Callable[[Run], None],
    ) -> None:
        self._context = context
        self._services = services
        self._next_waits = next_waits
        self._on_started = on_started
        self._most = context.settings.isolated_processes
        self._kinds = [kind for kind in context.kinds.values() if kind.is_isolated]
        self.limits_memory = any(kind.max_memory_bytes is not None for kind in self._kinds)
        """Whether any kind limits the memory of its jobs."""
        self._in_pool = 0  # the number of starting, idle, busy and ending processes
        self._idle: list[IsolatedProcess] = []  # the most recently used one is last
        self._busy: dict[Run, IsolatedProcess] = {}  # those of quarantine, too
        # For quarantine: the run whose turn it is, and stopped ones while their process is still being made;
        # the lock of the turn, the process being made, and one left over.
        self._line: set[asyncio.Future[IsolatedProcess]] = set()
        self._turn = asyncio.Lock()
        self._preparing: IsolatedProcess | None = None
        self._unused: IsolatedProcess | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def takes(self, claimed: ClaimedJob, kind: Kind) -> bool:
        """Return whether a job runs in quarantine: one more stall would be its last or its third."""
        if not claimed.notes_beginning:
            return False
        why = ""
        if kind.origin is None:
            what = "its processor or a middleware of the worker cannot be made in another process"
            why = f"{what}: give the worker classes and functions, at module level"
        elif not self._context.contents.is_of_settings:
            why = "the codec cannot be made in another process: name it in JSWORKER_CODEC"
        if why:
            self._context.complaints.report(f"quarantine of kind {kind.name}", why)
        return not why

    async def begin(self) -> None:
        """Set up each isolated kind in a process of the pool, to find faults now; raises NotReady."""
        for kind in self._kinds:
            self._idle.append(await self._prepared(kind))

    async def run(self, run: Run) -> Outcome:
        """Run a job in an isolated process and return its outcome; a crash is a counted stall."""
        claimed = run.claimed
        what = "quarantine" if run.quarantined else "isolated processes"
        if run.spans is not None:
            claimed = claimed._replace(**run.spans.context()._asdict())
        try:
            process = await (self._alone(run) if run.quarantined else self._prepared(run.kind))
            self._busy[run] = process
            try:
                outcome = await process.run(run, claimed)
            except BaseException:
                process.kill("not needed")
                raise
            finally:
                del self._busy[run]
                self._put_back(process, run)
        except NotReady as error:
            alone = " alone" if run.quarantined else ""
            failure = failed(run, f"the process in which the job was to run{alone} {error}")
            if run.quarantined and not isinstance(error, NotStarted):
                return failure  # no stall: nothing of the job has run
            self._context.complaints.report(what, failure.error)
            return Interrupted(failure.error, failure.error, failure.delay)
        self._context.complaints.end(what)
        return outcome

    async def ask_stacks(self, run: Run) -> list[Stack] | None:
        """Return the stacks of a run in its process; None if that does not answer within two seconds."""
        process = self._busy.get(run)
        return None if process is None else await process.ask_stacks()

    async def look_at_memory(self) -> None:
        """Kill each process that has taken more than twice the memory that a job of its kind may take."""
        limited = {run: process for run, process in self._busy.items() if run.kind.max_memory_bytes}
        _measure(limited.values())
        for run, process in limited.items():
            most, taken = run.kind.max_memory_bytes or 0, process.memory_bytes
            if taken > 2 * most:
                why = f"it took {taken / 1e6:.0f} MB, more than twice max_memory_mb={most / 1e6:g}"
                process.kill("memory exceeded", why)

    def status(self) -> IsolatedProcesses:
        """Return the numbers of busy and idle processes."""
        return IsolatedProcesses(busy=len(self._busy), idle=len(self._idle))

    async def close(self) -> None:
        """End all processes; idle ones tear their processors down."""
        self._closed = True
        for process in self._idle:
            self._start(process.end("not needed"))
        for process in filter(None, [*self._busy.values(), self._preparing]):
            process.kill("not needed")
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _alone(self, run: Run) -> IsolatedProcess:
        """Return a process that has run no job and has the processor set up; raises NotReady."""
        wanted: asyncio.Future[IsolatedProcess] = asyncio.get_running_loop().create_future()
        self._start(self._make_alone(run, wanted))
        try:
            process = await wanted
        except asyncio.CancelledError:
            if not wanted.cancelled() and wanted.exception() is None:
                wanted.result().kill("not needed")
            elif self._preparing is not None and not self._next_waits():
                self._preparing.kill("not needed")
            raise
        self._on_started(run)
        return process

    async def _make_alone(self, run: Run, wanted: "asyncio.Future[IsolatedProcess]") -> None:
        """Make one process at a time: many that start at once would starve the worker's own heartbeats.

        If a run is stopped before its process is ready, the next run in line gets the process. Otherwise a
        worker whose heartbeats fail because processes start would keep starting them. If the worker dies, a
        stall is counted for the run whose turn it is, because the start itself may have killed the worker,
        and none for the runs that wait.
        """
        supervision = self._context.supervision if self._line else None
        self._line.add(wanted)
        try:
            if supervision is not None:
                supervision.waits(run.id)
            async with self._turn:
                if not (wanted.done() or self._closed):
                    if supervision is not None:
                        supervision.began(run.id)
                    await self._note_beginning(run)
                    process = await self._prepared(run.kind, in_pool=False)
                    if wanted.done():
                        self._unused = process
                    else:
                        wanted.set_result(process)
        except Exception as error:
            if not wanted.done():
                wanted.set_exception(error)  # the run awaits it
            elif not isinstance(error, JsworkerError):  # a process that is not ready, or a row that is lost
                raise
        finally:
            wanted.cancel()
            self._line.discard(wanted)
            self._preparing = None
            if self._unused is not None and not self._line:
                self._start(self._unused.end("not needed"))
                self._unused = None

    async def _note_beginning(self, run: Run) -> None:
        """Try once: a row that somebody has locked would hold up the line; raises NotStarted."""
        try:
            await note_beginning(run, self._services)
        except JsworkerError as error:
            if may_answer_later(error):
                raise NotStarted(
                    f"was not started, for the job's row could not be written: {error}"
                ) from error
            raise

    async def _unused_or_started(self) -> IsolatedProcess:
        process, self._unused = self._unused, None
        if process is None or process.ended_because is not None:
            process = await self._started(in_pool=False)
        self._preparing = process
        if self._closed:
            process.kill("not needed")
        return process

    async def _prepared(self, kind: Kind, *, in_pool: bool = True) -> IsolatedProcess:
        """Return a process that no other run uses now, with a kind's processor set up; raises NotReady."""
        while True:
            process = await (self._from_pool(kind) if in_pool else self._unused_or_started())
            is_new = not process.prepared
            try:
                if kind.name not in process.prepared:
                    await process.prepare(kind)
                    if kind.max_memory_bytes is not None:
                        _measure([process])
            except BaseException as error:
                process.kill("not ready" if isinstance(error, NotReady) else "not needed")
                raise
            if (cause := _unfit(process, kind)) is None:
                return process
            # The processors of other kinds take memory, too.
            self._start(process.end(cause))
            if is_new:
                taken, most = process.memory_bytes / 1e6, (kind.max_memory_bytes or 0) / 1e6
                why = f"took {taken:.0f} MB at the end of setup()"
                raise NotReady(f"{why}: max_memory_mb={most:g} of kind {kind.name} must be more")

    async def _from_pool(self, kind: Kind) -> IsolatedProcess:
        while True:
            may_start = self._in_pool < self._most
            # Set up beside other kinds, one with a limit of memory may exceed it and cost them the process.
            own_only = may_start and kind.max_memory_bytes is not None
            fitting = [
                process
                for process in self._idle
                if _unfit(process, kind) is None and (kind.name in process.prepared or not own_only)
            ]
            if fitting:
                process = max(reversed(fitting), key=lambda each: kind.name in each.prepared)
                self._idle.remove(process)
                return process
            if may_start:
                return await self._started(in_pool=True)
            if self._idle:
                unfit = self._idle.pop(0)
                self._start(unfit.end(_unfit(unfit, kind) or "jobs"))
            self._changed.clear()
            await self._changed.wait()

    async def _started(self, *, in_pool: bool) -> IsolatedProcess:
        self._in_pool += in_pool
        try:
            process = IsolatedProcess.start(self._context)
        except BaseException as error:
            self._in_pool -= in_pool
            self._changed.set()
            if isinstance(error, Exception):
                raise NotStarted(f"could not be started: {headline(error)}") from error
            raise
        self._start(self._see_end(process, in_pool=in_pool))
        return process

    async def _see_end(self, process: IsolatedProcess, *, in_pool: bool) -> None:
        await asyncio.wait({process.over})
        self._in_pool -= in_pool
        if process in self._idle:
            self._idle.remove(process)
        self._changed.set()
        if (cause := process.ended_because) != "not needed":
            facts = {"pid": process.pid, "cause": cause, "jobs": process.jobs}
            self._context.events.emit("isolated.ended", **facts, memory_bytes=process.memory_bytes or None)

    def _put_back(self, process: IsolatedProcess, run: Run) -> None:
        """Keep a process for the next job, or end it if it may run no other."""
        if process.ended_because is not None:
            return
        if self.limits_memory:
            _measure([process])
        if run.quarantined or self._closed:
            self._start(process.end("not needed"))
        elif cause := _unfit(process, run.kind):
            self._start(process.end(cause))
        else:
            self._idle.append(process)
            self._changed.set()

    def _start(self, steps: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(steps, name="jsworker isolated process")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _measure(processes: Collection[IsolatedProcess]) -> None:
    taken = resident_bytes([process.pid for process in processes])
    for process in processes:
        process.memory_bytes = taken.get(process.pid, process.memory_bytes)


def _unfit(process: IsolatedProcess, kind: Kind) -> Cause | None:
    """Return why a process may not run another job of a kind; None if it may."""
    if kind.max_jobs_per_process is not None and process.jobs >= kind.max_jobs_per_process:
        return "jobs"
    if kind.max_memory_bytes is not None and process.memory_bytes > kind.max_memory_bytes:
        return "memory"
    return process.lacks
