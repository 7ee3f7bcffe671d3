"""The owner's side of one isolated process: starts it, watches it, and ends it in time."""

import asyncio
import os
import signal
import socket
import subprocess  # nosec B404
import sys
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError
from jsworker.core.message_link import MessageLink
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation import isolated_messages as wire
from jsworker.worker.isolation.isolated_child import FLUSH_SECONDS, TEARDOWN_SECONDS
from jsworker.worker.isolation.parent_death_signal import lifeline
from jsworker.worker.pipeline.attempt import forget_cancellation, time_limits
from jsworker.worker.pipeline.child_jobs import MOST, MOST_PAYLOADS, ChildJobs
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.outcomes import Failed, Outcome, failed, passed_limit, stopped
from jsworker.worker.stacks import Stack
from jsworker.worker.supervision import Silence

T = TypeVar("T")
Cause: TypeAlias = Literal[
    "jobs",
    "memory",
    "files",
    "threads",
    "memory exceeded",
    "stop ignored",
    "silent",
    "not ready",
    "crashed",
    "not needed",
]
"""Why a process ended. ``jobs`` and ``memory`` are normal: it has run its number of jobs, or has grown beyond
its limit. ``files`` and ``threads``: it can open, or start, too few for another job. ``memory exceeded``: it
took more than twice the limit during a job."""

_LINE_MARGIN_BYTES: Final = 2**20
_BYTES_A_BYTE: Final = 7
"""One byte of a result or payload takes at most so many bytes as JSON text within JSON."""
_LINE_BYTES_A_CHILD_JOB: Final = 4096
"""The most bytes sent of a child job beside its payload; its keys and trace states are bounded."""
_ROUNDS_A_TIMEOUT: Final = 10
_LONGEST_ROUND_SECONDS: Final = 1.0
_STACKS_SECONDS: Final = 2.0
"""The time in which a process must answer; shorter than the caller waits."""
_LOOK_SECONDS: Final = 0.1
"""The time between two looks whether a process lives, where the system tells of its end in no other way."""
_LINK_SECONDS: Final = 5.0
"""The longest wait between the end of a process and the end of its messages, in either order."""


class NotReady(JsworkerError):
    """An isolated process cannot run jobs of a kind: it ended too early, or ``setup`` raised."""


class NotStarted(NotReady):
    """An isolated process could not be started, whatever it was for."""


