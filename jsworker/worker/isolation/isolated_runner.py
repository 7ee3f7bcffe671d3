"""The owner's side of quarantine: starts the process, hears it, stops it, and judges how it ended."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, Final

from jsworker.core.clock import boottime
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.worker.isolation.isolated_messages import Order, line, read_outcome
from jsworker.worker.pipeline.attempt import forget_cancellation, time_limits
from jsworker.worker.pipeline.kinds import Kind
from jsworker.worker.pipeline.outcomes import Failed, Outcome, failed, stopped
from jsworker.worker.pipeline.run import Run, Stop
from jsworker.worker.stacks import Stack

_LINE_MARGIN_BYTES: Final = 2**20
_GRACE_HEARTBEATS: Final = 2
"""For so many intervals the process may go on after it was told to stop."""
_SHARED_STALLS: Final = 2
"""After so many stalls a job runs beside others no more, however many it is allowed."""


_START_SECONDS: Final = 120.0
"""For so long, at least, the process may take until its event loop ticks: it imports a lot."""


_STACKS_SECONDS: Final = 2.0
"""For so long its process may take to tell where a job is: less than whoever asked for it waits."""


class IsolatedRunner:
    """Runs jobs in quarantine."""

    def __init__(self, *, worker_id: str, settings: Settings, events: Events) -> None:
        """Prepare.

        Args:
            worker_id: the owner.
            settings: the owner's; the process gets the same.
            events: the owner's.
        """
        self._worker_id = worker_id
        self._settings = settings
        self._events = events
        self._told: set[str] = set()
        self._patients: dict[Run, _Patient] = {}

    def takes(self, claimed: ClaimedJob, kind: Kind) -> bool:
        """Tell whether a job is to run in quarantine: one more stall would be its last, or its third."""
        if claimed.stalls < min(_SHARED_STALLS, claimed.max_stalls - 1):
            return False
        if kind.origin is None and kind.name not in self._told:
            self._told.add(kind.name)
            reason = (
                "its processor cannot be made in another process: give the worker the class, at module level"
            )
            self._events.emit("worker.degraded", what=f"quarantine of kind {kind.name}", reason=reason)
        return kind.origin is not None

    async def run(self, run: Run) -> Outcome:
        """Run a job in a process of its own and return what it ended in; a crash is a counted stall."""
        order = Order(
            origin=run.kind.origin or "",
            path=sys.path,
            worker_id=self._worker_id,
            settings=self._settings,
            claimed=run.claimed
            if run.spans is None
            else run.claimed._replace(**run.spans.context()._asdict()),
        )
        ours, theirs = socket.socketpair()
        try:
            process = await _start(theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        limit = self._settings.max_result_bytes * 6 + _LINE_MARGIN_BYTES
        reader, writer = await asyncio.open_connection(sock=ours, limit=limit)
        patient = self._patients[run] = _Patient(run, process, reader, writer, self._settings)
        try:
            writer.write(order.frame())
            run.on_drain = patient.tell_to_drain
            if run.should_stop:
                patient.tell_to_drain()
            return await patient.outcome()
        finally:
            del self._patients[run]
            run.on_drain = None
            writer.close()
            await patient.end()

    async def ask_stacks(self, run: Run) -> list[Stack] | None:
        """Return where a run is in its process, as that tells; None: it does not within two seconds."""
        patient = self._patients.get(run)
        return None if patient is None else await patient.ask_stacks(_STACKS_SECONDS)


class _Patient:
    """One quarantined process."""

    def __init__(
        self,
        run: Run,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: Settings,
    ) -> None:
        self._run = run
        self._process = process
        self._reader = reader
        self._writer = writer
        self._watchdog_timeout = settings.watchdog_timeout
        self._start_timeout = max(settings.watchdog_timeout, _START_SECONDS)
        self._grace = _GRACE_HEARTBEATS * settings.heartbeat_interval
        self._last_grace = settings.statement_timeout
        self._ticked_at: float | None = None
        self._quiet_until = 0.0
        self._limits = ExitStack()
        self._ended_by: str | None = None
        self._stacks: asyncio.Future[list[Stack]] | None = None

    async def outcome(self) -> Outcome:
        """Hear the process until it tells its outcome, or ends without one."""
        hearing = asyncio.create_task(self._hear(), name=f"quarantine of {self._run.id}")
        try:
            while True:
                try:
                    return await asyncio.shield(hearing)
                except asyncio.CancelledError:
                    if hearing.done():
                        return hearing.result()
                    if self._run.stop is None or self._run.abandoned:
                        raise
                    forget_cancellation()
                    self._tell_to_stop(self._run.stop)
        finally:
            hearing.cancel()
            await asyncio.wait({hearing})

    def tell_to_drain(self) -> None:
        """Let the job know that its worker would like to end."""
        if not self._writer.is_closing():
            self._writer.write(line(drain=True))

    async def ask_stacks(self, seconds: float) -> list[Stack] | None:
        """Ask the process where its job is; None: it does not answer within ``seconds``."""
        if self._writer.is_closing():
            return None
        if self._stacks is None or self._stacks.done():
            self._stacks = asyncio.get_running_loop().create_future()
            self._writer.write(line(stacks=True))
        await asyncio.wait({self._stacks}, timeout=seconds)
        return self._stacks.result() if self._stacks.done() else None

    async def end(self) -> None:
        """See to it that nothing is left of the process."""
        self._limits.close()
        if self._process.returncode is None:
            self._kill("it is not needed any more")
        await self._process.wait()

    @property
    def _patience(self) -> float:
        return self._start_timeout if self._ticked_at is None else self._watchdog_timeout

    async def _hear(self) -> Outcome:
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    text = await self._reader.readline()
            except TimeoutError:
                self._judge_silence()
                continue
            except ConnectionError:  # how a socket tells the end of whom it was shared with
                text = b""
            if not text:
                return await self._judge_end()
            told = json.loads(text)
            if "outcome" in told:
                self._run.completed |= told["completed"]
                return read_outcome(told)
            if "stacks" in told:
                if self._stacks is not None and not self._stacks.done():
                    self._stacks.set_result(told["stacks"])
                continue
            self._heed(told)

    def _heed(self, told: Mapping[str, Any]) -> None:
        if self._ticked_at is None:  # the start of the process is not the job's own time
            self._limits.enter_context(time_limits(self._run))
        self._ticked_at = boottime()
        self._run.sign_at = max(self._run.sign_at, told["sign_at"])
        if told["quiet_until"] != self._quiet_until:  # else the heartbeat may have ended that phase
            self._quiet_until = self._run.quiet_until = told["quiet_until"]
            self._run.quiet_seconds = told["quiet_seconds"]

    def _judge_silence(self) -> None:
        """Kill a process that does not begin, or whose event loop does not tick, unless it is quiet."""
        if self._ticked_at is None:
            self._kill(f"it had not started within {self._start_timeout:g} s")
        elif boottime() > self._run.quiet_until:
            self._kill(f"its event loop has not ticked for {self._watchdog_timeout:g} s")

    def _tell_to_stop(self, reason: Stop) -> None:
        if not self._writer.is_closing():
            self._writer.write(line(stop=reason.value))
        # At shutdown the owner itself has no more time than this.
        grace = self._last_grace if reason is Stop.SHUTDOWN else self._grace
        why = f"it went on although it was told to stop: {reason.value}"
        asyncio.get_running_loop().call_later(grace, self._kill, why)

    def _kill(self, reason: str) -> None:
        if self._process.returncode is None:
            self._ended_by = self._ended_by or reason
            self._process.kill()

    async def _judge_end(self) -> Outcome:
        code = await self._process.wait()
        if self._run.stop in {Stop.LOST, Stop.FENCED, Stop.SHUTDOWN}:
            return stopped(self._run)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = f": {self._ended_by}" if self._ended_by else ""
        if self._ticked_at is None:
            error = f"the process in which the job was to run alone {how} before the job began{why}"
            return failed(self._run, error)  # no stall: nothing of the job has run
        error = f"the process in which the job ran alone {how}{why}"
        return Failed(error, None, 0.0, stalled=True)


async def _start(theirs: socket.socket) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *_interpreter_flags(),
        "-m",
        "jsworker.worker.isolation.isolated_child",
        str(os.getpid()),
        str(theirs.fileno()),
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
    )


def _interpreter_flags() -> list[str]:
    return [f"-W{option}" for option in sys.warnoptions] + (["-P"] if sys.flags.safe_path else [])
