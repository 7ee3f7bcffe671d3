"""Kills a real worker process while it runs a job, and lets another worker finish the job."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from jsworker.client.enqueueing import MOST_STALLS, payload_text
from jsworker.client.job_client import JobClient
from jsworker.client.job_info import JobEvent
from jsworker.core.errors import InvalidTarget
from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings, changed_environment
from jsworker.embedded import start_with_parent
from jsworker.testing.killed_worker import ENDED_BEFORE
from jsworker.testing.shared_servers import settings_in_use
from jsworker.worker.pipeline.kinds import resolve_kinds

_LEAST_STALLS: Final = 3
_SHOWN_CHARACTERS: Final = 3000


class AtEnd(NamedTuple):
    """Killed when ``process`` has returned, before the completion is written: the whole job runs again."""


class AtStep(NamedTuple):
    """Killed when a step's function has returned, before its result is stored: the step is called again."""

    name: str


class AtProgress(NamedTuple):
    """Killed when a progress of at least ``progress``, 0 to 1, has been stored."""

    progress: float


class AfterSeconds(NamedTuple):
    """Killed ``seconds`` after ``process`` was called."""

    seconds: float


Moment: TypeAlias = AtEnd | AtStep | AtProgress | AfterSeconds


@dataclass(frozen=True)
class KilledJob:
    """What became of a job whose worker was killed.

    Attributes:
        job_id: the job.
        status: completed, failed or cancelled.
        result: the job's result, a JSON value; None if it did not complete.
        error: the text of its last error; None: it had none.
        runs: how many runs it had, including the killed one: 2, unless attempts failed. 1: the first run had
            completed the job in its own transaction before it was killed.
        timeline: the job's events, as ``JobClient.timeline`` returns them.
    """

    job_id: UUID
    status: str
    result: Any
    error: str | None
    runs: int
    timeline: list[JobEvent]


async def kill_worker_during(
    processor: type[JobProcessor[Any]] | JobProcessor[Any],
    payload: Any,
    *,
    at: Moment = AtEnd(),  # noqa: B008 -- it never changes
    timeout: float = 60.0,  # noqa: ASYNC109 -- its error says what is wrong
    settings: Settings | None = None,
) -> KilledJob:
    """Enqueue a job, kill the worker process that runs it with SIGKILL, and return what became of it.

    Another worker process finishes the job. Then assert on your side effects: they must be the same as after
    a single run. Both processes import the processor by its module, with this process's environment.

    Args:
        processor: a processor's class at the top level of a module, or an instance that is an attribute of
            one.
        payload: as for ``JobClient.enqueue``.
        at: the moment at which the worker is killed.
        timeout: seconds that each of the two processes may take.
        settings: where the job is enqueued; None: in the database of the test that runs.

    Raises:
        InvalidTarget: another process cannot make the processor.
        TypeError: ``at`` is not one of the four moments, or a step of a kind with isolation.
        AssertionError: the worker was not killed at the moment, or the second worker did not finish the job.
    """
    if not isinstance(at, Moment):
        rule = "must be AtEnd(), AtStep(…), AtProgress(…) or AfterSeconds(…)"
        raise TypeError(f"at={shown(at)} {rule}")
    own = settings_in_use(settings, "kill_worker_during")
    [kind] = resolve_kinds([processor], own).values()
    if isinstance(at, AtStep) and kind.is_isolated:
        rule = f"does not work for kind {kind.name}: with isolation its steps run in a process of their own"
        raise TypeError(f"at={at} {rule}")
    if kind.origin is None:
        raise InvalidTarget(
            f"another process cannot make the processor of kind {kind.name}: define its class at the top "
            "level of a module, without arguments, or give an instance that is an attribute of a module"
        )
    payload_text(type(kind.processor), payload)  # refuses a wrong payload before anything starts
    async with JobClient(own) as client:
        # With fewer stalls allowed, the kill alone might put the job in quarantine, or fail it.
        stalls = min(max(kind.limits.max_stalls, _LEAST_STALLS), MOST_STALLS)
        job = await client.enqueue(type(kind.processor), payload, max_stalls=stalls)
        order = {
            "origin": kind.origin,
            "file": getattr(sys.modules[kind.origin.partition(":")[0]], "__file__", None),
            "path": sys.path,
            "job_id": str(job.id),
        }
        killed = await _run(own, {**order, "at": [type(at).__name__, *at]}, timeout)
        _check_killed(killed, kind.name, at, timeout)
        second = await _run(own, {**order, "dead": killed.worker_id}, timeout)
        found = await client.get(job.id)
        if second.code != 0:
            raise AssertionError(
                f"the second worker did not finish job {job.id} of kind {kind.name} within {timeout:g} s: "
                f"it is {found.status}, last error: {found.last_error}{_log(second)}"
            )
        return KilledJob(
            job_id=job.id,
            status=found.status,
            result=found.result,
            error=found.last_error,
            runs=found.fencing_token,
            timeline=await client.timeline(job.id),
        )


class _Ended(NamedTuple):
    """A worker process that has ended; if ``code`` is None, it took too long and was killed."""

    code: int | None
    worker_id: str
    said: str
    log: str


def _check_killed(ended: _Ended, kind: str, at: Moment, timeout: float) -> None:
    if ended.code == -signal.SIGKILL and ended.worker_id:
        return
    if ended.code == ENDED_BEFORE:
        raise AssertionError(f"the job of kind {kind} ended before {_in_words(at)}: {ended.said}")
    if ended.code is None:
        raise AssertionError(
            f"the job of kind {kind} did not come to {_in_words(at)} within {timeout:g} s{_log(ended)}"
        )
    raise AssertionError(f"the worker of kind {kind} ended with exit code {ended.code}{_log(ended)}")


def _in_words(at: Moment) -> str:
    match at:
        case AtEnd():
            return "the end of process"
        case AtStep(name):
            return f"the end of step {name!r}"
        case AtProgress(progress):
            return f"progress {progress:g}"
        case AfterSeconds(seconds):
            return f"{seconds:g} s had passed"


def _log(ended: _Ended) -> str:
    return f"; the end of its log:\n{ended.log}" if ended.log else ""


async def _run(settings: Settings, order: Mapping[str, Any], seconds: float) -> _Ended:
    """Run a worker process to its end; it outlives neither this call nor this process."""
    with tempfile.TemporaryDirectory(prefix="jsworker-killed-") as folder:
        output, log = Path(folder, "output"), Path(folder, "log")
        process = _start(settings, order, output, log)
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = await asyncio.to_thread(process.wait, seconds)
        finally:
            process.kill()
            process.wait()
        worker_id, _, said = _read(output).partition("\n")
        return _Ended(code, worker_id, said.strip(), _read(log)[-_SHOWN_CHARACTERS:])


def _start(
    settings: Settings, order: Mapping[str, Any], output: Path, log: Path
) -> "subprocess.Popen[bytes]":
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    # The caller takes the job back, as a supervisor does; no worker may do it before.
    values["recover_on_start"] = False
    flags = ["-P"] if sys.flags.safe_path else []
    with output.open("wb") as stdout, log.open("wb") as stderr:
        return start_with_parent(
            [sys.executable, *flags, "-m", "jsworker.testing.killed_worker", json.dumps(order)],
            env=changed_environment(os.environ, values),
            death_signal=signal.SIGKILL,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )


def _read(file: Path) -> str:
    return file.read_text(errors="replace")
