"""Processors whose jobs run in isolated processes."""

import asyncio
import ctypes
import gc
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import structlog
from sqlalchemy import text

from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor
from jsworker.worker.isolation import isolated_messages as wire

LEAKED: list[bytes] = []
SPENT = Backoff(first=3600.0, longest=3600.0)


def compute_until(path: str) -> None:
    """Keep the interpreter until a file exists."""
    while not Path(path).exists():
        sum(range(10_000))


def leak(megabytes: int) -> None:
    """Take memory, every page of it, and keep it."""
    LEAKED.append(b"x" * (megabytes * 1_000_000))


def refuse_to_start(_: threading.Thread) -> None:
    """Raise what a thread raises that the system does not start."""
    raise RuntimeError("can't start new thread")


class Isolated(JobProcessor):
    """Does what the payload's ``does`` names, and tells in which process."""

    kind = "isolated"
    isolation = "process"
    backoff = SPENT
    setups: ClassVar[int] = 0

    async def setup(self) -> None:
        Isolated.setups += 1

    async def teardown(self) -> None:
        if path := os.environ.get("TORN_DOWN"):
            Path(path, str(os.getpid())).touch()  # noqa: ASYNC240 -- takes no time

    async def process(self, job: Job[dict[str, Any]]) -> Any:
        does: Callable[[Job[dict[str, Any]]], Any] = getattr(self, f"_{job.payload['does']}")
        found = await does(job)
        return {"pid": os.getpid(), "setups": Isolated.setups, "found": found}

    async def _return(self, job: Job[dict[str, Any]]) -> Any:
        return job.payload.get("value")

    async def _signal_its_group(self, job: Job[dict[str, Any]]) -> bool:  # noqa: ARG002 -- as all of them
        if is_own := os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGTERM)
        return is_own

    async def _look_at_the_collector(self, job: Job[dict[str, Any]]) -> list[bool]:  # noqa: ARG002 -- as all of them
        return [gc.isenabled(), gc.get_freeze_count() > 0]

    async def _write_to_its_link(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- as all of them
        os.write(int(sys.argv[3]), b"this is no message\n")
        await asyncio.sleep(3600)

    async def _break_its_report(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- as all of them
        def lacks_memory(**_: Any) -> None:
            raise MemoryError

        setattr(wire, "RunEnded", lacks_memory)  # noqa: B010 -- mypy refuses the assignment

    async def _compute(self, job: Job[dict[str, Any]]) -> None:
        compute_until(job.payload["until"])

    async def _wait(self, _job: Job[dict[str, Any]]) -> None:
        await asyncio.Event().wait()

    async def _wait_for_file(self, job: Job[dict[str, Any]]) -> None:
        while not Path(job.payload["until"]).exists():  # noqa: ASYNC110, ASYNC240 -- another process makes it
            await asyncio.sleep(0.01)

    async def _wait_to_be_told(self, job: Job[dict[str, Any]]) -> None:
        while not job.should_stop:  # noqa: ASYNC110 -- a processor has no other way to learn it
            await asyncio.sleep(0.01)

    async def _segfault(self, _job: Job[dict[str, Any]]) -> None:
        ctypes.string_at(0)

    async def _exit(self, _job: Job[dict[str, Any]]) -> None:
        os._exit(3)

    async def _be_killed(self, _job: Job[dict[str, Any]]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _leave_by_sys_exit(self, _job: Job[dict[str, Any]]) -> None:
        sys.exit("no reason")

    async def _close_its_files(self, _job: Job[dict[str, Any]]) -> None:
        os.closerange(3, 100)
        await asyncio.Event().wait()

    async def _raise(self, _job: Job[dict[str, Any]]) -> None:
        raise ValueError("raised in isolation")

    async def _log(self, _job: Job[dict[str, Any]]) -> None:
        structlog.get_logger().warning("logged in isolation")

    async def _report(self, job: Job[dict[str, Any]]) -> Any:
        await job.update_progress(stage="apart", progress=0.5)
        await job.save_checkpoint({"seen": job.checkpoint})
        return await job.step("pid", os.getpid)

    async def _sleep(self, job: Job[dict[str, Any]]) -> str:
        await job.sleep(0.0 if job.attempt > 1 else 1.0, name="nap")
        return "slept"

    async def _be_quiet(self, job: Job[dict[str, Any]]) -> None:
        await job.quiet(60.0)
        time.sleep(3.0)  # noqa: ASYNC251 -- longer than the watchdog's patience

    async def _complete(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction(result={"by": "its transaction"}) as session:
            await session.execute(text("CREATE TABLE effects (id int)"))


class Other(Isolated):
    """Another kind, which shares the processes."""

    kind = "other-isolated"


class Rotating(Isolated):
    """Two jobs for each process."""

    kind = "rotating"
    max_jobs_per_process = 2


class Stubborn(JobProcessor):
    """A plain function that ignores its time-out, with the interpreter in its hands or not."""

    kind = "stubborn-isolated"
    isolation = "process"
    timeout = 1.0
    max_attempts = 1
    failed: ClassVar[dict[UUID, BaseException]] = {}

    async def on_failed(self, job: Job[dict[str, Any]], error: BaseException) -> None:
        Stubborn.failed[job.id] = error

    def process(self, job: Job[dict[str, Any]]) -> None:
        if job.payload["does"] == "match":  # one call that never lets another thread run
            re.match(r"(a+)+$", "a" * 64 + "b")
        while job.payload["does"] == "loop":
            pass


class EndlessAtFirst(JobProcessor):
    """Ignores every stop of its first run; makes the file that it is given once it is at work."""

    kind = "endless-at-first"
    isolation = "process"

    def process(self, job: Job[dict[str, str]]) -> None:
        if "at_work" in job.payload:
            Path(job.payload["at_work"]).touch()
        while job.fencing_token == 1:
            time.sleep(0.05)


class Steady(JobProcessor):
    """Reports progress, often enough, for longer than it may be silent."""

    kind = "steady"
    isolation = "process"
    progress_timeout = 6.0
    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        for n in range(18):
            await job.update_progress(progress=n / 18)
            await asyncio.sleep(0.5)


class Leaky(JobProcessor):
    """Leaks 100 MB a job, or as many as it is told; more than 250 are too many."""

    kind = "leaky"
    isolation = "process"
    max_memory_mb = 250
    backoff = SPENT

    def process(self, job: Job[dict[str, Any]]) -> int:
        for _ in range(job.payload.get("times", 1)):
            leak(100)
            time.sleep(0.3)
        return os.getpid()


class LeavesOpen(JobProcessor):
    """Leaves files open: those that its process may have, but for ``free`` of them."""

    kind = "leaves-open"
    isolation = "process"
    backoff = SPENT

    def process(self, job: Job[dict[str, Any]]) -> int:
        opened = [os.dup(0)]
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 100, hard))
        with suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for _ in range(job.payload["free"]):
            os.close(opened.pop())
        return os.getpid()


class WithoutThreads(JobProcessor):
    """Leaves a process that starts no thread for a job."""

    kind = "without-threads"
    isolation = "process"
    backoff = SPENT

    def process(self, job: Job[dict[str, Any]]) -> int:
        if job.payload.get("uses_up"):
            setattr(threading.Thread, "start", refuse_to_start)  # noqa: B010 -- mypy refuses the assignment
        return os.getpid()


class Frugal(Isolated):
    """Needs little, and may have little."""

    kind = "frugal"
    max_memory_mb = 150


class Loaded(JobProcessor):
    """Keeps from its setup what the limit allows once; returns its process, and how many setups that made."""

    kind = "loaded"
    isolation = "process"
    max_memory_mb = 300
    setups: ClassVar[int] = 0

    async def setup(self) -> None:
        Loaded.setups += 1
        leak(150)

    async def process(self, _job: Job[dict[str, Any]]) -> list[int]:
        return [os.getpid(), Loaded.setups]


class LoadedToo(Loaded):
    """Another kind, which does not fit beside it."""

    kind = "loaded-too"


class Huge(JobProcessor):
    """Needs more than it may have, before its first job."""

    kind = "huge"
    isolation = "process"
    max_memory_mb = 5

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        """Do nothing."""


class Unready(JobProcessor):
    """Cannot be set up where the environment says so."""

    kind = "unready"
    isolation = "process"
    max_jobs_per_process = 1

    async def setup(self) -> None:
        if os.environ.get("UNREADY") == "raises":
            raise ConnectionError("no model server")
        if os.environ.get("UNREADY") == "exits":
            os._exit(4)
        if os.environ.get("UNREADY") == "waits":
            await asyncio.Event().wait()

    async def process(self, _job: Job[dict[str, Any]]) -> int:
        return os.getpid()
