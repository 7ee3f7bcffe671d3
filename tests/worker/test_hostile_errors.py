"""Errors that would harm whoever stores, shows or judges them: the attempt fails, the worker goes on."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from jsworker import JobClient
from jsworker.core.errors import Retry
from jsworker.core.job import Job
from jsworker.core.processor import Backoff
from jsworker.core.settings import Settings
from jsworker.ownership.refusals import is_cause_of
from jsworker.worker.pipeline.concealment import concealed
from jsworker.worker.pipeline.outcomes import describe
from jsworker.worker.worker import Worker
from tests.worker.processors import KIND, LATER, Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker
from tests.worker.tied import RecordedSupervision

MARKER = "hunter2-do-not-show"

TEXTS = {
    "a\0b": "ValueError: a\\0b",
    "a\ud800b": "ValueError: a\\ud800b",
    "é漢\U0001f600": "ValueError: é漢\U0001f600",
    "": "ValueError",
    "one\ntwo\r\nthree": "ValueError: one",
    "\n\n": "ValueError",
}


async def test_texts_that_postgresql_refuses_are_escaped(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    texts = list(TEXTS)

    async def process(job: Job[Any]) -> None:
        raise ValueError(texts[job.payload["text"]])

    running = await start(scripted(process, max_attempts=1))
    jobs = await client.enqueue_many(KIND, [{"text": number} for number in range(len(texts))])
    for job, shown in zip(jobs, TEXTS.values(), strict=True):
        row = await rows.becomes(job.id, "failed")
        assert row["last_error"].split("\n")[0] == shown
        assert row["failure_reason"] == "attempts"
    told = await running.events.told("job.failed", times=len(texts))
    assert {event["error"] for event in told} == set(TEXTS.values())


async def test_a_huge_text_is_cut_and_the_traceback_stays(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        raise ValueError("x" * 2**20)

    running = await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert 4000 < len(row["last_error"]) < 10_000
    assert "characters left out" in row["last_error"]
    assert "in process" in row["last_error"]
    [told] = await running.events.told("job.failed")
    assert len(told["error"]) <= 500


def test_a_chain_of_errors_is_described_however_long_it_is() -> None:
    """Raised by no test: pytest cannot show a group of errors that has such a chain among its causes."""
    text = describe(_chain(2000))
    assert text.startswith("ValueError: 1999\n")
    assert "characters left out" in text
    assert len(text) < 10_000


def test_a_chain_of_errors_is_concealed_however_long_it_is() -> None:
    text = concealed(_chain(5000))
    assert text.count("ValueError") == 5002
    assert "4999" not in text


class Unruly(BaseException):
    """What no `except Exception` catches."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Unspoken(BaseException):
    def __str__(self) -> str:
        raise Unruly("not even this")

    __repr__ = __str__


class NoText(Exception):
    def __str__(self) -> str:
        return 42  # type: ignore[return-value]  # noqa: PLE0307 -- what sloppy libraries do


class Classless(Exception):
    """As a proxy makes it that forwards its class, and has lost what it stands for."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise ReferenceError("it no longer exists")


class OfABody(Exception):
    """As libraries make errors of an answer whose fields they pass on."""

    body: dict[str, Any] = {}  # noqa: RUF012 -- read alone

    def __getattr__(self, name: str) -> Any:
        return self.body[name]


class Delegating(Exception):
    """Half made: what it delegates to is missing, and asking for that delegates, too."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Grudging(Retry):
    """Asks for another attempt, and does not say when."""

    def __init__(self) -> None:
        BaseException.__init__(self, "later")

    @property
    def after(self) -> float:  # type: ignore[override]
        raise Unruly("it is not known when")


class Untraceable(Exception):
    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise Unruly("no traceback")


