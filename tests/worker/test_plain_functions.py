"""Processors that are plain functions: they run in a thread, and the worker lives on while they block."""

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import KIND, LATER, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

tenant = contextvars.ContextVar("tenant", default="nobody")


class Block:
    """A plain function that blocks its thread until a test lets it go on, then returns or raises."""

    def __init__(self, *, ends_in: Exception | None = None) -> None:
        self.jobs: list[Job[Any]] = []
        self.go_on = threading.Event()
        self._ends_in = ends_in

    def process(self, job: Job[Any]) -> str:
        self.jobs.append(job)
        if not self.go_on.wait(120.0):
            raise AssertionError
        if self._ends_in is not None:
            raise self._ends_in
        return "ended by itself"

    async def met(self) -> Job[Any]:
        """Wait until it blocks and return its job."""

        async def blocks() -> Job[Any]:
            assert self.jobs
            return self.jobs[0]

        return await eventually(blocks)


async def test_it_runs_in_a_thread_of_its_own_with_the_applications_context(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    def process(job: Job[Any]) -> dict[str, Any]:
        seen = tenant.get()
        tenant.set("changed by a job")
        return {"tenant": seen, "main": threading.current_thread() is threading.main_thread()}

    async def process_async(job: Job[Any]) -> str:
        return tenant.get()

    tenant.set("acme")
    await start(scripted(process), scripted(process_async, kind="coroutine"))
    for _ in range(2):  # what one job sets, the next does not see
        job = await client.enqueue(KIND, {})
        assert (await rows.becomes(job.id, "completed"))["result"] == {"tenant": "acme", "main": False}
    job = await client.enqueue("coroutine", {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "acme"
    assert tenant.get() == "acme"


async def test_what_a_coroutine_sets_in_its_context_its_hook_sees_and_the_job_after_it_does_not(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    seen_by_hook: dict[str, str] = {}

    async def process(job: Job[Any]) -> str:
        seen = tenant.get()
        tenant.set(str(job.id))
        if job.payload["fails"]:
            raise ValueError(seen)
        return seen

    async def on_failed(job: Job[Any], error: BaseException) -> None:
        seen_by_hook[str(job.id)] = tenant.get()

    tenant.set("acme")
    one_slot = settings.model_copy(update={"concurrency": 1})
    await start(scripted(process, on_failed=staticmethod(on_failed)), with_settings=one_slot)
    jobs = await client.enqueue_many(KIND, [{"fails": n % 2 == 1} for n in range(6)], max_attempts=1)
    for job in jobs[::2]:
        assert (await rows.becomes(job.id, "completed"))["result"] == "acme"
    for job in jobs[1::2]:
        assert "ValueError: acme" in (await rows.becomes(job.id, "failed"))["last_error"]

    async def all_hooks_are_called() -> None:
        assert seen_by_hook == {str(job.id): str(job.id) for job in jobs[1::2]}

    await eventually(all_hooks_are_called)


async def test_it_has_the_jobs_calls_in_a_blocking_form(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    def process(job: Job[Any]) -> Any:
        job.sync.update_progress(stage="loading", progress=0.25, message="half of the half")
        job.sync.save_checkpoint({"page": 7})
        job.sync.quiet(30.0)
        return job.checkpoint

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["stage"], row["progress"], row["message"]) == ("loading", 0.25, "half of the half")
    assert row["checkpoint"] == row["result"] == {"page": 7}
    assert row["stale_after"].total_seconds() == settings.stale_threshold + 30.0


async def test_the_blocking_calls_are_refused_where_they_would_block_the_event_loop(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> list[str]:
        refusals = []
        calls: tuple[Callable[[], Any], ...] = (
            job.sync.update_progress,
            lambda: job.sync.save_checkpoint(1),
            lambda: job.sync.quiet(1),
            job.sync.transaction,
        )
        for call in calls:
            with pytest.raises(RuntimeError) as refusal:
                call()
            refusals.append(str(refusal.value))
        return refusals

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert set(row["result"]) == {"job.sync is for plain functions in a thread; await the job's own calls"}


async def test_it_may_block_for_longer_than_the_stale_threshold(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    block = Block()
    running, other = await start(scripted(block.process)), await start(scripted(block.process))
    job = await client.enqueue(KIND, {})
    await block.met()
    await rows.is_renewed(job.id, threshold=settings.stale_threshold)
    await rounds_pass(count_rounds(other.worker._components.scans), 3)
    block.go_on.set()
    row = await rows.becomes(job.id, "completed")
    assert (row["fencing_token"], row["result"]) == (1, "ended by itself")
    assert not running.events.of("stale.detected") + other.events.of("stale.detected")


async def test_a_time_out_tells_it_to_stop_and_the_job_stays_here_until_it_does(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    block = Block()
    await start(scripted(block.process, timeout=0.1))
    await start(scripted(block.process, timeout=0.1))
    enqueued = await client.enqueue(KIND, {})
    job = await block.met()

    async def told() -> None:
        assert job.should_stop

    await eventually(told)
    before = (await rows.job(enqueued.id))["last_activity_at"]

    async def renewed() -> None:
        row = await rows.job(enqueued.id)
        assert row["last_activity_at"] > before
        assert (row["status"], row["fencing_token"]) == ("processing", 1)

    await eventually(renewed)
    assert not job.cancelled
    assert len(block.jobs) == 1
    block.go_on.set()
    row = await rows.becomes(enqueued.id, "completed")
    assert (row["result"], row["attempts"]) == ("ended by itself", 1)


async def test_a_thread_that_raises_after_its_time_out_fails_the_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    block = Block(ends_in=ValueError("stopped when told"))
    await start(scripted(block.process, timeout=0.1, backoff=LATER))
    enqueued = await client.enqueue(KIND, {})
    job = await block.met()

    async def told() -> None:
        assert job.should_stop

    await eventually(told)
    block.go_on.set()
    row = await rows.becomes(enqueued.id, "scheduled")
    assert row["last_error"].startswith("timed out after 0.1 s; ValueError: stopped when told")


async def test_a_thread_that_cannot_be_started_is_no_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start(scripted(lambda _job: "done"))
    begin = threading.Thread.start

    def refuse_jobs(thread: threading.Thread) -> None:
        if thread.name.startswith(f"jsworker {KIND}"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse_jobs)
        job = await client.enqueue(KIND, {}, max_attempts=1)
        [degraded] = await running.events.told("worker.degraded")
        assert degraded["what"] == "threads"
        assert degraded["reason"] == "its thread could not be started: RuntimeError: can't start new thread"
        assert (await running.events.told("job.released"))[0]["reason"] == degraded["reason"]
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["stalls"], row["attempts"]) == (0, 0, 1)
    await running.events.told("worker.restored")


def raise_at_a_call(*_: Any) -> None:
    raise ValueError("traced")


@pytest.mark.parametrize("status", ["completed", "failed"])
async def test_a_trace_function_that_it_leaves_set_does_not_keep_its_outcome_from_the_worker(
    status: str, client: JobClient, rows: Rows, start: StartWorker
) -> None:
    def process(_job: Job[Any]) -> None:
        sys.settrace(raise_at_a_call)
        if status == "failed":
            raise KeyError

    job = await client.enqueue(KIND, {}, max_attempts=1)
    await start(scripted(process))
    await rows.becomes(job.id, status)


async def test_a_cancel_reaches_it_as_should_stop(client: JobClient, rows: Rows, start: StartWorker) -> None:
    def process(job: Job[Any]) -> None:
        met.set()
        while not job.should_stop:
            time.sleep(0.005)
        raise ValueError(f"cancelled={job.cancelled}")

    met = threading.Event()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await asyncio.to_thread(met.wait, 60.0)
    await client.cancel(job.id)
    row = await rows.becomes(job.id, "cancelled")
    assert row["last_error"].startswith("ValueError: cancelled=True")
    await running.stream_is_empty()


def traced(process: Callable[..., Coroutine[Any, Any, bool]]) -> Callable[..., Coroutine[Any, Any, bool]]:
    """A decorator that is itself no coroutine function, as many are."""

    @wraps(process)
    def wrapper(*arguments: Any) -> Coroutine[Any, Any, bool]:
        return process(*arguments)

    return wrapper


def offloaded(process: Callable[..., bool]) -> Callable[..., Coroutine[Any, Any, bool]]:
    """A decorator that makes a coroutine function of a plain one."""

    @wraps(process)
    async def wrapper(*arguments: Any) -> bool:
        return await asyncio.to_thread(process, *arguments)

    return wrapper


class Traced(JobProcessor):
    @traced
    async def process(self, _job: Job[Any]) -> bool:
        return threading.current_thread() is threading.main_thread()


class Offloaded(JobProcessor):
    @offloaded
    def process(self, _job: Job[Any]) -> bool:
        return threading.current_thread() is threading.main_thread()


async def test_decorated_processors_are_called_as_what_they_are(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(Traced(), Offloaded())
    for kind, on_the_loop in (("traced", True), ("offloaded", False)):
        job = await client.enqueue(kind, {})
        assert (await rows.becomes(job.id, "completed"))["result"] is on_the_loop
