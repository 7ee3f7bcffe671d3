"""``job.step``, ``job.sleep``: once for a job, whatever ends its runs; typed, in threads, in quarantine."""

import asyncio
import functools
import gc
import inspect
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import pytest
from pydantic import BaseModel
from sqlalchemy import text

from jsworker import JobClient, Retry
from jsworker.core.errors import DatabaseUnavailable, InvalidJson, InvalidName, InvalidStep, OwnershipLost
from jsworker.core.job import Job
from jsworker.core.processor import Backoff
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import steps
from jsworker.worker.pipeline.in_flight import StopReason
from jsworker.worker.pipeline.threads import start_thread
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.test_contents import OLD, text_of_keys
from tests.worker.perilous import InSteps
from tests.worker.processors import KIND, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

DUE = "UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE id = %s AND status = 'scheduled'"
STEPS = "SELECT name, result, fencing_token, sleeps_until FROM jsworker.job_steps ORDER BY at, name"
NOW = Backoff(first=0.0)


class Receipt(BaseModel):
    at: datetime
    cents: int


class Calls:
    """Functions that count how often they were called."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.threads: set[str] = set()

    async def charge(self, cents: int, *, to: str = "nobody") -> Receipt:
        self.made.append(f"charge {cents} {to}")
        return Receipt(at=datetime(2026, 11, 24, tzinfo=UTC), cents=cents)

    def ship(self, number: int) -> tuple[int, str]:
        self.made.append(f"ship {number}")
        self.threads.add(threading.current_thread().name)
        return number, "shipped"

    async def nothing(self) -> None:
        self.made.append("nothing")


async def test_a_later_run_gets_what_a_step_returned_without_a_call(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        receipt = await job.step("charge", calls.charge, 5, to="alice")
        assert_type(receipt, Receipt)
        shipped = await job.step("ship", calls.ship, 7)
        assert_type(shipped, tuple[int, str])
        assert_type(await job.step("lambda", lambda: calls.charge(1)), Receipt)
        assert_type(await job.step("partial", functools.partial(calls.charge, 2)), Receipt)
        await job.step("nothing", calls.nothing)
        assert (type(receipt), receipt.cents, type(shipped), shipped) == (Receipt, 5, tuple, (7, "shipped"))
        if job.attempt < 3:
            raise ValueError("again")
        return receipt

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"at": "2026-11-24T00:00:00Z", "cents": 5}
    once = ["charge 5 alice", "ship 7", "charge 1 nobody", "charge 2 nobody", "nothing"]
    assert calls.made == once
    assert [(each["name"], each["fencing_token"]) for each in await rows.query(STEPS)] == [
        (name, 1) for name in ("charge", "ship", "lambda", "partial", "nothing")
    ]
    assert await rows.told(job.id) == [*(["step"] * 5), "error", "claimed", "error", "claimed"]
    assert [each["step"] for each in await running.events.told("job.step", times=5)][:2] == ["charge", "ship"]
    [name] = calls.threads
    assert "step 'ship'" in name
    assert [step.result for step in await client.steps(job.id)][1:] == [
        [7, "shipped"],
        {"at": "2026-11-24T00:00:00Z", "cents": 1},
        {"at": "2026-11-24T00:00:00Z", "cents": 2},
        None,
    ]


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_the_run_that_stores_a_value_gets_it_as_later_runs_do(
    make_settings: Callable[..., Settings], rows: Rows, start: StartWorker, *, is_encrypted: bool
) -> None:
    given = {"zoe": 1, "amy": 1e22, "é": -0.0, "bob": [{"b": 1, "a": 1e-7}]}
    seen: list[list[str]] = []

    def typed() -> dict[str, Any]:
        return given

    async def process(job: Job[Any]) -> None:
        values = [await job.step("typed", typed), await job.step("untyped", lambda: given)]
        if job.attempt == 1:
            await job.save_checkpoint(given)
        seen.append([repr(value) for value in (*values, job.checkpoint)])
        if job.attempt == 1:
            raise Retry(0)

    changed = make_settings(encryption_keys=text_of_keys(key=OLD) if is_encrypted else None)
    await start(scripted(process), with_settings=changed)
    async with JobClient(changed) as client:
        await rows.becomes((await client.enqueue(KIND, {})).id, "completed")
    stored = {"é": 0.0, "amy": 10**22, "bob": [{"a": 1e-7, "b": 1}], "zoe": 1}
    # Encrypted content is text for the database, which does not change it.
    assert seen == [[repr(given if is_encrypted else stored)] * 3] * 2


async def test_a_plain_processor_has_the_same_steps(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    def process(job: Job[Any]) -> Any:
        receipt = job.sync.step("charge", calls.charge, 5, to="alice")
        assert_type(receipt, Receipt)
        shipped = job.sync.step("ship", calls.ship, 7)
        assert_type(shipped, tuple[int, str])
        job.sync.step("lambda", lambda: calls.charge(1))
        job.sync.sleep(timedelta(hours=1), name="cool-off")
        return [type(receipt).__name__, shipped, threading.current_thread().name in calls.threads]

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "scheduled")
    await rows.query("UPDATE jsworker.job_steps SET sleeps_until = now() WHERE sleeps_until > now()")
    await rows.query(DUE, job.id)
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == ["Receipt", [7, "shipped"], True]
    assert calls.made == ["charge 5 alice", "ship 7", "charge 1 nobody"]
    [name] = calls.threads
    assert name == f"jsworker {KIND} {job.id}"


async def test_a_step_that_raised_is_called_again_also_by_the_same_run(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    made: list[int] = []

    async def unsure(attempt: int) -> int:
        made.append(attempt)
        if len(made) < 3:
            raise OSError("no line")
        return attempt

    async def process(job: Job[Any]) -> Any:
        try:
            return await job.step("unsure", unsure, job.attempt)
        except OSError:
            return await job.step("unsure", unsure, job.attempt)

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], made) == (2, [1, 1, 2])


@pytest.mark.parametrize("in_a_group", [False, True])
async def test_a_step_whose_thread_cannot_be_started_is_no_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch, *, in_a_group: bool
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        await job.step("charge", calls.charge, 5, to="alice")
        if in_a_group:
            async with asyncio.TaskGroup() as group:
                group.create_task(job.step("ship", calls.ship, 7))
            return None
        return await job.step("ship", calls.ship, 7)

    running = await start(scripted(process))
    begin = threading.Thread.start

    def refuse_steps(thread: threading.Thread) -> None:
        if thread.name.endswith("step 'ship'"):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse_steps)
        job = await client.enqueue(KIND, {}, max_attempts=1)
        [degraded] = await running.events.told("worker.degraded")
        assert degraded["what"] == "threads"
        why = "its thread could not be started: RuntimeError: can't start new thread"
        assert degraded["reason"] == why
        assert (await running.events.told("job.released"))[0]["reason"] == why
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["stalls"], row["attempts"]) == (0, 0, 1)
    await running.events.told("worker.restored")
    assert calls.made == ["charge 5 alice", "ship 7"]


async def test_a_name_that_is_used_twice_in_one_run_is_an_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        for number in range(2):
            await job.step("ship", calls.ship, number)

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert row["last_error"].startswith(
        "InvalidStep: step 'ship' is used twice in one run: each needs a name of its own"
    )
    assert calls.made == ["ship 0"]


async def test_two_steps_at_once_need_two_names(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> Any:
        async def slow() -> int:
            await asyncio.sleep(0.05)
            return 1

        both = (job.step(name, slow) for name in job.payload["names"])
        return [str(each) for each in await asyncio.gather(*both, return_exceptions=True)]

    await start(scripted(process))
    good = await client.enqueue(KIND, {"names": ["a", "b"]})
    assert (await rows.becomes(good.id, "completed"))["result"] == ["1", "1"]
    bad = await client.enqueue(KIND, {"names": ["a", "a"]})
    one, other = (await rows.becomes(bad.id, "completed"))["result"]
    assert one == "1"
    assert "used twice" in other


class Opaque:
    pass


def opaque() -> Any:
    return {"inside": Opaque()}


def a_circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


def large() -> str:
    return "x" * 3000


def not_a_number() -> float:
    return float("nan")


def a_lie() -> int:
    return "a secret"  # type: ignore[return-value] # what it is about


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (opaque, "step 'bad': result holds a value of type Opaque, which is no JSON (at inside)"),
        (a_circle, "step 'bad': result holds a circle"),
        (large, "step 'bad': result of 3002 bytes exceeds JSWORKER_MAX_RESULT_BYTES=2000"),
        (not_a_number, "step 'bad': result holds nan, which is not a finite number"),
        (a_lie, "step 'bad': its result does not fit the return type: the whole value: Input should be"),
        (lambda: "\0", "step 'bad': result holds \\u0000, which PostgreSQL cannot store"),
    ],
    ids=["opaque", "circle", "large", "nan", "other type", "nul"],
)
async def test_a_result_that_cannot_be_stored_fails_the_job_for_good(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    *,
    settings: Settings,
    function: Callable[[], Any],
    says: str,
) -> None:
    """Another attempt would do again what the step has done, and could not store that either."""

    async def process(job: Job[Any]) -> Any:
        await job.step("bad", function)

    await start(scripted(process), with_settings=settings.model_copy(update={"max_result_bytes": 2000}))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["attempts"]) == ("result", 1)
    assert says in row["last_error"]
    assert "a secret" not in row["last_error"].split("\n")[0]
    assert await rows.query(STEPS) == []


@pytest.mark.parametrize(
    "name", ["", "x" * 256, "nul\0", "line\nbreak", "\udc80", 7, None, b"charge"], ids=repr
)
async def test_bad_names_are_refused_before_the_call(
    client: JobClient, rows: Rows, start: StartWorker, name: Any
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        with pytest.raises(InvalidName, match="must be text of 1 to 255 printable characters"):
            await job.step(name, calls.nothing)
        with pytest.raises(InvalidName):
            await job.sleep(1, name=name)
        return await job.step("é 漢" + "x" * 252, calls.nothing)

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert calls.made == ["nothing"]


def a_lock() -> threading.Lock:
    return threading.Lock()


async def test_what_is_no_function_or_has_no_json_type_is_refused_before_the_call(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        with pytest.raises(TypeError, match="step 'a' takes a function and its arguments"):
            await job.step("a", calls.nothing())  # type: ignore[call-overload] # what it is about
        with pytest.raises(InvalidStep, match="step 'b': the return type of its function has no JSON form"):
            await job.step("b", a_lock)
        for after in (-1, "60", None, float("nan"), 1e12):
            with pytest.raises(
                ValueError, match=r"^sleep 'c' for=.* must be a timedelta or a number of seconds"
            ):
                await job.sleep(after, name="c")  # type: ignore[arg-type] # what it is about

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert calls.made == []


async def test_a_stored_result_that_no_longer_fits_says_so_and_no_value(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        if job.attempt == 1:

            async def old() -> dict[str, str]:
                return {"at": "a secret", "cents": "5"}

            await job.step("charge", old)
            raise ValueError("again")
        await job.step("charge", Calls().charge, 5)

    await start(scripted(process, max_attempts=2))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    says = "InvalidJson: step 'charge': its result does not fit the return type: at: Input should be"
    assert row["last_error"].startswith(says)
    assert "a secret" not in row["last_error"]


async def test_a_job_has_a_thousand_steps_at_most(client: JobClient, rows: Rows, start: StartWorker) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        if not await rows.query("SELECT 1 FROM jsworker.job_steps LIMIT 1"):
            await rows.query(
                "INSERT INTO jsworker.job_steps (job_id, name, fencing_token) "
                "SELECT %s, n, 1 FROM generate_series(1, 999) AS n",
                job.id,
            )
        await job.step("the last one", calls.nothing)
        await job.step("one more", calls.nothing)

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert "InvalidStep: step 'one more': the job has 1000 steps; 1000 is the most" in row["last_error"]
    assert calls.made == ["nothing"]


async def test_a_zombie_keeps_nothing_and_its_run_is_ended(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    raised: list[BaseException] = []

    async def process(job: Job[Any]) -> Any:
        async def charge() -> int:
            await running.worker._components.beats.stop()  # they would find it out, too, and cancel the run
            await rows.take_back(job.id)
            return 5

        try:
            await job.step("charge", charge)
        except OwnershipLost as error:
            raised.append(error)
            assert job.should_stop
            raise

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await running.events.told("job.lost")
    assert len(raised) == 1
    assert await rows.query(STEPS) == []
    [event] = [each for each in await rows.timeline(job.id) if each["detail"].get("write") == "step"]
    assert event["event"] == "rejected"


async def test_what_a_zombie_would_do_next_it_does_not_begin(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        await rows.take_back(job.id)
        await job.step("charge", calls.charge, 5)

    running = await start(scripted(process))
    await client.enqueue(KIND, {})
    await running.events.told("job.lost")
    assert calls.made == []


@pytest.mark.parametrize("hang", [False, True], ids=["connection broken", "silent"])
async def test_a_step_whose_answer_is_lost_is_kept_once(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings, *, hang: bool
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        return await job.step("charge", calls.charge, 5)

    async with proxied(settings.database_dsn()) as (proxy, url):
        lost = proxy.lose_next_answer(b"INSERT INTO jsworker.job_steps", hang=hang)
        running = await start(
            scripted(process), with_settings=settings.model_copy(update={"database_url": url})
        )
        job = await client.enqueue(KIND, {})
        await lost
        assert (await rows.becomes(job.id, "completed"))["result"]["cents"] == 5
        await running.end()
    assert calls.made == ["charge 5 nobody"]
    assert await rows.told(job.id) == ["step"]
    assert len(await rows.query(STEPS)) == 1


async def test_a_step_waits_for_a_database_that_is_away(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    calls = Calls()
    async with proxied(settings.database_dsn()) as (proxy, url):

        async def process(job: Job[Any]) -> Any:
            async def charge() -> Receipt:
                proxy.cut()
                return await calls.charge(5)

            return await job.step("charge", charge)

        own = settings.model_copy(update={"database_url": url})
        running = await start(scripted(process), with_settings=own)
        job = await client.enqueue(KIND, {})
        await running.events.told("worker.degraded")
        proxy.restore()
        assert (await rows.becomes(job.id, "completed"))["result"]["cents"] == 5
        await running.end()
    assert calls.made == ["charge 5 nobody"]
    assert await rows.told(job.id) == ["step"]


async def test_a_run_that_is_stopped_while_a_step_is_kept_keeps_it(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """A lock on the row holds up the write; the time-out strikes meanwhile."""
    calls, locked = Calls(), asyncio.Event()

    async def process(job: Job[Any]) -> Any:
        if job.attempt > 1:
            return await job.step("charge", calls.charge, 6)

        async def charge() -> Receipt:
            await rows.query("BEGIN")
            await rows.query("SELECT 1 FROM jsworker.jobs WHERE id = %s FOR UPDATE", job.id)
            locked.set()
            return await calls.charge(5)

        async def let_go() -> None:
            await locked.wait()
            while not job.should_stop:  # noqa: ASYNC110 -- a processor has no other way to learn it
                await asyncio.sleep(0.01)
            await rows.query("COMMIT")

        letting = asyncio.create_task(let_go())
        try:
            return await job.step("charge", charge)
        finally:
            await letting

    await start(scripted(process, timeout=2.0, backoff=NOW))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"]["cents"] == 5
    assert calls.made == ["charge 5 nobody"]
    assert row["errors"] == 1


async def test_a_plain_step_is_waited_for_and_kept_when_its_run_is_stopped(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    made: list[str] = []

    def slow(job: Job[Any]) -> int:
        made.append("begun")
        while not job.should_stop:
            time.sleep(0.01)
        made.append("ended")
        return 5

    async def process(job: Job[Any]) -> Any:
        made.append(f"run {job.attempt}")
        return await job.step("slow", slow, job)

    await start(scripted(process, timeout=2.0, backoff=NOW))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["errors"]) == (5, 1)
    assert made == ["run 1", "begun", "ended", "run 2"]


async def test_a_keep_ends_with_its_run_and_nobody_is_told_of_its_error(
    client: JobClient, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, ended = asyncio.Event(), asyncio.Event()

    async def never_kept(*_args: Any, **_kwargs: Any) -> bool:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            raise DatabaseUnavailable("its connection was closed")

    async def process(job: Job[Any]) -> Any:
        return await job.step("nothing", Calls().nothing)

    monkeypatch.setattr(steps, "keep_step", never_kept)
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    running = await start(scripted(process))
    await client.enqueue(KIND, {})
    await entered.wait()
    [run] = running.worker._context.in_flight.runs.values()
    run.signal(StopReason.CANCELLED)
    await asyncio.sleep(0)  # the cancellation arrives
    run.signal(StopReason.LOST)
    await running.events.told("job.lost")
    assert ended.is_set()
    await running.worker.close(force=True)
    del run
    gc.collect()
    assert reported == []


async def test_of_an_error_in_a_thread_that_nothing_waits_for_any_more_nobody_is_told() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail() -> None:
        raise ValueError("content of a job")

    thread, ended = start_thread("a step", fail, "step fail")
    await asyncio.wait({ended}, timeout=60.0)
    assert ended.done()
    thread.join()
    del ended
    gc.collect()
    assert reported == []


async def test_a_step_stays_when_the_jobs_own_transaction_is_rolled_back(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()
    await rows.query("CREATE TABLE effects (n int)")

    async def process(job: Job[Any]) -> Any:
        async with job.transaction(result="done") as session:
            await session.execute(text("INSERT INTO effects VALUES (1)"))
            await job.step("charge", calls.charge, 5)
            if job.attempt == 1:
                raise ValueError("rolled back")

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], calls.made) == ("done", ["charge 5 nobody"])
    assert await rows.query("SELECT n FROM effects") == [{"n": 1}]


async def test_in_quarantine_steps_are_the_same(client: JobClient, rows: Rows, start: StartWorker) -> None:
    running = await start(InSteps)
    job = await client.enqueue("in-steps", {})
    await rows.becomes(job.id, "scheduled")
    assert [each["name"] for each in await rows.query(STEPS)] == ["coroutine", "thread", "cool-off"]
    await rows.query("UPDATE jsworker.job_steps SET sleeps_until = now() WHERE sleeps_until > now()")
    await rows.query(DUE, job.id)
    row = await rows.becomes(job.id, "completed")
    first, second = row["result"]
    assert first == second
    assert (row["snoozes"], row["attempts"], row["stalls"]) == (0, 1, 0)
    assert [each["quarantined"] for each in running.events.of("job.started")] == [True, True]


# --- Sleeps ---


async def test_a_sleep_ends_the_run_and_passes_when_it_is_over(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        await job.step("charge", calls.charge, 5)
        await job.sleep(0, name="none")
        await job.sleep(3600, name="cool-off")
        return [job.attempt, job.fencing_token]

    running = await start(scripted(process, max_attempts=1, max_snoozes=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert 3300 < (row["run_at"] - datetime.now(UTC)).total_seconds() <= 3605
    assert (row["attempts"], row["errors"], row["snoozes"]) == (0, 0, 0)
    assert await rows.told(job.id) == ["step", "sleep", "sleep", "snoozed"]
    [event] = await running.events.told("job.snoozed")
    assert event["reason"] == "sleeps: cool-off"

    # A run that begins too early sleeps on, however often, and for what is left.
    for times in (2, 3):
        await rows.query(
            "UPDATE jsworker.job_steps SET sleeps_until = now() + interval '10 min' WHERE name = %s",
            "cool-off",
        )
        await rows.query(DUE, job.id)
        await running.events.told("job.snoozed", times=times)
        row = await rows.becomes(job.id, "scheduled")
        assert 400 < (row["run_at"] - datetime.now(UTC)).total_seconds() <= 605

    await rows.query("UPDATE jsworker.job_steps SET sleeps_until = now() WHERE sleeps_until > now()")
    await rows.query(DUE, job.id)
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["snoozes"]) == ([1, 4], 0)
    assert calls.made == ["charge 5 nobody"]


async def test_short_sleeps_end_by_themselves(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> Any:
        began = datetime.fromisoformat(await job.step("begin", lambda: datetime.now(UTC).isoformat()))
        await job.sleep(timedelta(seconds=1), name="first")
        await job.sleep(1.0, name="second")
        return (datetime.now(UTC) - began).total_seconds()

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] >= 2.0


async def asleep(job: Job[Any]) -> None:
    await job.sleep(3600, name="cool-off")


async def asleep_in_a_try(job: Job[Any]) -> None:
    async for attempt in job.transaction(retry=True):
        async with attempt:
            await job.sleep(3600, name="cool-off")


def asleep_in_a_try_of_a_thread(job: Job[Any]) -> None:
    for attempt in job.sync.transaction(retry=True):
        with attempt:
            job.sync.sleep(3600, name="cool-off")


@pytest.mark.parametrize("sleep", [asleep, asleep_in_a_try, asleep_in_a_try_of_a_thread])
async def test_a_sleep_that_the_processor_swallows_ends_its_run_all_the_same(
    client: JobClient, rows: Rows, start: StartWorker, sleep: Callable[[Job[Any]], Any]
) -> None:
    async def process(job: Job[Any]) -> Any:
        try:
            await (sleep(job) if inspect.iscoroutinefunction(sleep) else asyncio.to_thread(sleep, job))
        except Exception:  # noqa: BLE001 -- what it is about
            return "swallowed"
        return "over"

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["errors"] == 0


async def test_a_name_is_a_steps_or_a_sleeps(client: JobClient, rows: Rows, start: StartWorker) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        if job.attempt == 1:
            await job.step("a", calls.nothing)
            await job.sleep(0, name="b")
            raise ValueError("again")
        with pytest.raises(InvalidStep, match="sleep 'a': an earlier run has used this name for a step"):
            await job.sleep(1, name="a")
        with pytest.raises(InvalidStep, match="step 'b': an earlier run has used this name for a sleep"):
            await job.step("b", calls.nothing)
        with pytest.raises(InvalidJson):
            await job.step("c", opaque)

    await start(scripted(process, max_attempts=2))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")


async def test_a_job_that_is_cancelled_while_it_sleeps_is_cancelled_at_once(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        await job.sleep(3600, name="cool-off")

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "scheduled")
    assert (await client.cancel(job.id)).cancelled == [job.id]


async def test_a_worker_that_drains_hands_the_job_back_and_the_next_run_goes_on(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    calls = Calls()

    async def process(job: Job[Any]) -> Any:
        await job.step("charge", calls.charge, 5)
        if job.fencing_token == 1:
            await asyncio.Event().wait()
        return await job.step("ship", calls.ship, 7)

    first = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await first.events.told("job.step")
    await first.worker.close(force=True)
    await start(scripted(process))
    assert (await rows.becomes(job.id, "completed"))["result"] == [7, "shipped"]
    assert calls.made == ["charge 5 nobody", "ship 7"]

    async def told() -> None:
        assert "released" in await rows.told(job.id)

    await eventually(told)
