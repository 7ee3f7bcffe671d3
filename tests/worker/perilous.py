"""Processors that another process can make: what quarantine needs of them."""

import asyncio
import os
import signal
import sys
import time
from typing import Any, ClassVar
from uuid import UUID

import structlog
from sqlalchemy import text

from jsworker.core.errors import Snooze, UsageError
from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor


class Perilous(JobProcessor):
    """Does what the payload's ``does`` names; always in quarantine, because no stall is left to it."""

    kind = "perilous"
    max_stalls = 1
    backoff = Backoff(first=0.0)
    failed: ClassVar[dict[UUID, BaseException]] = {}

    async def on_failed(self, job: Job[dict[str, Any]], error: BaseException) -> None:
        Perilous.failed[job.id] = error

    async def process(self, job: Job[dict[str, Any]]) -> Any:
        match job.payload["does"]:
            case "raise":
                raise ValueError("raised in quarantine")
            case "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "block":
                time.sleep(600)  # noqa: ASYNC251 -- what it is about
            case "be quiet and block":
                await job.quiet(60.0)
                time.sleep(2.5)  # noqa: ASYNC251 -- longer than the watchdog's patience
            case "report":
                await job.update_progress(stage="alone", progress=0.5)
                await job.save_checkpoint({"seen": job.checkpoint})
            case "wait to be told":
                while not job.should_stop:  # noqa: ASYNC110 -- a processor has no other way to learn it
                    await asyncio.sleep(0.01)
            case "wait":
                await asyncio.Event().wait()
            case "end a program":
                program = await asyncio.create_subprocess_exec("sleep", "600")
                program.terminate()
                async with asyncio.timeout(10):
                    return {"code": await program.wait()}
            case "complete":
                async with job.transaction(result={"by": "its transaction"}) as session:
                    await session.execute(text("CREATE TABLE effects (id int)"))
            case "complete and be killed":
                async with job.transaction(result={"by": "its transaction"}):
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
        return {"pid": os.getpid(), "attempt": job.attempt, "token": job.fencing_token}


class Waiting(JobProcessor):
    """Waits for a job of another kind."""

    kind = "waiting"
    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> str:
        from jsworker import JobClient  # noqa: PLC0415 -- the other kinds' processes need not load it

        async with JobClient.from_env(**job.payload) as client:
            other = await client.enqueue("scripted", {}, delay=3600)
            try:
                return f"got {await other.result(60)}"
            except UsageError as error:
                return str(error)


class PutOff(JobProcessor):
    """Asks in quarantine to run later."""

    kind = "put-off"
    max_stalls = 1

    async def process(self, _job: Job[dict[str, Any]]) -> None:
        raise Snooze(3600, "alone, and later")


class InSteps(JobProcessor):
    """Does its work in steps in quarantine, and sleeps in between."""

    kind = "in-steps"
    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> Any:
        pids = [await job.step("coroutine", self.pid), await job.step("thread", os.getpid)]
        await job.sleep(3600, name="cool-off")
        return pids

    async def pid(self) -> int:
        return os.getpid()


class Parent(JobProcessor):
    """Enqueues children in quarantine."""

    kind = "parent"
    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> int:
        how = job.payload["how"]
        if how == "step":
            await job.step("enqueue", job.enqueue, "child", {"of": how})
        if how == "transaction":
            async with job.transaction():
                await job.enqueue_many("child", [{"of": how, "n": n} for n in range(2)])
        else:
            await job.enqueue_many("child", [{"of": how, "n": n} for n in range(2)], expires_in=3600)
        if how == "raise":
            raise ValueError("raised in quarantine")
        return os.getpid()


class Stubborn(JobProcessor):
    """A plain function that ignores its time-out."""

    kind = "stubborn"
    max_stalls = 1
    timeout = 0.3

    def process(self, job: Job[dict[str, Any]]) -> None:
        while "end" not in job.payload:
            time.sleep(600)


class Talkative(JobProcessor):
    """Prints, logs, and leaves a thread behind for which the end of its process would wait."""

    kind = "talkative"
    max_stalls = 1

    async def process(self, job: Job[dict[str, Any]]) -> None:
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
        sys.stdout.write("printed in quarantine")
        for number in range(job.payload["lines"]):
            structlog.get_logger().warning("logged in quarantine", number=number)


class Shaped(JobProcessor):
    """May be made with an argument, which no other process knows."""

    kind = "shaped"
    max_stalls = 1

    def __init__(self, shape: str = "plain") -> None:
        self.shape = shape

    async def process(self, job: Job[dict[str, Any]]) -> Any:
        return {"pid": os.getpid(), "shape": self.shape, "attempt": job.attempt}


SHAPED = Shaped("round")
