"""The owner's side of isolation: starts the process, hears it, stops it, and judges how it ended."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

from jsworker.core.clock import boottime
from jsworker.core.message_link import MessageLink
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.worker.context import WorkerContext
from jsworker.worker.isolation import isolated_messages as wire
from jsworker.worker.isolation.parent_death_signal import lifeline
from jsworker.worker.pipeline.attempt import forget_cancellation, time_limits
from jsworker.worker.pipeline.child_jobs import MOST, MOST_PAYLOADS, ChildJobs
from jsworker.worker.pipeline.in_flight import Run, StopReason
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.outcomes import Failed, Outcome, failed, stopped
from jsworker.worker.stacks import Stack

T = TypeVar("T")

_LINE_MARGIN_BYTES: Final = 2**20
_BYTES_A_BYTE: Final = 7
"""Bytes that one byte of a result, or of a payload, takes at most as JSON text within JSON."""
_LINE_BYTES_A_CHILD_JOB: Final = 4096
"""What is sent of a child job beside its payload, at most: its keys and the states of traces are bounded."""
_GRACE_HEARTBEATS: Final = 2
"""Intervals that the process may go on after it was told to stop."""
_SHARED_STALLS: Final = 2
"""After so many stalls a job runs alone, however many it is allowed."""
_START_SECONDS: Final = 120.0
"""What the process may take, at least, until its event loop ticks: it imports a lot."""
_STACKS_SECONDS: Final = 2.0
"""What it may take to answer: less than the caller waits."""


class IsolatedRunner:
    """Runs jobs in quarantine, with the settings and in the name of their owner."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._processes: dict[Run, _IsolatedProcess] = {}

    def takes(self, claimed: ClaimedJob, kind: Kind) -> bool:
        """Return whether a job is to run in quarantine: one more stall would be its last, or its third."""
        if claimed.stalls < min(_SHARED_STALLS, claimed.max_stalls - 1):
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

    async def run(self, run: Run) -> Outcome:
        """Run a job in a process of its own and return what it ended in; a crash is a counted stall."""
        spans = {} if run.spans is None else run.spans.context()._asdict()
        order = wire.Order(
            origin=run.kind.origin or "",
            middleware=run.kind.middleware_origins,
            path=sys.path,
            worker_id=self._context.worker_id,
            settings=self._context.settings,
            claimed=run.claimed._replace(**spans),
            kinds=frozenset(self._context.kinds),
        )
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await _start(theirs)
            except BaseException:
                ours.close()
                raise
        isolated = self._processes[run] = _IsolatedProcess(run, process, ours, self._context.settings)
        try:
            isolated.send(order)
            run.on_drain = partial(isolated.send, wire.Request(what="drain"))
            if run.should_stop:
                run.on_drain()
            return await isolated.outcome()
        finally:
            del self._processes[run]
            run.on_drain = None
            await isolated.end()

    async def ask_stacks(self, run: Run) -> list[Stack] | None:
        """Return where a run is in its process; None: the process does not answer within two seconds."""
        isolated = self._processes.get(run)
        return None if isolated is None else await isolated.ask_stacks()