class Closed(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise Unruly("nothing can be read")


class Misshapen(Exception):
    __traceback__ = 5  # type: ignore[assignment]
    __cause__ = 7  # type: ignore[assignment]


class Causeless(Exception):
    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise Unruly("no cause")

    __context__ = __suppress_context__ = __cause__


class Memberless(ExceptionGroup[Exception]):
    @property
    def exceptions(self) -> Any:
        raise Unruly("no members")


class Pretended(Exception):
    __class__ = BaseExceptionGroup  # type: ignore[assignment]


class Unnamed(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in {"__name__", "__qualname__", "__module__"}:
            raise Unruly("no name")
        return super().__getattribute__(name)


class Misnamed(type):
    def __getattribute__(cls, name: str) -> Any:
        return 5 if name in {"__name__", "__qualname__"} else super().__getattribute__(name)


class OfNoName(Exception, metaclass=Unnamed):
    pass


class OfNoText(Exception, metaclass=Misnamed):
    pass


class StopOfNoName(StopIteration, metaclass=Unnamed):
    pass


class Words(str):
    __slots__ = ()

    def splitlines(self, *_: Any, **__: Any) -> Any:
        raise Unruly("no lines")


class Wordy(Exception):
    def __str__(self) -> str:
        return Words("text")


class Service:
    """Where a name is missing, newer versions of Python ask whether ``self`` has it."""

    @property
    def connection(self) -> Any:
        raise Unruly("not connected")

    def get(self) -> BaseException:
        return connection.get()  # type: ignore[name-defined, no-any-return] # noqa: F821


def _chain(links: int) -> Exception:
    error = ValueError("0")
    for depth in range(links):
        further = ValueError(str(depth))
        further.__cause__ = error
        error = further
    return error


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "Unruly": lambda: Unruly("unruly"),
    "CancelledError": asyncio.CancelledError,
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "raised StopIteration": lambda: StopIteration(NoText()),
    "Classless": Classless,
    "StopAsyncIteration": StopAsyncIteration,
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [KeyboardInterrupt(), ValueError("x")]),
    "MemoryError": lambda: MemoryError("no more"),
    "TimeoutError": lambda: TimeoutError("the processor's own"),
    "Unspeakable": Unspeakable,
    "Unspoken": Unspoken,
    "NoText": NoText,
    "OfABody": OfABody,
    "Delegating": Delegating,
    "Grudging": Grudging,
    "NameError": lambda: Service().get(),
    "Untraceable": lambda: Untraceable("boom"),
    "Closed": Closed,
    "Misshapen": Misshapen,
    "Causeless": Causeless,
    "Memberless": lambda: Memberless("several", [ValueError("x")]),
    "Pretended": Pretended,
    "OfNoName": OfNoName,
    "OfNoText": OfNoText,
    "Wordy": Wordy,
    "ExceptionGroup": lambda: ExceptionGroup(
        "several", [Untraceable(), Closed(), Causeless(), OfNoName(), Pretended()]
    ),
    "ValueError": lambda: _chain(50),
}


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_whatever_a_processor_raises_is_an_attempt_and_stops_nobody(
    client: JobClient, rows: Rows, start: StartWorker, *, plain: bool
) -> None:
    """`sys.exit()` in a library, or a poisoned job, must not end one worker after the other."""

    def blocking(job: Job[Any]) -> Any:
        if "raise" in job.payload:
            error = RAISED[job.payload["raise"]]()
            raise error
        return "fine"

    async def process(job: Job[Any]) -> Any:
        return blocking(job)

    processor = scripted(blocking if plain else process, max_attempts=2)
    running = await start(processor)
    bad = await client.enqueue_many(KIND, [{"raise": name} for name in RAISED])
    good = await client.enqueue_many(KIND, [{}] * 10)
    for name, job in zip(RAISED, bad, strict=True):
        row = await rows.becomes(job.id, "failed")
        assert (name, row["failure_reason"], row["attempts"], row["errors"]) == (name, "attempts", 2, 2)
        assert name in row["last_error"]
        assert "Traceback" in row["last_error"]
    for job in good:
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert len(processor.failed) == len(bad)


