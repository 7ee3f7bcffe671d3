"""Processors that misbehave in their first attempt; copied to where ``run`` imports it.

Not until their job is cleared: on a busy machine a claim may be answered so late that the job is handed back
and cleared before it has begun.
"""

import asyncio
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import structlog
from sqlalchemy import text

from jsworker import Job, JobProcessor


class Circle:
    """Holds itself: the garbage collector alone frees it."""

    def __init__(self) -> None:
        self.itself = self


class Collects(JobProcessor):
    """Returns after how many new objects the garbage collector runs, and whether it freed a circle."""

    async def process(self, _job: Job[dict[str, Any]]) -> tuple[int, bool]:
        left = weakref.ref(Circle())
        for _ in range(600):
            await asyncio.sleep(0.05)
            if left() is None:
                break
        return gc.get_threshold()[0], left() is None


class CollectsApart(JobProcessor):
    """Returns after how many new objects the garbage collector runs in a process of isolated jobs."""

    isolation = "process"

    async def process(self, _job: Job[dict[str, Any]]) -> int:
        return gc.get_threshold()[0]


class FillsThreads(JobProcessor):
    """Keeps every thread of the default executor busy, with others waiting for one."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        loop = asyncio.get_running_loop()
        threads = [loop.run_in_executor(None, time.sleep, 3600) for _ in range(100)]
        await job.update_progress(stage="full")
        await asyncio.gather(*threads)


class Nap(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.update_progress(stage="asleep")
        if not job.cleared:
            await asyncio.sleep(job.payload["seconds"])


class Silent(JobProcessor):
    """Reports nothing of its own, and ends at once when it was taken back."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        if not job.cleared:
            await asyncio.sleep(3600)


async def _leave() -> None:
    sys.exit(2)


class Exits(JobProcessor):
    """Calls ``sys.exit`` in a task of its own, as a library's code for command lines does."""

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        await asyncio.gather(_leave())


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> float:
    raise MemoryError("no more")


