"""``run_job``: one run in memory, with the checks and the JSON of a worker."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from pydantic import BaseModel
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from jsworker import (
    Fail,
    Job,
    JobCancelled,
    JobClient,
    JobProcessor,
    OwnershipLost,
    Retry,
    Settings,
    Snooze,
    UsageError,
    load_settings,
)
from jsworker.core.errors import InvalidJson, InvalidPayload, InvalidStep
from jsworker.core.job import MemberResult
from jsworker.ownership.pool import driver_url
from jsworker.testing import run_job, run_of, sync, work_until_empty


class Text(BaseModel):
    text: str


class CountWords(JobProcessor[Text]):
    async def process(self, job: Job[Text]) -> dict[str, Any]:
        await job.update_progress(stage="count", progress=0.5, message="half")
        await job.update_progress(progress=1.0)
        await job.save_checkpoint({"at": (1, 2)})
        return {"words": len(job.payload.text.split()), "at": datetime(2026, 1, 1, tzinfo=UTC)}


class CountPlainly(JobProcessor[Text]):
    def process(self, job: Job[Text]) -> int:
        job.sync.update_progress(stage="count", progress=1.0)
        job.sync.save_checkpoint(3)
        return int(job.sync.step("length", len, job.payload.text))


class Raising(JobProcessor):
    """Raises what it was made with."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def process(self, job: Job[dict[str, Any]]) -> None:
        await job.update_progress(stage="about to")
        raise self.error


async def test_it_returns_what_the_run_came_to_and_has_said() -> None:
    run = await run_job(CountWords, {"text": "to be or not"})
    assert run.completed
    assert run.result == {"words": 4, "at": "2026-01-01T00:00:00Z"}
    assert (run.stage, run.progress, run.message) == ("count", 1.0, "half")
    assert [report.progress for report in run.reports] == [0.5, 1.0]
    assert run.checkpoint == {"at": [1, 2]}


async def test_a_plain_function_runs_in_a_thread() -> None:
    run = await run_job(CountPlainly, Text(text="abc"))
    assert (run.result, run.stage, run.checkpoint, run.steps) == (3, "count", 3, {"length": 3})


def test_it_blocks_where_there_is_no_event_loop() -> None:
    assert sync.run_job(CountPlainly, Text(text="abc")).result == 3


async def test_the_blocking_form_says_what_to_do_in_an_async_test() -> None:
    with pytest.raises(RuntimeError, match=r"await jsworker\.testing\.run_job"):
        sync.run_job(CountPlainly, Text(text="abc"))