def _answer(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error in words: pytest can show none that such an error precedes."""
    try:
        return call()
    except BaseException as fault:  # noqa: BLE001 -- the test fails
        return f"it raised {type(fault).__name__}"


@pytest.mark.parametrize("name", RAISED)
def test_whatever_is_raised_is_concealed(name: str) -> None:
    try:
        error = RAISED[name]()
    except NameError as raised:
        error = raised
    outer = ValueError("outer")
    outer.__cause__ = error
    for each in (error, ExceptionGroup("several", [outer])):
        assert name.removeprefix("raised ") in _answer(partial(concealed, each))


@pytest.mark.parametrize("name", ["Causeless", "Closed", "Misshapen"])
def test_the_cause_of_an_error_that_hides_it_is_found(name: str) -> None:
    cause, error = ValueError("the cause"), RAISED[name]()
    with suppress(Exception):
        raise error from cause
    assert _answer(partial(is_cause_of, cause, BaseExceptionGroup("several", [error]))) is True


async def test_a_thread_s_stop_iteration_whose_type_has_no_name_is_an_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    def process(_job: Job[Any]) -> None:
        raise StopOfNoName

    await start(scripted(process, max_attempts=1))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert row["last_error"].startswith("RuntimeError: the processor raised StopOfNoName")


async def test_an_error_that_cannot_be_described_is_an_attempt_and_stops_nobody(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def process(_job: Job[Any]) -> None:
        raise ValueError("boom")

    def no_memory(_error: BaseException) -> str:
        raise MemoryError

    await start(scripted(process, max_attempts=1))
    monkeypatch.setattr("jsworker.worker.pipeline.outcomes.describe", no_memory)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    words = "reading what the error asks for raised MemoryError; ValueError: it cannot be shown"
    assert row["last_error"] == words


async def test_the_end_of_a_generator_that_an_awaited_task_brings_is_an_attempt_and_stops_nobody(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """Python closes the coroutines that await it, one after the other, instead of raising it in them."""

    async def brings_it() -> None:
        raise GeneratorExit

    async def process(job: Job[Any]) -> str:
        if job.payload["fails"]:
            await asyncio.create_task(brings_it())
        return "fine"

    async def on_failed(_job: Job[Any], _error: BaseException) -> None:
        await asyncio.create_task(brings_it())

    running = await start(scripted(process, max_attempts=2, on_failed=staticmethod(on_failed)))
    bad = await client.enqueue(KIND, {"fails": True})
    row = await rows.becomes(bad.id, "failed")
    assert (row["failure_reason"], row["errors"]) == ("attempts", 2)
    assert "GeneratorExit" in row["last_error"]
    told = await running.events.told("job.error", times=2)
    assert told[-1]["error"] == "in a hook: GeneratorExit"
    good = await client.enqueue(KIND, {"fails": False})
    await rows.becomes(good.id, "completed")


async def test_an_awaited_task_that_somebody_else_cancelled_is_an_ordinary_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    """The worker did not ask for it, so handing the job back at once would run it for ever."""

    async def process(job: Job[Any]) -> None:
        inner = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(inner.cancel)
        await inner

    await start(scripted(process, max_attempts=2))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["errors"]) == ("attempts", 2)
    assert row["last_error"].startswith("CancelledError")


async def cancels_itself(job: Job[Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def cancels_itself_and_raises(job: Job[Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    raise ValueError("with a cancellation on its way")


async def leaves_a_scope_behind(job: Job[Any]) -> None:
    """As a cancel scope does that was entered and never left: it cancels for as long as there is a task."""
    task = asyncio.current_task()
    assert task is not None
    ends_at = asyncio.get_running_loop().time() + 0.5

    def cancel() -> None:
        loop = asyncio.get_running_loop()
        if not task.done() and loop.time() < ends_at:
            task.cancel()
            loop.call_soon(cancel)

    asyncio.get_running_loop().call_soon(cancel)
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("in its scope")


@pytest.mark.parametrize(
    ("process", "error"),
    [
        (cancels_itself, "CancelledError: cancelled, but not by jsworker"),
        (cancels_itself_and_raises, "ValueError: with a cancellation on its way"),
        (leaves_a_scope_behind, "ValueError: in its scope"),
    ],
)
async def test_a_run_that_cancels_its_own_task_has_failed_an_attempt(
    client: JobClient, rows: Rows, start: StartWorker, process: Any, error: str
) -> None:
    """The worker did not ask for it, so handing the job back at once would run it for ever."""
    processor = scripted(process, max_attempts=2)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["attempts"], row["errors"]) == ("attempts", 2, 2)
    assert row["last_error"].startswith(error)
    assert "Traceback" in row["last_error"]
    await running.events.told("job.failed")
    assert not running.events.of("job.released")
    assert len(processor.failed) == 1


@pytest.mark.parametrize("is_supervised", [True, False])
async def test_nor_is_it_taken_for_the_end_of_the_event_loop_when_a_wait_of_the_worker_has_timed_out(
    client: JobClient, rows: Rows, settings: Settings, *, is_supervised: bool
) -> None:
    """``asyncio.timeout`` cancels the heartbeats' task and takes that back one turn of the loop later."""

    async def process(job: Job[Any]) -> None:
        [beats] = [task for task in asyncio.all_tasks() if task.get_name() == "jsworker heartbeat"]
        while not beats.cancelling():  # noqa: ASYNC110 -- in this very turn
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    supervision = RecordedSupervision() if is_supervised else None
    running = Running(Worker([scripted(process, max_attempts=1)], settings, supervision=supervision))
    running.worker.on("*", running.events)
    await running.worker.start()
    try:
        job = await client.enqueue(KIND, {})
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["attempts"]) == ("attempts", 1)
        assert not running.events.of("job.released")
    finally:
        await running.end()