class IsolatedProcess:
    """A process that runs jobs for its owner, one at a time.

    Attributes:
        prepared: kinds whose processors are set up in it.
        jobs: the number of jobs that it has begun.
        memory_bytes: its resident memory when it was last measured; 0 if it was not.
        lacks: what its jobs have used up, if another one would fail for want of it.
        ended_because: why it ended or is being ended; None while it is in use.
        over: done when it has ended.
    """

    def __init__(
        self,
        context: WorkerContext,
        introduction: wire.Introduction,
        process: subprocess.Popen[bytes],
        end: socket.socket,
    ) -> None:
        settings = context.settings
        self._context = context
        self._settings = settings
        self._process = process
        self.prepared: set[str] = set()
        self.jobs = 0
        self.memory_bytes = 0
        self.lacks: Literal["files", "threads"] | None = None
        self.ended_because: Cause | None = None
        self._killed_why: str | None = None
        self._how = ""
        self._run: Run | None = None
        self._run_began = False
        self._quiet_until = 0.0
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._prepared: asyncio.Future[wire.Prepared | None] = self._loop.create_future()
        self._run_ended: asyncio.Future[wire.RunEnded | None] = self._loop.create_future()
        self._stacks: asyncio.Future[list[Stack]] | None = None
        self._link_ended: asyncio.Future[None] = self._loop.create_future()
        self._link = MessageLink(
            end,
            wire.FROM_ISOLATED,
            on_message=self._note,
            on_end=partial(_resolve, self._link_ended, None),
            on_invalid=partial(self.kill, "crashed", "it sent to the worker what is no message"),
            longest_line=_longest_line(settings),
        )
        self._link.open()
        self._link.send(introduction)
        self._watch(settings.startup_timeout)
        self._round = self._loop.call_later(0.0, self._go_round)
        self._watching = asyncio.create_task(self._see_end(), name=f"end of isolated process {process.pid}")

    @classmethod
    def start(cls, context: WorkerContext) -> "IsolatedProcess":
        """Start a process with a new interpreter; raises what the system raises if it cannot start it."""
        introduction = wire.Introduction(
            path=[each for each in sys.path if isinstance(each, str)],  # Python ignores what is no text
            worker_id=context.worker_id,
            settings=context.settings,
            from_files=context.settings.from_files,
            kinds=frozenset(context.kinds),
        )
        ours, theirs = socket.socketpair()
        numbers = [os.getpid(), lifeline(), theirs.fileno()]
        flags = [f"-W{option}" for option in sys.warnoptions] + (["-P"] if sys.flags.safe_path else [])
        module = ["-m", "jsworker.worker.isolation.isolated_child", *map(str, numbers)]
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 -- this interpreter and its own module  # nosec B603
                    [sys.executable, *flags, *module],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[each for each in numbers[1:] if each >= 0],
                    process_group=0,  # a job may end its group, and not the worker
                )
            except BaseException:
                ours.close()
                raise
        return cls(context, introduction, process, ours)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def prepare(self, kind: Kind) -> None:
        """Let the process create and set up the processor of a kind; raises NotReady."""
        if kind.name in self.prepared:
            return
        self._watch(self._settings.startup_timeout)
        self._prepared = self._loop.create_future()
        if self.over.done():
            raise self._not_ready()
        self._link.send(wire.Preparation(origin=kind.origin or "", middleware=kind.middleware_origins))
        answer = await self._prepared
        self._watch(self._settings.watchdog_timeout)
        if answer is None:
            raise self._not_ready()
        if answer.error is not None:
            raise NotReady(f"failed before the job began: {answer.error}")
        self.prepared.add(kind.name)

    async def run(self, run: Run, claimed: ClaimedJob) -> Outcome:
        """Run a job of a prepared kind and return its outcome; raises NotReady if it did not begin.

        ``claimed`` is sent to the process.
        """
        self.jobs += 1
        self._run, self._run_began = run, False
        self._run_ended = self._loop.create_future()
        events = self._context.events
        wanted = frozenset(name for name in ("job.progress", "job.step") if events.wants(name))
        try:
            with ExitStack() as until_the_end:
                self._link.send(wire.Order(claimed=claimed, wanted=wanted))
                until_the_end.enter_context(time_limits(run))
                run.on_drain = partial(self._link.send, wire.Request(what="drain"))
                if run.should_stop:
                    run.on_drain()
                if self.over.done():
                    _resolve(self._run_ended, None)
                return await self._outcome(run, until_the_end)
        finally:
            run.on_drain = None
            self._run, self._quiet_until = None, 0.0

    async def ask_stacks(self) -> list[Stack] | None:
        """Return the stacks of the job in the process; None if it does not answer in time."""
        if self._stacks is None or self._stacks.done():
            self._stacks = self._loop.create_future()
            self._link.send(wire.Request(what="ask stacks"))
        await asyncio.wait({self._stacks}, timeout=_STACKS_SECONDS)
        return self._stacks.result() if self._stacks.done() else None

    async def end(self, cause: Cause) -> None:
        """Let the process tear its processors down and end; kill it if it does not end in time."""
        self.ended_because = self.ended_because or cause
        self._round.cancel()
        self._link.send(wire.Request(what="end"))
        seconds = TEARDOWN_SECONDS * len(self.prepared) + 2 * FLUSH_SECONDS
        await asyncio.wait({self.over}, timeout=seconds)
        self.kill(cause)
        await asyncio.wait({self.over})

    def kill(self, cause: Cause, why: str | None = None) -> None:
        """Kill the process; ``why`` becomes part of the error of the job that it runs."""
        if self._process.poll() is None:
            self.ended_because = self.ended_because or cause
            self._killed_why = self._killed_why or why
            self._process.kill()

    async def _see_end(self) -> None:
        exited = asyncio.create_task(self._exit_code())
        either: set[asyncio.Future[Any]] = {exited, self._link_ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        # A program that a job has started may keep the link open. A process that has closed it is useless.
        await asyncio.wait({exited}, timeout=_LINK_SECONDS)
        self.kill("crashed", "it has closed its connection to the worker")
        code = await exited
        await asyncio.wait({self._link_ended}, timeout=_LINK_SECONDS)
        self._round.cancel()
        self._link.close()
        self._how = _end_in_words(code)
        self.ended_because = self.ended_because or "crashed"
        self.over.set_result(None)
        _resolve(self._prepared, None)
        _resolve(self._run_ended, None)

    async def _exit_code(self) -> int:
        """Wait for the end of the process and return its exit code, or minus the number of its signal.

        Not by SIGCHLD: a job, or a library, may have replaced its handler in this process.
        """
        try:
            pidfd = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system, an old kernel, or one that forbids it
            while (code := self._process.poll()) is None:  # noqa: ASYNC110 -- nothing else tells of it
                await asyncio.sleep(_LOOK_SECONDS)
            return code
        over: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, _resolve, over, None)
        try:
            await over
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    @property
    def _why(self) -> str:
        return f": {self._killed_why}" if self._killed_why else ""

    def _not_ready(self) -> NotReady:
        return NotReady(f"{self._how} before the job began{self._why}")

    def _note(self, message: wire.FromIsolated) -> None:
        run = self._run
        match message:
            case wire.Prepared():
                _resolve(self._prepared, message)
            case wire.RunState(sign_at=sign_at, quiet_seconds=quiet_seconds, quiet_until=quiet_until) if run:
                self._run_began = True
                run.sign_at = max(run.sign_at, sign_at)
                if quiet_until != self._quiet_until:  # an equal one may have been ended by the heartbeat
                    self._quiet_until = run.quiet_until = quiet_until
                    run.note_written(quiet_seconds)
            case wire.RunStacks(stacks=stacks) if self._stacks is not None:
                _resolve(self._stacks, stacks)
            case wire.RunEvent(name=name, fields=fields) if run:
                self._context.events.emit(name, **fields)
            case wire.JobsAdded():
                self._context.requeued.notify()
            case wire.RunEnded():
                _resolve(self._run_ended, message)
            case wire.TeardownFailed(kind=kind, reason=reason):
                self._context.events.emit("worker.degraded", what=f"teardown of kind {kind}", reason=reason)
        if self._prepared.done():  # during a start the event loop may block
            self._silence.note_tick()

    def _watch(self, seconds: float) -> None:
        """Begin to count the silence of the process anew; it may be silent for so many seconds."""
        self._silence = Silence(seconds)
        self._silence.note_tick()

    def _go_round(self) -> None:
        """Kill a process that is silent for too long; read first, because this one may have stood still."""
        seconds = min(_LONGEST_ROUND_SECONDS, self._silence.timeout / _ROUNDS_A_TIMEOUT)
        self._round = self._loop.call_later(seconds, self._go_round)
        self._link.hear()
        self._silence.quiet_until = self._quiet_until
        if self._silence.pass_round(seconds, now=boottime()):
            limit = f"{self._silence.timeout:g} s"
            if self._prepared.done():
                self.kill("silent", f"its event loop has not ticked for {limit}")
            else:
                self.kill("not ready", f"it had not started within {limit}")

    async def _outcome(self, run: Run, until_the_end: ExitStack) -> Outcome:
        while True:
            try:
                await asyncio.wait({self._run_ended})
                break
            except asyncio.CancelledError:
                if self._run_ended.done():
                    break
                if run.stop is None or run.abandoned:
                    raise
                forget_cancellation()
                # Not the first reason alone: a stop of the worker leaves less time than a time-out before it.
                timer = self._request_stop(run, run.cancelled_for or run.stop)
                until_the_end.callback(timer.cancel)
        ended = self._run_ended.result()
        if ended is not None:
            self.lacks = ended.lacks
            run.completed |= ended.completed
            if ended.child_jobs:
                run.child_jobs = ChildJobs(ended.child_jobs)
            return ended.outcome
        return self._outcome_of_death(run)

    def _request_stop(self, run: Run, reason: StopReason) -> asyncio.TimerHandle:
        self._link.send(wire.Request(what="stop", reason=reason))
        grace = run.grace_heartbeats * self._settings.heartbeat_interval
        if reason is StopReason.SHUTDOWN:  # the owner itself has only this time left
            grace = self._settings.statement_timeout
        why = f"it went on although it was told to stop: {reason.value}"
        return self._loop.call_later(grace, self.kill, "stop ignored", why)

    def _outcome_of_death(self, run: Run) -> Outcome:
        match run.stop:
            case StopReason.LOST | StopReason.FENCED | StopReason.SHUTDOWN | StopReason.CANCELLED:
                return stopped(run)
            case _ if not self._run_began:
                raise self._not_ready()
            case StopReason.TIMEOUT | StopReason.NO_PROGRESS if not run.quarantined:
                how = f"the process in which the job ran {self._how}{self._why}"
                return failed(run, f"{passed_limit(run)}; {how}")
        where = "ran alone" if run.quarantined else "ran"
        error = f"the process in which the job {where} {self._how}{self._why}"
        return Failed(error, None, 0.0, stalled=True)


def _longest_line(settings: Settings) -> int:
    child_jobs = MOST_PAYLOADS * settings.max_payload_bytes
    rows = MOST * _LINE_BYTES_A_CHILD_JOB
    return (settings.max_result_bytes + child_jobs) * _BYTES_A_BYTE + rows + _LINE_MARGIN_BYTES


def _end_in_words(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):  # real-time signals have no names
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)
