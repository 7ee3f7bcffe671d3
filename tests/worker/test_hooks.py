"""Setup, teardown and the hooks of a processor: when they are called, and that their errors harm no job."""

import asyncio
import re
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import Fail, JsworkerError
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.worker import SetupFailed
from tests.support.polling import eventually
from tests.worker.processors import KIND, Scripted, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, new_worker


class Opened(JobProcessor):
    """Notes the order of what happens to it."""

    kind = KIND

    def __init__(self, *, setup_error: BaseException | None = None) -> None:
        self.order: list[str] = []
        self._setup_error = setup_error

    async def setup(self) -> None:
        self.order.append("setup")
        if self._setup_error is not None:
            raise self._setup_error

    async def process(self, _job: Job[Any]) -> None:
        self.order.append("process")

    async def teardown(self) -> None:
        self.order.append("teardown")


class Other(Opened):
    kind = "other"


async def test_setup_comes_before_the_first_job_and_teardown_after_the_last(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    processor = Opened()
    jobs = await client.enqueue_many(KIND, [{}] * 3)
    running = await start(processor)
    for job in jobs:
        await rows.becomes(job.id, "completed")
    await running.worker.close()
    assert processor.order == ["setup", *["process"] * 3, "teardown"]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
async def test_a_setup_that_raises_ends_the_start_in_one_line_and_leaves_nothing_behind(
    client: JobClient, rows: Rows, settings: Settings, error: type[BaseException]
) -> None:
    first, second = Opened(), Other(setup_error=error("no GPU\nin this machine"))
    running = new_worker(first, second, settings=settings)
    job = await client.enqueue(KIND, {})
    before = asyncio.all_tasks()
    with pytest.raises(SetupFailed) as refusal:
        await running.worker.start()
    what = f"setup of kind other raised {error.__name__}: no GPU"
    assert re.fullmatch(rf"{what} \({__file__}, line [0-9]+\)", str(refusal.value))
    assert isinstance(refusal.value, JsworkerError)
    assert isinstance(refusal.value.__cause__, error)
    assert (first.order, second.order) == (["setup", "teardown"], ["setup"])
    assert await running.worker.close() == 0

    async def ended() -> None:  # a statement that was given up may still be cancelled
        assert asyncio.all_tasks() <= before

    await eventually(ended)
    assert await rows.query("SELECT id FROM jsworker.workers") == []
    assert (await rows.job(job.id))["status"] == "queued"
    assert "worker.started" not in running.events.names()


class PlainSetup(Opened):
    def setup(self) -> None:  # type: ignore[override]
        pass


class PlainHook(JobProcessor):
    kind = KIND

    def on_failed(self, _job: Job[Any], _error: BaseException) -> None:  # type: ignore[override]
        pass

    async def process(self, _job: Job[Any]) -> None:
        raise Fail("as asked")


async def test_a_hook_that_is_a_plain_function_is_named(
    client: JobClient, settings: Settings, start: StartWorker
) -> None:
    running = new_worker(PlainSetup(), settings=settings)
    with pytest.raises(SetupFailed, match=f"TypeError: {__name__}:PlainSetup.setup must be async def "):
        await running.worker.start()
    assert await running.worker.close() == 0
    running = await start(PlainHook())
    await client.enqueue(KIND, {})
    [told] = await running.events.told("job.error", times=1)
    assert told["error"] == f"in a hook: TypeError: {__name__}:PlainHook.on_failed must be async def"


async def cancel_and_wait() -> None:
    """Do what ends a task of one's own in haste: its CancelledError goes on."""
    task = asyncio.create_task(asyncio.Event().wait())
    task.cancel()
    await task


class CancelsInSetup(Opened):
    kind = "cancels-in-setup"

    async def setup(self) -> None:
        await cancel_and_wait()


class CancelsInTeardown(Opened):
    kind = "cancels-in-teardown"

    async def teardown(self) -> None:
        await cancel_and_wait()


async def test_a_setup_in_which_a_task_of_its_own_was_cancelled_has_raised(settings: Settings) -> None:
    with pytest.raises(SetupFailed, match="setup of kind cancels-in-setup raised CancelledError"):
        await new_worker(CancelsInSetup(), settings=settings).worker.start()


class WaitsInSetup(Opened):
    def __init__(self) -> None:
        super().__init__()
        self.waits = asyncio.Event()

    async def setup(self) -> None:
        self.waits.set()
        await asyncio.Event().wait()


async def test_a_start_that_is_cancelled_in_a_setup_is_cancelled(settings: Settings) -> None:
    processor = WaitsInSetup()
    starting = asyncio.create_task(new_worker(processor, settings=settings).worker.start())
    await processor.waits.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


class BadTeardown(Opened):
    kind = "bad-teardown"

    async def teardown(self) -> None:
        raise SystemExit(4)


class EndlessTeardown(Opened):
    kind = "endless-teardown"

    async def teardown(self) -> None:
        await asyncio.Event().wait()


async def test_teardowns_that_raise_or_hang_are_reported_and_the_others_still_called(
    client: JobClient, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jsworker.worker.worker._TEARDOWN_SECONDS", 0.1)
    good = Opened()
    running = await start(good, BadTeardown(), CancelsInTeardown(), EndlessTeardown())
    assert await running.worker.close() == 0
    assert good.order == ["setup", "teardown"]
    told = {event["what"]: event["reason"] for event in running.events.of("worker.degraded")}
    assert told == {
        "teardown of kind bad-teardown": "SystemExit: 4",
        "teardown of kind cancels-in-teardown": "CancelledError",
        "teardown of kind endless-teardown": "TimeoutError",
    }
    assert running.events.names()[-1] == "worker.stopped"


class BadHook(Scripted):
    kind = KIND

    async def process(self, job: Job[Any]) -> str:
        if job.payload.get("fail"):
            raise Fail("as asked")
        return "fine"

    async def on_failed(self, job: Job[Any], error: BaseException) -> None:
        await super().on_failed(job, error)
        raise job_errors[job.payload["fail"]]


job_errors: dict[str, BaseException] = {
    "ValueError": ValueError("in the hook"),
    "SystemExit": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
}


async def test_a_hook_that_raises_is_reported_and_changes_nothing(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    processor = BadHook()
    running = await start(processor)
    bad = await client.enqueue_many(KIND, [{"fail": name} for name in job_errors])
    for job in bad:
        assert (await rows.becomes(job.id, "failed"))["last_error"] == "as asked"
    told = await running.events.told("job.error", times=len(bad))
    assert {event["error"] for event in told} == {
        "in a hook: ValueError: in the hook",
        "in a hook: SystemExit: 3",
        "in a hook: KeyboardInterrupt",
        "in a hook: GeneratorExit",
    }
    good = await client.enqueue(KIND, {})
    assert (await rows.becomes(good.id, "completed"))["result"] == "fine"
    await running.stream_is_empty()
    assert len(processor.failed) == len(bad)


class SlowHook(Scripted):
    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()
        self.done = False

    async def process(self, job: Job[Any]) -> None:
        if job.payload.get("fail"):
            raise Fail

    async def on_failed(self, job: Job[Any], error: BaseException) -> None:
        await super().on_failed(job, error)
        await self.go_on.wait()
        self.done = True


async def test_a_slow_hook_keeps_no_job_slot_and_the_drain_waits_for_it(
    client: JobClient, rows: Rows, make_settings: Any, start: StartWorker
) -> None:
    processor = SlowHook()
    running = await start(processor, with_settings=make_settings(concurrency=1))
    failing = await client.enqueue(KIND, {"fail": True})
    await rows.becomes(failing.id, "failed")
    after = await client.enqueue(KIND, {})
    await rows.becomes(after.id, "completed")
    assert not processor.done
    closing = asyncio.create_task(running.worker.close())
    await running.events.told("worker.draining")
    processor.go_on.set()
    assert await closing == 0
    assert processor.done


async def test_a_payload_that_cannot_be_read_calls_no_hook(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """There is no job that could be handed to it; the row and the event tell."""

    class Typed(JobProcessor[int]):
        kind = KIND
        hooked = False

        async def process(self, _job: Job[int]) -> None:
            raise AssertionError

        async def on_failed(self, _job: Job[int], _error: BaseException) -> None:
            Typed.hooked = True

    running = await start(Typed())
    job = await client.enqueue(KIND, {"not": "a number"})
    await rows.becomes(job.id, "failed")
    await running.events.told("job.failed")
    await running.worker.close()
    assert not Typed.hooked


async def test_processors_may_be_given_as_classes_or_instances(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(Opened, scripted(echo, kind="given"))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