async def test_one_that_cancels_its_task_and_returns_at_once_has_completed(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "done"

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "done"


async def test_a_run_that_cancels_itself_while_its_worker_drains_is_handed_back(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        met.set()
        while not job.should_stop:  # noqa: ASYNC110 -- what a processor has to do
            await asyncio.sleep(0.005)
        await cancels_itself(job)

    met = asyncio.Event()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await met.wait()
    assert await running.worker.close() == 0
    row = await rows.job(job.id)
    assert (row["status"], row["errors"], row["attempts"]) == ("queued", 0, 0)


async def test_the_end_of_an_applications_event_loop_is_no_error_of_its_jobs(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    """It cancels every task there is, and a worker that nobody has closed is among them."""
    gate = Gate()
    before = asyncio.all_tasks()
    worker = Worker([scripted(gate.process)], settings)
    await worker.start()
    job = await client.enqueue(KIND, {})
    await gate.met()
    tasks = asyncio.all_tasks() - before
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)  # and for no other, just as asyncio.run
    row = await rows.job(job.id)
    assert (row["status"], row["errors"], row["attempts"]) == ("queued", 0, 0)
    await worker._opened.aclose()


class Broken(Backoff):
    raises: ClassVar[type[BaseException]]

    def delay(self, _attempt: int) -> float:
        raise self.raises("no idea how long")


@pytest.mark.parametrize("raises", [RuntimeError, asyncio.CancelledError, GeneratorExit])
async def test_a_backoff_that_raises_is_replaced_by_the_usual_one(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    raises: type[BaseException],
) -> None:
    monkeypatch.setattr(Broken, "raises", raises, raising=False)

    async def process(job: Job[Any]) -> None:
        raise ValueError("boom")

    await start(scripted(process, backoff=Broken()))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["errors"] == 1


VIOLATIONS = {
    "unique": "INSERT INTO accounts VALUES (:email, 1)",
    "check": "INSERT INTO accounts VALUES (:email || '2', -1)",
    "not null": "INSERT INTO accounts VALUES (:email || '2', NULL)",
    "no such column": f"SELECT '{MARKER}', :email, nothing",
}
EMAILS = (MARKER, f"two\n{MARKER}\nlines", f"\n\n{MARKER}", f"[SQL: {MARKER}")


async def _violate(engine: AsyncEngine, payload: dict[str, Any]) -> None:
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text(VIOLATIONS[payload["violate"]]), {"email": payload["email"]})


async def test_the_row_that_a_database_error_repeats_is_neither_stored_nor_told(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    await rows.query(
        "CREATE TABLE accounts (email text PRIMARY KEY, balance int NOT NULL CHECK (balance > 0))"
    )
    for email in EMAILS:
        await rows.query("INSERT INTO accounts VALUES (%s, 1)", email)
    dsn = settings.database_dsn().replace("postgresql://", "postgresql+psycopg://")
    engine = create_async_engine(dsn)

    async def process(job: Job[Any]) -> None:
        if job.payload["how"] == "in a group":
            async with asyncio.TaskGroup() as group:
                group.create_task(_violate(engine, job.payload))
        elif job.payload["how"] == "wrapped":
            try:
                await _violate(engine, job.payload)
            except sqlalchemy.exc.DBAPIError as error:
                raise ValueError(f"cannot book: {error}") from error
        await _violate(engine, job.payload)

    running = await start(scripted(process, max_attempts=1))
    jobs = await client.enqueue_many(
        KIND,
        [
            {"violate": violation, "email": email, "how": how}
            for violation in VIOLATIONS
            for email in EMAILS
            for how in ("alone", "in a group", "wrapped")
        ],
    )
    for job in jobs:
        row = await rows.becomes(job.id, "failed")
        assert "psycopg.errors." in row["last_error"]
        assert "in _violate" in row["last_error"]  # the traceback is still there
        assert MARKER not in row["last_error"], row["last_error"]
        assert MARKER not in str(await rows.timeline(job.id))
    await running.events.told("job.failed", times=len(jobs))
    assert MARKER not in str(running.events.events)
    await engine.dispose()


async def test_the_drivers_own_error_hides_its_row_too(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    await rows.query("CREATE TABLE accounts (email text PRIMARY KEY)")

    def process(job: Job[Any]) -> None:
        with psycopg.connect(settings.database_dsn()) as connection:
            for _ in range(2):
                connection.execute("INSERT INTO accounts VALUES (%s)", [job.payload["email"]])

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {"email": MARKER})
    row = await rows.becomes(job.id, "scheduled")
    assert row["last_error"].startswith("UniqueViolation: duplicate key")
    assert MARKER not in row["last_error"]