@pytest.mark.parametrize(
    "error", [Retry(after=3), Fail("no"), Snooze(after=5), ValueError("no"), KeyError(1)]
)
async def test_it_raises_what_the_processor_raises(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        await run_job(Raising(error), {})
    assert caught.value is error
    assert run_of(caught.value).stage == "about to"


class Closing(Raising):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        if job.payload:
            await super().process(job)

    async def teardown(self) -> None:
        raise RuntimeError("not closed")


async def test_an_error_of_teardown_hides_no_error_of_the_processor() -> None:
    first = ValueError("first")
    with pytest.raises(ValueError, match="first") as caught:
        await run_job(Closing(first), {"raises": 1})
    assert caught.value is first
    assert first.__notes__ == ["and teardown raised RuntimeError: not closed"]
    assert run_of(first).stage == "about to"
    with pytest.raises(RuntimeError, match="not closed") as alone:
        await run_job(Closing(first), {})
    assert run_of(alone.value).completed


class RaisingPlainly(Raising):
    def process(self, job: Job[dict[str, Any]]) -> None:  # type: ignore[override]
        job.sync.update_progress(stage="about to")
        raise self.error


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("processor", [Raising, RaisingPlainly])
def test_an_exit_ends_the_run_and_not_the_event_loop(processor: type[Raising], error: BaseException) -> None:
    async def caught() -> str:
        with pytest.raises(type(error)):
            await run_job(processor(error), {})
        await asyncio.sleep(0)
        return run_of(error).stage or ""

    assert asyncio.run(caught()) == "about to"
    with pytest.raises(type(error)):
        sync.run_job(processor(error), {})


def test_an_error_of_no_run_has_no_run() -> None:
    with pytest.raises(ValueError, match="KeyError was raised by no run_job"):
        run_of(KeyError())


async def test_a_payload_that_would_be_refused_is_refused() -> None:
    with pytest.raises(InvalidPayload, match="payload of kind count-words: text"):
        await run_job(CountWords, {"text": 3})
    small = settings_with(max_payload_bytes=20)
    with pytest.raises(InvalidPayload, match="JSWORKER_MAX_PAYLOAD_BYTES=20"):
        await run_job(CountWords, {"text": "x" * 20}, settings=small)


async def dropped(job: Job[Any], call: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "step": lambda: job.step("a", print),
        "sleep": lambda: job.sleep(60, name="a"),
        "save_checkpoint": lambda: job.save_checkpoint(1),
        "update_progress": lambda: job.update_progress(progress=0.5),
        "add_to_batch": lambda: job.add_to_batch("other", [{}]),
        "quiet": lambda: job.quiet(1),
    }
    calls[call]()


@pytest.mark.filterwarnings("ignore:coroutine 'Job:RuntimeWarning")  # Python's own
@pytest.mark.parametrize(
    "call", ["step", "sleep", "save_checkpoint", "update_progress", "add_to_batch", "quiet"]
)
async def test_a_call_that_is_never_awaited_fails_the_run(call: str) -> None:
    class Forgetful(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await dropped(job, call)

    says = rf"job\.{call}\(\) has done nothing, for it was never awaited: write await job\.{call}\(\), in a"
    with pytest.raises(UsageError, match=says):
        await run_job(Forgetful, {})


async def test_a_coroutine_that_is_returned_without_await_fails_the_run() -> None:
    def returning(made: Callable[[Job[Any]], Any]) -> type[JobProcessor]:
        class Returning(JobProcessor):
            def process(self, job: Job[dict[str, Any]]) -> Any:
                return made(job)

        return Returning

    says = r"^job\.step\(\) has done nothing, for it was never awaited: .* job\.sync\.step\(\)$"
    with pytest.raises(UsageError, match=says):
        await run_job(returning(lambda job: job.step("a", print)), {})
    with pytest.raises(UsageError, match=r"^process returned a coroutine that was never awaited: write"):
        await run_job(returning(lambda _: asyncio.sleep(0)), {})


@pytest.mark.filterwarnings("ignore:coroutine 'Job:RuntimeWarning")  # Python's own
async def test_a_call_that_an_error_beside_it_has_dropped_is_never_awaited() -> None:
    def build() -> Any:
        raise ValueError

    class Catching(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            with suppress(ValueError):
                await asyncio.gather(job.step("a", print), build())

    with pytest.raises(UsageError, match=r"job\.step\(\) has done nothing, for it was never awaited"):
        await run_job(Catching, {})


async def test_calls_that_are_awaited_later_or_by_others_are_awaited() -> None:
    class Gathering(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            later = job.save_checkpoint(1)
            await asyncio.gather(job.step("a", str, 1), job.step("b", str, 2), asyncio.create_task(later))

    run = await run_job(Gathering, {})
    assert (run.completed, run.checkpoint, run.steps) == (True, 1, {"a": "1", "b": "2"})


async def test_calls_that_are_cancelled_or_closed_before_they_begin_are_not_dropped() -> None:
    class Reporting(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> str:
            asyncio.create_task(job.update_progress(progress=0.1)).cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(job.update_progress(progress=0.5), timeout=0)
            with suppress(TimeoutError):
                async with asyncio.timeout(0):
                    await asyncio.gather(job.save_checkpoint(1), job.step("a", str, 1))
            job.quiet(1).close()
            return "done"

    assert (await run_job(Reporting, {})).result == "done"


@pytest.mark.filterwarnings("ignore:coroutine '_enqueued:RuntimeWarning")
async def test_a_child_is_enqueued_though_nobody_awaits_that() -> None:
    class Forgetful(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            job.enqueue("child", {"n": 1})  # type: ignore[unused-coroutine] # what it is about
            job.enqueue_many("child", [{"n": 2}, {"n": 3}])  # type: ignore[unused-coroutine] # likewise

    run = await run_job(Forgetful, {})
    assert [each.payload["n"] for each in run.enqueued] == [1, 2, 3]


def settings_with(**changes: Any) -> Settings:
    return load_settings(database_url="postgresql://127.0.0.1/none", **changes)


async def test_a_result_that_would_be_refused_is_refused() -> None:
    class Bad(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> Any:
            return job.payload.get("size", 0) * "x" or object()

    with pytest.raises(InvalidJson, match="result"):
        await run_job(Bad, {})
    with pytest.raises(InvalidJson, match="JSWORKER_MAX_RESULT_BYTES=10"):
        await run_job(Bad, {"size": 10}, settings=settings_with(max_result_bytes=10))


async def test_a_checkpoint_or_progress_that_would_be_refused_is_refused() -> None:
    class Bad(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.update_progress(progress=job.payload["progress"])
            await job.save_checkpoint("x" * 20)

    with pytest.raises(ValueError, match=r"progress=1\.5 must be a number between 0 and 1"):
        await run_job(Bad, {"progress": 1.5})
    with pytest.raises(InvalidJson, match="JSWORKER_MAX_CHECKPOINT_BYTES=10"):
        await run_job(Bad, {"progress": 1}, settings=settings_with(max_checkpoint_bytes=10))


async def test_a_checkpoint_is_saved_and_not_assigned() -> None:
    class Assign(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            job.checkpoint = {"page": 3}  # type: ignore[misc]  # nobody would store it

    with pytest.raises(AttributeError, match="'checkpoint' of 'Job' object has no setter"):
        await run_job(Assign, {})


async def test_the_job_is_as_it_is_wanted() -> None:
    class Tell(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> list[Any]:
            return [job.attempt, job.cleared, job.clear_reason, job.checkpoint, job.id, job.should_stop]

    job_id = uuid4()
    run = await run_job(
        Tell,
        {},
        attempt=3,
        cleared=True,
        clear_reason="its worker died",
        checkpoint={"n": 1},
        job_id=job_id,
        draining=True,
    )
    assert run.result == [3, True, "its worker died", {"n": 1}, str(job_id), True]
    assert run.checkpoint == {"n": 1}


@dataclass
class Receipt:
    cents: int


class Charge(JobProcessor):
    """Charges once, sleeps, and charges no second time."""

    def __init__(self) -> None:
        self.charged = 0
        self.opened = 0

    async def setup(self) -> None:
        self.opened += 1

    async def teardown(self) -> None:
        self.opened -= 1

    async def charge(self) -> Receipt:
        self.charged += 1
        return Receipt(cents=500)

    async def process(self, job: Job[dict[str, Any]]) -> int:
        assert self.opened == 1
        receipt = await job.step("charge", self.charge)
        await job.sleep(3600, name="cool-off")
        return receipt.cents


async def test_steps_are_kept_for_the_next_run_and_sleeps_are_over_in_it() -> None:
    charge = Charge()
    with pytest.raises(Snooze) as caught:
        await run_job(charge, {})
    steps = run_of(caught.value).steps
    assert steps == {"charge": {"cents": 500}, "cool-off": None}
    run = await run_job(charge, {}, steps=steps)
    assert (run.result, charge.charged, charge.opened) == (500, 1, 0)


class Order(JobProcessor):
    """Shows the order and the numbers of what it gets."""

    max_attempts = 1

    async def process(self, job: Job[dict[str, Any]]) -> list[str]:
        step = await job.step("given", lambda: job.payload["given"])
        if job.payload["saves"]:
            await job.save_checkpoint(job.payload["given"])
        return [repr(value) for value in (job.payload, step, job.checkpoint)]


async def test_keys_and_numbers_are_those_that_a_worker_gives(job_client: JobClient) -> None:
    given = {"zeta": 1, "a": 1e22, "mid": -0.0, "b": [{"bb": 1, "c": 1e-7}]}
    job = await job_client.enqueue(Order, {"saves": True, "given": given})
    await work_until_empty([Order])
    in_a_worker = await job.result()

    run = await run_job(Order, {"saves": True, "given": given})
    assert run.result == in_a_worker
    kept = repr((await job_client.get(job.id)).checkpoint)
    assert (repr(run.checkpoint), repr(run.steps["given"])) == (kept, kept)
    payload = {"given": given, "saves": False}
    run = await run_job(Order, payload, steps={"given": given}, checkpoint=given)
    assert run.result[1:] == in_a_worker[1:]


async def test_results_of_members_are_those_that_a_worker_gives() -> None:
    class Reads(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> list[str]:
            return [repr(member.result) async for member in job.results_of("before")]

    given = [MemberResult(uuid4(), "completed", {"bb": (1, 1e22), "c": 2}, None)]
    run = await run_job(Reads, {}, results={"before": given})
    assert run.result == [repr({"c": 2, "bb": [1, 10**22]})]


async def test_a_result_and_children_are_shown_as_they_are_stored() -> None:
    class Parent(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> dict[str, Any]:
            await job.enqueue("child", {"b": 1, "a": 1e22})
            await job.add_to_batch("member", [{"b": 1, "a": 1e22}])
            return {"b": 1, "a": 1e22}

    run = await run_job(Parent, {})
    shown = [run.result, run.enqueued[0].payload, run.added[0].payload]
    assert [repr(value) for value in shown] == [repr({"a": 10**22, "b": 1})] * 3


async def test_a_step_whose_result_cannot_be_kept_fails() -> None:
    class Bad(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.step("bad", object)

    with pytest.raises(InvalidJson, match="step 'bad'"):
        await run_job(Bad, {})


async def test_a_job_has_as_many_steps_as_a_worker_allows() -> None:
    class Endless(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            for number in range(1_100):
                await job.step(f"step {number}", int)

    with pytest.raises(InvalidStep, match="step 'step 1000': the job has 1000 steps; 1000 is the most"):
        await run_job(Endless, {})


async def test_a_sleep_has_no_name_of_a_step() -> None:
    class Sleepy(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.sleep(60, name="charge")

    with pytest.raises(InvalidStep, match="sleep 'charge': an earlier run has used this name for a step"):
        await run_job(Sleepy, {}, steps={"charge": 5})


class Wait(JobProcessor):
    timeout = 0.3

    async def process(self, job: Job[dict[str, Any]]) -> str:
        await asyncio.sleep(60)
        return f"{job.kind} done"


async def test_a_cancelled_job_is_stopped() -> None:
    class Patient(Wait):
        timeout = 60.0

    with pytest.raises(JobCancelled, match="patient was cancelled"):
        await run_job(Patient, {}, cancel_after=0.1)


async def test_a_lost_job_is_stopped_as_lost() -> None:
    class GoesOn(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            with suppress(OwnershipLost):
                await job.update_progress(progress=0.1)
            await asyncio.sleep(60)

    with pytest.raises(OwnershipLost, match="goes-on was stopped"):
        await run_job(GoesOn, {}, lost_after=0, cancel_after=0.1)


async def test_a_plain_function_sees_that_it_is_cancelled() -> None:
    class Look(JobProcessor):
        def process(self, job: Job[dict[str, Any]]) -> str:
            while not job.cancelled:
                time.sleep(0.01)
            return "stopped"

    assert (await run_job(Look, {}, cancel_after=0.1)).result == "stopped"


async def test_a_time_out_holds() -> None:
    with pytest.raises(TimeoutError, match=r"wait timed out after 0\.3 s"):
        await run_job(Wait, {})


async def test_the_deadline_is_the_time_out_from_now() -> None:
    class Look(JobProcessor):
        timeout = 60.0

        async def process(self, job: Job[dict[str, Any]]) -> float:
            assert job.deadline is not None
            return (job.deadline - before).total_seconds()

    before = datetime.now(UTC)
    run = await run_job(Look, {})
    assert 60 <= run.result <= 60 + (datetime.now(UTC) - before).total_seconds()


async def test_cancelling_the_call_stops_the_run() -> None:
    stopped = []

    class Note(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                stopped.append(job.kind)
                raise

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await run_job(Note, {})
    await asyncio.sleep(0)
    assert stopped == ["note"]


class Members(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> list[Any]:
        added = await job.add_to_batch(CountWords, [Text(text="a")])
        return [len(added), *[member.result async for member in job.results_of("before")]]


async def test_batches_and_results_of_members() -> None:
    results = {"before": [MemberResult(uuid4(), "completed", 7, None)]}
    run = await run_job(Members, {}, results=results)
    assert run.result == [1, 7]
    assert [(job.kind, job.payload) for job in run.added] == [("count-words", {"text": "a"})]
    with pytest.raises(ValueError, match="no such node"):
        await run_job(Members, {})


# --- job.transaction() on a given session ---


class Store(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction(result={"stored": True}) as session:
            await session.execute(text("INSERT INTO receipts VALUES (:n)"), {"n": job.payload["n"]})
            if job.payload["n"] < 0:
                raise ValueError("negative")


class StorePlainly(JobProcessor):
    def process(self, job: Job[dict[str, Any]]) -> None:
        for attempt in job.sync.transaction(result={"stored": True}, retry=True):
            with attempt as session:
                session.execute(text("INSERT INTO receipts VALUES (:n)"), {"n": job.payload["n"]})


async def test_a_transaction_works_on_the_given_session(database_url: str) -> None:
    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        await session.execute(text("CREATE TEMPORARY TABLE receipts (n integer)"))
        run = await run_job(Store, {"n": 1}, session=session)
        assert (run.completed, run.result) == (True, {"stored": True})
        with pytest.raises(ValueError, match="negative") as caught:
            await run_job(Store, {"n": -1}, session=session)
        assert not run_of(caught.value).completed
        assert list(await session.scalars(text("SELECT n FROM receipts"))) == [1]
        await session.rollback()
    async with engine.connect() as connection:
        await connection.execute(text("CREATE TEMPORARY TABLE receipts (n integer)"))
        await connection.commit()  # run_job then begins the transaction
        assert (await run_job(Store, {"n": 2}, session=connection)).result == {"stored": True}
        assert list(await connection.scalars(text("SELECT n FROM receipts"))) == [2]
        await connection.rollback()
        assert list(await connection.scalars(text("SELECT n FROM receipts"))) == []
        await connection.rollback()
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        await run_job(Store, {"n": 3}, session=connection)
        assert list(await connection.scalars(text("SELECT n FROM receipts"))) == [3]
    await engine.dispose()


def test_a_plain_transaction_works_on_the_given_session(database_url: str) -> None:
    engine = create_engine(driver_url(database_url))
    with Session(engine) as session:
        session.execute(text("CREATE TEMPORARY TABLE receipts (n integer)"))
        run = sync.run_job(StorePlainly, {"n": 1}, session=session)
        assert (run.completed, run.result) == (True, {"stored": True})
        assert list(session.scalars(text("SELECT n FROM receipts"))) == [1]
    with engine.connect() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE receipts (n integer)"))
        connection.commit()
        sync.run_job(StorePlainly, {"n": 2}, session=connection)
        assert list(connection.scalars(text("SELECT n FROM receipts"))) == [2]
        connection.rollback()
        assert list(connection.scalars(text("SELECT n FROM receipts"))) == []
        connection.rollback()
        connection.execution_options(isolation_level="AUTOCOMMIT")
        sync.run_job(StorePlainly, {"n": 3}, session=connection)
        assert list(connection.scalars(text("SELECT n FROM receipts"))) == [3]
    engine.dispose()


async def test_a_transaction_without_a_session_says_what_is_missing() -> None:
    with pytest.raises(TypeError, match=r"run_job\(…, session=…\), an AsyncSession or AsyncConnection"):
        await run_job(Store, {"n": 1})
    with pytest.raises(TypeError, match="a Session or Connection: none was given"):
        await run_job(StorePlainly, {"n": 1})


async def test_the_completing_statement_gives_its_row(database_url: str) -> None:
    class Own(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            row = (await session.execute(job.complete_statement({"n": 1}))).one()
            assert row.id == job.id

    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        assert (await run_job(Own, {})).result == {"n": 1}
    await engine.dispose()


async def test_what_it_was_scheduled_for_is_told() -> None:
    class Nightly(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> float:
            assert job.scheduled_for is not None
            return (job.scheduled_for - instant).total_seconds()

    instant = datetime.now(UTC)
    assert (await run_job(Nightly, {}, scheduled_for=instant + timedelta(hours=1))).result == 3600


@pytest.mark.parametrize(("lost_after", "reports", "checkpoint"), [(0, 0, None), (1, 1, None), (2, 2, None)])
async def test_a_lost_job_can_write_no_more(lost_after: int, reports: int, checkpoint: Any) -> None:
    with pytest.raises(OwnershipLost) as caught:
        await run_job(CountWords, {"text": "a"}, lost_after=lost_after)
    run = run_of(caught.value)
    assert (len(run.reports), run.checkpoint, run.completed) == (reports, checkpoint, False)


async def test_a_lost_job_keeps_no_step_and_rolls_its_transaction_back(database_url: str) -> None:
    charge = Charge()
    with pytest.raises(OwnershipLost) as caught:
        await run_job(charge, {}, lost_after=0)
    assert (charge.charged, run_of(caught.value).steps) == (1, {})
    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        await session.execute(text("CREATE TEMPORARY TABLE receipts (n integer)"))
        with pytest.raises(OwnershipLost):
            await run_job(Store, {"n": 1}, session=session, lost_after=0)
        assert list(await session.scalars(text("SELECT n FROM receipts"))) == []
    await engine.dispose()


async def test_a_lost_job_that_goes_on_does_not_complete() -> None:
    class GoesOn(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> int:
            with suppress(OwnershipLost):
                await job.update_progress(progress=0.1)
            await job.enqueue("child", {})
            return 5

    class GoesOnPlainly(JobProcessor):
        def process(self, job: Job[dict[str, Any]]) -> int:
            with suppress(OwnershipLost):
                job.sync.update_progress(progress=0.1)
            return 5

    for processor, lost_after in ((GoesOn, 0), (GoesOn, 1), (GoesOnPlainly, 0), (GoesOnPlainly, 1)):
        with pytest.raises(OwnershipLost) as caught:
            await run_job(processor, {}, lost_after=lost_after)
        run = run_of(caught.value)
        assert (run.completed, run.result, run.enqueued) == (False, None, [])


class Again(JobProcessor):
    """Completes by a transaction, and then tries every other write."""

    max_attempts = 1
    seen: ClassVar[list[str]] = []

    async def process(self, job: Job[dict[str, Any]]) -> int:
        async with job.transaction(1) as session:
            await session.execute(INSERT, {"n": 1})
        for write in (
            self.complete_again(job),
            job.update_progress(progress=0.5),
            job.save_checkpoint({"n": 1}),
            job.quiet(5),
            job.step("step", self.seen.append, "called"),
            job.sleep(5, name="sleep"),
            job.add_to_batch("other", [{}]),
        ):
            try:
                await write
                self.seen.append("written")
            except OwnershipLost:
                self.seen.append("lost")
            except UsageError:
                self.seen.append("refused")
        return 3

    async def complete_again(self, job: Job[dict[str, Any]]) -> None:
        async with job.transaction(2) as session:
            await session.execute(INSERT, {"n": 2})


class AgainPlainly(Again):
    def process(self, job: Job[dict[str, Any]]) -> int:  # type: ignore[override]
        with job.sync.transaction(1) as session:
            session.execute(INSERT, {"n": 1})
        for write in (
            lambda: self.complete_again_plainly(job),
            lambda: job.sync.update_progress(progress=0.5),
            lambda: job.sync.save_checkpoint({"n": 1}),
            lambda: job.sync.quiet(5),
            lambda: job.sync.step("step", self.seen.append, "called"),
            lambda: job.sync.sleep(5, name="sleep"),
            lambda: job.sync.add_to_batch("other", [{}]),
        ):
            try:
                write()
                self.seen.append("written")
            except OwnershipLost:
                self.seen.append("lost")
            except UsageError:
                self.seen.append("refused")
        return 3

    def complete_again_plainly(self, job: Job[dict[str, Any]]) -> None:
        with job.sync.transaction(2) as session:
            session.execute(INSERT, {"n": 2})


INSERT = text("INSERT INTO receipts VALUES (:n)")
RECEIPTS = text("SELECT n FROM receipts")


@pytest.mark.parametrize("processor", [Again, AgainPlainly])
async def test_a_completed_job_can_write_no_more_as_in_a_worker(
    job_client: JobClient, processor: type[Again]
) -> None:
    url = driver_url(job_client.settings.database_dsn())
    with create_engine(url, poolclass=NullPool).connect() as connection:
        connection.execute(text("CREATE TABLE receipts (n integer)"))
        connection.commit()
        Again.seen.clear()
        if processor is Again:
            async with AsyncSession(create_async_engine(url, poolclass=NullPool)) as session:
                run = await run_job(processor, {}, session=session)
                receipts = list(await session.scalars(RECEIPTS))
        else:
            run = await run_job(processor, {}, session=connection)
            receipts = list(connection.scalars(RECEIPTS))
            connection.rollback()
        assert (run.result, run.reports, run.checkpoint, run.steps, run.added) == (1, [], None, {}, [])
        in_memory = [*Again.seen]
        Again.seen.clear()
        job = await job_client.enqueue(processor, {})
        await work_until_empty([processor])
        assert (await job_client.get(job.id)).result == run.result
        assert list(connection.scalars(RECEIPTS)) == receipts == [1]
    assert in_memory == Again.seen == ["refused"] + ["lost"] * 6


async def test_a_lost_job_adds_no_members() -> None:
    class Adds(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.add_to_batch("other", [{"n": 1}])
            await job.add_to_batch("other", [{"n": 2}])

    with pytest.raises(OwnershipLost) as caught:
        await run_job(Adds, {}, lost_after=1)
    assert [added.payload["n"] for added in run_of(caught.value).added] == [1]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_members_added_by_statement_share_the_fate_of_the_transaction(
    database_url: str, *, is_lost: bool
) -> None:
    class Adds(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            with suppress(ZeroDivisionError):
                async with job.transaction() as session:
                    await job.add_to_batch("other", [{"n": 2}])  # in a transaction of its own
                    await session.execute(job.add_to_batch_statement("other", [{"n": 1}]))
                    _ = 1 / 0
            async with job.transaction() as session:
                await session.execute(job.add_to_batch_statement("other", [{"n": 3}]))

    class AddsPlainly(JobProcessor):
        def process(self, job: Job[dict[str, Any]]) -> None:
            with suppress(ZeroDivisionError), job.sync.transaction() as session:
                job.sync.add_to_batch("other", [{"n": 2}])
                session.execute(job.add_to_batch_statement("other", [{"n": 1}]))
                _ = 1 / 0
            with job.sync.transaction() as session:
                session.execute(job.add_to_batch_statement("other", [{"n": 3}]))

    async def added(processor: type[JobProcessor[dict[str, Any]]], session: Any) -> list[int]:
        try:
            run = await run_job(processor, {}, session=session, lost_after=1 if is_lost else None)
        except OwnershipLost as error:
            run = run_of(error)
        return [each.payload["n"] for each in run.added]

    expected = [2] if is_lost else [2, 3]
    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        assert await added(Adds, session) == expected
    await engine.dispose()
    plain_engine = create_engine(driver_url(database_url))
    with Session(plain_engine) as plain_session:
        assert await added(AddsPlainly, plain_session) == expected
    plain_engine.dispose()


async def test_members_are_not_added_while_a_statement_locks_the_batch(database_url: str) -> None:
    class Adds(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            async with job.transaction() as session:
                await session.execute(job.add_to_batch_statement("other", [{"n": 1}]))
                await job.add_to_batch("other", [{"n": 2}])

    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        with pytest.raises(UsageError, match=r"job\.add_to_batch\(\) would wait for the end of the"):
            await run_job(Adds, {}, session=session)
    await engine.dispose()


class Notify(JobProcessor[Text]):
    async def process(self, job: Job[Text]) -> None:
        await job.enqueue("send-mail", {"to": job.payload.text}, delay=60)
        await job.enqueue_many(CountWords, [job.payload])
        if job.payload.text == "wrong":
            raise Fail("on purpose")


async def test_what_it_enqueues_is_told_once_it_has_completed() -> None:
    run = await run_job(Notify, Text(text="a"))
    assert [(job.kind, job.payload) for job in run.enqueued] == [
        ("send-mail", {"to": "a"}),
        ("count-words", {"text": "a"}),
    ]
    with pytest.raises(Fail) as caught:
        await run_job(Notify, Text(text="wrong"))
    assert run_of(caught.value).enqueued == []


async def test_a_step_enqueues_nothing() -> None:
    class FanOut(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.step("fan out", job.enqueue, "child", {})

    with pytest.raises(UsageError, match=r"job\.enqueue\(\) in step 'fan out'"):
        await run_job(FanOut, {})
    run = await run_job(FanOut, {}, steps={"fan out": None})
    assert run.enqueued == []


async def test_what_it_enqueues_shares_the_fate_of_its_transaction(database_url: str) -> None:
    class Enqueue(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            with suppress(ZeroDivisionError):
                async with job.transaction():
                    await job.enqueue("first", {})
                    _ = 1 / 0
            async with job.transaction():
                await job.enqueue("second", {})
            with pytest.raises(UsageError, match="nothing more can be enqueued"):
                await job.enqueue("third", {})

    engine = create_async_engine(driver_url(database_url))
    async with AsyncSession(engine) as session:
        run = await run_job(Enqueue, {}, session=session)
    await engine.dispose()
    assert [job.kind for job in run.enqueued] == ["second"]
    assert run.completed


async def test_a_statement_of_ones_own_leaves_no_child_out() -> None:
    class Own(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.enqueue("child", {})
            job.complete_statement()

    with pytest.raises(UsageError, match=r"does not insert what job\.enqueue"):
        await run_job(Own, {})