class _IsolatedProcess:
    """A process from its start to its end; it is watched from the beginning."""

    def __init__(
        self, run: Run, process: asyncio.subprocess.Process, end: socket.socket, settings: Settings
    ) -> None:
        self._run = run
        self._process = process
        self._settings = settings
        self._start_timeout = max(settings.watchdog_timeout, _START_SECONDS)
        self._ticks = False
        self._quiet_until = 0.0
        self._limits = ExitStack()
        self._killed_because: str | None = None
        self._loop = asyncio.get_running_loop()
        self._last_message: asyncio.Future[wire.RunEnded | None] = self._loop.create_future()
        self._stacks: asyncio.Future[list[Stack]] | None = None
        self._link = MessageLink(
            end,
            wire.FROM_ISOLATED,
            on_message=self._note,
            on_end=partial(_resolve, self._last_message, None),
            longest_line=_longest_line(settings),
        )
        self.send = self._link.send
        self._link.open()
        self._silence = self._loop.call_later(self._start_timeout, self._judge_silence)

    async def outcome(self) -> Outcome:
        """Wait until the process reports its outcome, or ends without one."""
        ending = asyncio.create_task(self._wait_for_outcome(), name=f"quarantine of {self._run.id}")
        try:
            while True:
                try:
                    return await asyncio.shield(ending)
                except asyncio.CancelledError:
                    if ending.done():
                        return ending.result()
                    if self._run.stop is None or self._run.abandoned:
                        raise
                    forget_cancellation()
                    self._request_stop(self._run.stop)
        finally:
            ending.cancel()
            await asyncio.wait({ending})

    async def ask_stacks(self) -> list[Stack] | None:
        """Ask the process where its job is; None: it does not answer in time."""
        if self._stacks is None or self._stacks.done():
            self._stacks = self._loop.create_future()
            self.send(wire.Request(what="ask stacks"))
        await asyncio.wait({self._stacks}, timeout=_STACKS_SECONDS)
        return self._stacks.result() if self._stacks.done() else None

    async def end(self) -> None:
        """Leave nothing of the process."""
        self._link.close()
        self._limits.close()
        self._silence.cancel()
        self._kill("it is not needed any more")
        await self._process.wait()

    def _note(self, message: wire.FromIsolated) -> None:
        match message:
            case wire.RunState(sign_at=sign_at, quiet_seconds=quiet_seconds, quiet_until=quiet_until):
                if not self._ticks:  # the start of the process is not the job's own time
                    self._ticks = True
                    self._limits.enter_context(time_limits(self._run))
                self._run.sign_at = max(self._run.sign_at, sign_at)
                if quiet_until != self._quiet_until:  # else the heartbeat may have ended that phase
                    self._quiet_until = self._run.quiet_until = quiet_until
                    self._run.quiet_seconds = quiet_seconds
            case wire.RunStacks(stacks=stacks) if self._stacks is not None:
                _resolve(self._stacks, stacks)
            case wire.RunEnded():
                _resolve(self._last_message, message)
        self._watch()

    def _watch(self) -> None:
        self._silence.cancel()
        limit = self._settings.watchdog_timeout if self._ticks else self._start_timeout
        self._silence = self._loop.call_later(limit, self._judge_silence)

    def _judge_silence(self) -> None:
        """Kill a process that does not begin, or whose event loop does not tick, unless it is quiet."""
        if not self._ticks:
            self._kill(f"it had not started within {self._start_timeout:g} s")
        elif boottime() > self._run.quiet_until:
            self._kill(f"its event loop has not ticked for {self._settings.watchdog_timeout:g} s")
        self._watch()

    def _request_stop(self, reason: StopReason) -> None:
        self.send(wire.Request(what="stop", reason=reason))
        grace = _GRACE_HEARTBEATS * self._settings.heartbeat_interval
        if reason is StopReason.SHUTDOWN:  # the owner itself has no more time than this
            grace = self._settings.statement_timeout
        why = f"it went on although it was told to stop: {reason.value}"
        self._loop.call_later(grace, self._kill, why)

    def _kill(self, reason: str) -> None:
        if self._process.returncode is None:
            self._killed_because = self._killed_because or reason
            self._process.kill()

    async def _wait_for_outcome(self) -> Outcome:
        ended = await self._last_message
        if ended is not None:
            self._run.completed |= ended.completed
            if ended.child_jobs:
                self._run.child_jobs = ChildJobs(ended.child_jobs)
            return ended.outcome
        code = await self._process.wait()
        if self._run.stop in {StopReason.LOST, StopReason.FENCED, StopReason.SHUTDOWN}:
            return stopped(self._run)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = f": {self._killed_because}" if self._killed_because else ""
        if not self._ticks:
            error = f"the process in which the job was to run alone {how} before the job began{why}"
            return failed(self._run, error)  # no stall: nothing of the job has run
        return Failed(f"the process in which the job ran alone {how}{why}", None, 0.0, stalled=True)


def _longest_line(settings: Settings) -> int:
    child_jobs = MOST_PAYLOADS * settings.max_payload_bytes
    rows = MOST * _LINE_BYTES_A_CHILD_JOB
    return (settings.max_result_bytes + child_jobs) * _BYTES_A_BYTE + rows + _LINE_MARGIN_BYTES


def _resolve(future: "asyncio.Future[T]", value: T) -> None:
    if not future.done():
        future.set_result(value)


async def _start(theirs: socket.socket) -> asyncio.subprocess.Process:
    flags = [f"-W{option}" for option in sys.warnoptions] + (["-P"] if sys.flags.safe_path else [])
    numbers = [os.getpid(), lifeline(), theirs.fileno()]
    module = ["-m", "jsworker.worker.isolation.isolated_child", *map(str, numbers)]
    inherited = [each for each in numbers[1:] if each >= 0]
    return await asyncio.create_subprocess_exec(
        sys.executable, *flags, *module, stdin=asyncio.subprocess.DEVNULL, pass_fds=inherited
    )