class HoldsBack:
    """Middleware that writes to the file ``flushed`` what it has held back."""

    @asynccontextmanager
    async def __call__(self, job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:  # noqa: ARG002 -- a middleware's shape
        yield

    def flush(self, seconds: float) -> None:  # noqa: ARG002 -- as above
        with Path("flushed").open("a") as file:
            file.write(f"{os.getpid()} middleware\n")


def _export_late() -> None:
    """Write the spans of this process to the file ``flushed``, but not before it is told to."""
    from opentelemetry import trace  # noqa: PLC0415 -- slow, and only this needs it
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 -- as above
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter  # noqa: PLC0415 -- as above

    def line(span: Any) -> str:
        return f"{os.getpid()} {span.name.partition(' ')[0]}\n"

    exporter = ConsoleSpanExporter(out=Path("flushed").open("a"), formatter=line)  # noqa: SIM115 -- as long as the process
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    trace.set_tracer_provider(provider)


class Ends(JobProcessor):
    """Ends its worker in one of several ways, and goes on."""

    middleware = (HoldsBack(),)

    async def setup(self) -> None:
        _export_late()

    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.attempt > 1:
            return
        loop = asyncio.get_running_loop()
        match job.payload["how"]:
            case "stop":
                loop.stop()
            case "interrupt":
                loop.call_soon(_interrupt)
            case "cancel":
                for task in asyncio.all_tasks():
                    task.cancel()
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "memory":
                # As a job does that takes all memory. Earlier versions import this file, too.
                sys.modules["jsworker.worker.watchdog"].boottime = _fail  # type: ignore[attr-defined] # for the test
        await asyncio.sleep(3600)


class Aborts(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.attempt == 1:
            os.abort()


class Thrashes(JobProcessor):
    """Is killed in its first attempt while its supervisor stands still: a machine that is out of memory."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.attempt == 1:
            parent = os.getppid()
            os.kill(parent, signal.SIGSTOP)
            command = ["sh", "-c", f"sleep 3; kill -CONT {parent}"]
            subprocess.Popen(command, start_new_session=True)  # noqa: ASYNC220 -- returns at once
            os.kill(os.getpid(), signal.SIGKILL)


class Copies(JobProcessor):
    """Returns the exit code of a copy of its process, which returns likewise, raises or waits."""

    async def process(self, job: Job[dict[str, Any]]) -> int:
        if copy := os.fork():
            _, status = await asyncio.to_thread(os.waitpid, copy, 0)
            return os.waitstatus_to_exitcode(status)
        if job.payload["then"] == "raise":
            raise ValueError("in the copy")
        if job.payload["then"] == "wait":
            await asyncio.sleep(3600)
        return -1


class CopiesInCallback(JobProcessor):
    """Forks in a callback of the event loop; returns the exit code of the copy."""

    async def process(self, job: Job[dict[str, Any]]) -> int:
        copies: list[int] = []
        loop = asyncio.get_running_loop()
        loop.call_soon(os.fork if job.payload["how"] == "fork" else lambda: copies.append(os.fork()))
        await asyncio.sleep(0)
        _, status = await asyncio.to_thread(os.waitpid, copies[0] if copies else -1, 0)
        return os.waitstatus_to_exitcode(status)


class CopiesApart(Copies):
    """The same in an isolated process."""

    isolation = "process"


class CopiesWell(JobProcessor):
    """Returns what copies of its process have computed, in an event loop of their own."""

    async def process(self, _job: Job[dict[str, Any]]) -> list[int]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return await asyncio.to_thread(pool.map, in_a_loop, [1, 2, 3])


_LOCK = text("SELECT pg_advisory_xact_lock(7)")


class LeavesACopy(JobProcessor):
    """Dies in its transaction, and leaves a copy of its process that lives on."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction() as session:
            await session.execute(_LOCK)
            if job.attempt == 1:
                while _is_connecting():  # noqa: ASYNC110 -- the driver tells of no end
                    await asyncio.sleep(0.01)
                _leave_copy()


class LeavesACopyOfItsThread(JobProcessor):
    """The same in a thread."""

    async def setup(self) -> None:
        self._loop = asyncio.get_running_loop()

    def process(self, job: Job[dict[str, Any]]) -> None:
        with job.sync.transaction() as session:
            session.execute(_LOCK)
            if job.attempt == 1:
                is_held = threading.Event()
                self._loop.call_soon_threadsafe(self._hold_loop, is_held)
                is_held.wait()
                _leave_copy()

    def _hold_loop(self, is_held: threading.Event) -> None:
        if _is_connecting():
            self._loop.call_later(0.01, self._hold_loop, is_held)
            return
        is_held.set()
        threading.Event().wait()  # until the process is killed


def _is_connecting() -> bool:
    """Return whether a connection is being made: the driver gives it to its owner when it is made."""
    from jsworker.core import own_sockets  # noqa: PLC0415 -- the versions that a test upgrades from have none

    owned = set[int]()
    for connection in own_sockets._own:
        with suppress(Exception):  # it is closed
            owned.add(connection.fileno())
    return any(each.fd not in owned for each in psutil.Process().net_connections("inet"))


def _leave_copy() -> None:
    copy = multiprocessing.get_context("fork").Process(target=time.sleep, args=[3600])
    copy.start()
    os.write(2, f"copy {copy.pid} lives on\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_loop(number: int) -> int:
    return asyncio.run(asyncio.sleep(0, result=2 * number))


class Poison(JobProcessor):
    """Kills every process that it runs in."""

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        os.abort()


class Blocks(JobProcessor):
    """Keeps the event loop, and tells so: a job that is merely claimed could still be handed back."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.attempt == 1:
            os.write(2, b"keeps the event loop\n")
            time.sleep(3600)  # noqa: ASYNC251 -- the fault itself


class SetsUpForEver(JobProcessor):
    """Keeps the event loop before it begins."""

    async def setup(self) -> None:
        time.sleep(3600)  # noqa: ASYNC251 -- the fault itself

    async def process(self, job: Job[dict[str, Any]]) -> None: ...


class ClosesWhileStopped(JobProcessor):
    """Gets SIGTERM once more while it is torn down."""

    async def teardown(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.5)
        os.write(2, b"is closed\n")

    async def process(self, job: Job[dict[str, Any]]) -> None: ...


class SetsUpSlowly(JobProcessor):
    async def setup(self) -> None:
        os.write(2, b"sets up\n")
        await asyncio.sleep(3600)

    async def process(self, job: Job[dict[str, Any]]) -> None: ...


class HoldsGil(JobProcessor):
    """Keeps the whole interpreter, and tells so."""

    def process(self, job: Job[dict[str, Any]]) -> None:
        if job.attempt == 1:
            os.write(2, b"keeps the interpreter\n")
            re.match(r"(a|aa)+$", "a" * 60 + "b")


class HoldsGilAlone(JobProcessor):
    """The same in quarantine; writes its process id into a file at one go."""

    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        file = Path(job.payload["file"])
        file.with_suffix(".unfinished").write_text(str(os.getpid()))
        file.with_suffix(".unfinished").rename(file)
        re.match(r"(a|aa)+$", "a" * 60 + "b")


class LeaksApart(JobProcessor):
    """Keeps memory, in an isolated process, and returns its id."""

    isolation = "process"
    max_memory_mb = 250
    kept: ClassVar[list[bytes]] = []

    def process(self, job: Job[dict[str, Any]]) -> int:
        self.kept.append(b"x" * job.payload["bytes"])
        return os.getpid()


class ReplacesSigchld(JobProcessor):
    """Takes SIGCHLD for itself, in the worker's process."""

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class TakesAllThreads(JobProcessor):
    """Leaves a thread that does not end in time, and lets the system start no more."""

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        threading.Thread(target=time.sleep, args=(600,)).start()
        threading._start_new_thread = _refuse_thread  # type: ignore[attr-defined]
        faulthandler.dump_traceback_later = _refuse_last_resort


class QuietWithoutThreads(JobProcessor):
    """Begins and ends a quiet phase in a process that can start no more threads."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        faulthandler.dump_traceback_later = _refuse_last_resort
        await job.quiet(30.0)


def _refuse_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def _refuse_last_resort(*_: object, **__: object) -> None:
    faulthandler.cancel_dump_traceback_later()
    raise RuntimeError("unable to start watchdog thread")


class ClosesStreams(JobProcessor):
    """Closes the standard streams of its process."""

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        sys.stdout.close()
        sys.stderr.close()


class DiesApart(JobProcessor):
    """Kills the isolated process in which its first attempt runs."""

    isolation = "process"

    async def process(self, job: Job[dict[str, Any]]) -> int:
        if job.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


class Quiet(JobProcessor):
    """Keeps the event loop for longer than the watchdog waits, and says so before."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.quiet(10.0)
        time.sleep(2.5)  # noqa: ASYNC251 -- the fault itself


class LongQuiet(JobProcessor):
    """Keeps the event loop for several stale thresholds of the tests, and says so before."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.quiet(60.0)
        time.sleep(6.0)  # noqa: ASYNC251 -- the fault itself


class LeavesQuiet(JobProcessor):
    """Ends long before the quiet phase that it has announced."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.quiet(3600.0)


class Stubborn(JobProcessor):
    """Ignores its time-out."""

    timeout = 0.3

    def process(self, job: Job[dict[str, Any]]) -> None:
        while job.attempt == 1:
            time.sleep(0.01)


class Swallows(JobProcessor):
    """Ignores its time-out as a coroutine: whatever it catches, it goes on."""

    timeout = 0.3

    async def process(self, job: Job[dict[str, Any]]) -> None:
        while job.attempt == 1:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue


class Forks(JobProcessor):
    """Ends a process that it has forked, with SIGTERM."""

    def process(self, job: Job[dict[str, Any]]) -> int:  # noqa: ARG002 -- a processor's shape
        reading, writing = os.pipe()
        if not (forked := os.fork()):
            os.write(writing, b"here")
            time.sleep(30)
            os._exit(0)
        os.read(reading, 4)
        os.kill(forked, signal.SIGTERM)
        return os.WTERMSIG(os.waitpid(forked, 0)[1])


class LosesStderr(JobProcessor):
    """Leaves the process without a stderr of its own."""

    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.payload["how"] == "closed":
            sys.stderr.close()
        else:
            sys.stderr = io.StringIO()


class Leaves(JobProcessor):
    """Leaves a process behind whose parent is gone, until it is told to go on."""

    def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        waits = 'while [ ! -e "go on" ]; do sleep 0.1; done &'
        subprocess.run(["sh", "-c", waits], check=True)


class Speaks(JobProcessor):
    """Logs a line in either way."""

    async def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        speak()


class SpeaksInThread(JobProcessor):
    """The same as a plain function."""

    def process(self, job: Job[dict[str, Any]]) -> None:  # noqa: ARG002 -- a processor's shape
        speak()


def speak() -> None:
    logging.getLogger("my_jobs").warning("said by %s", "logging")
    structlog.get_logger().warning("said by structlog", pid=os.getpid())


class Spawns(JobProcessor):
    """Enqueues children; its first runs die before their end, as many as it is told."""

    max_stalls = 100

    async def process(self, job: Job[dict[str, Any]]) -> None:
        child = {"parent": str(job.id), "token": job.fencing_token}
        await job.enqueue("child", child | {"n": 0})
        if job.fencing_token <= job.payload.get("dies", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        await job.update_progress(stage="asleep")
        await asyncio.sleep(job.payload["seconds"])
        async with job.transaction():
            await job.enqueue("child", child | {"n": 1})


class InSteps(JobProcessor):
    """Notes each call of a step in a file; dies once within a step and once right after one, if it is to.

    The last step waits for a file, if one is named.
    """

    max_stalls = 100

    async def process(self, job: Job[dict[str, Any]]) -> list[int]:
        results = []
        for number in range(job.payload["steps"]):
            results.append(await job.step(f"step {number}", self.act, job, number))
            self.die_once(job, f"after {number}")
            if number == 1:
                await job.sleep(0.2, name="pause")
        return results

    async def act(self, job: Job[dict[str, Any]], number: int) -> int:
        self.note(job.payload["file"], f"{job.id} {number} {job.fencing_token}\n")
        await asyncio.sleep(job.payload["seconds"])
        if number == job.payload["steps"] - 1 and "until" in job.payload:
            until = Path(job.payload["until"])
            while not await asyncio.to_thread(until.exists):  # noqa: ASYNC110 -- a file tells of no event
                await asyncio.sleep(0.05)
        self.die_once(job, f"within {number}")
        return number * number

    def die_once(self, job: Job[dict[str, Any]], place: str) -> None:
        if place in job.payload.get("dies", ()):
            try:
                os.close(os.open(f"{job.payload['file']} {place}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, path: str, line: str) -> None:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, line.encode())
        os.close(file)
