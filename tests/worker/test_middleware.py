"""Middleware: what runs around ``process``, in which order, and what it sees of a run's end."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import wraps
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import Fail, InvalidTarget, Retry, SettingsError, Snooze
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor, Middleware
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import attempt
from jsworker.worker.pipeline.kinds import resolve_kinds
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker import middleware as theirs
from tests.worker.middleware import Alone, Labels, Threaded, labelled, noting
from tests.worker.processors import AT_ONCE, KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker


def named(name: str, told: list[str]) -> Middleware:
    """Return middleware that tells when it is entered, and in what the run within it ended."""

    @asynccontextmanager
    async def around(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        told.append(f"{name} in")
        try:
            yield
        except BaseException as error:
            told.append(f"{name} saw {type(error).__name__}")
            raise
        told.append(f"{name} out")

    return around


@pytest.fixture
async def within(settings: Settings) -> AsyncIterator[Callable[..., Any]]:
    """Starts a worker with middleware of its own."""
    started: list[Running] = []

    async def start(*processors: Any, middleware: list[Any], setting: str = "") -> Running:
        running = Running(
            Worker(processors, settings.model_copy(update={"middleware": setting}), middleware=middleware)
        )
        running.worker.on("*", running.events)
        started.append(running)
        await running.worker.start()
        return running

    yield start
    for running in started:
        await running.end()


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "plain function"])
async def test_the_first_is_outermost_and_the_class_is_within_the_worker(
    client: JobClient, rows: Rows, within: Callable[..., Any], *, plain: bool
) -> None:
    told: list[str] = []

    async def process(job: Job[Any]) -> str:
        told.append("process")
        return "done"

    def process_plain(job: Job[Any]) -> str:
        told.append("process")
        return "done"

    own = (named("class 1", told), named("class 2", told))
    processor = scripted(process_plain if plain else process, middleware=own)
    await within(processor, middleware=[named("worker 1", told), named("worker 2", told)])
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == "done"
    order = ["worker 1", "worker 2", "class 1", "class 2"]
    ends = [f"{name} out" for name in reversed(order)]
    assert told == [*(f"{name} in" for name in order), "process", *ends]


async def test_it_is_given_the_job_and_its_processor(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    given: list[tuple[Job[Any], JobProcessor[Any]]] = []

    @asynccontextmanager
    async def around(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        given.append((job, processor))
        await job.update_progress(stage="within middleware")
        yield

    processor = scripted(echo)
    await within(processor, middleware=[around])
    job = await client.enqueue(KIND, {"n": 1})
    row = await rows.becomes(job.id, "completed")
    assert row["stage"] == "within middleware"
    [(seen, by)] = given
    assert (seen.id, seen.payload, by) == (job.id, {"n": 1}, processor)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("wrong"), "scheduled", None),
        (Retry(after=3600), "scheduled", None),
        (Fail("for good"), "failed", "permanent"),
        (Snooze(after=3600), "scheduled", None),
    ],
    ids=["error", "retry", "fail", "snooze"],
)
async def test_what_the_processor_raises_passes_through_it(
    client: JobClient,
    rows: Rows,
    within: Callable[..., Any],
    *,
    error: Exception,
    status: str,
    reason: str | None,
) -> None:
    told: list[str] = []

    async def process(job: Job[Any]) -> None:
        raise error

    await within(scripted(process, backoff=LATER), middleware=[named("it", told)])
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, status)
    assert (row["failure_reason"], row["errors"]) == (reason, 0 if isinstance(error, Snooze) else 1)
    assert told == ["it in", f"it saw {type(error).__name__}"]


async def test_it_may_raise_in_place_of_what_it_saw(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    @asynccontextmanager
    async def hopeless(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        try:
            yield
        except KeyError as error:
            raise Fail(f"no {error.args[0]}, ever") from error

    async def process(job: Job[Any]) -> None:
        raise KeyError("customer")

    await within(scripted(process), middleware=[hopeless])
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["last_error"]) == ("permanent", "no customer, ever")


async def test_one_that_raises_before_the_processor_begins_fails_the_attempt(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    @asynccontextmanager
    async def refusing(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        raise ValueError("not today")
        yield

    gate = Gate()
    await within(scripted(gate.process, backoff=LATER), middleware=[refusing])
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert (row["errors"], gate.waiting) == (1, 0)
    assert row["last_error"].startswith("ValueError: not today")


@asynccontextmanager
async def swallowing(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    with suppress(BaseException):
        yield


@asynccontextmanager
async def yielding_twice(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        yield


@asynccontextmanager
async def yielding_never(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    if job is None:
        yield


@contextmanager
def plain(job: Job[Any], processor: JobProcessor[Any]) -> Any:
    yield


class Swallowing(Threaded):
    def __exit__(self, *_: object) -> bool:  # type: ignore[override]  # what it is about
        return True


async def fails(job: Job[Any]) -> None:
    raise ValueError("wrong")


async def sleeps(job: Job[Any]) -> None:
    await asyncio.Event().wait()


async def raises_as_contextlib(job: Job[Any]) -> None:
    raise RuntimeError("generator didn't stop")


def fails_plainly(job: Job[Any]) -> None:
    raise ValueError("wrong")


SWALLOWED = "it must let errors pass, or raise others"


@pytest.mark.parametrize(
    ("around", "process", "error"),
    [
        (swallowing, fails, f"swallowed ValueError: {SWALLOWED}"),
        (swallowing, sleeps, f"swallowed CancelledError: {SWALLOWED}"),
        (Swallowing, fails_plainly, f"swallowed ValueError: {SWALLOWED}"),
        (yielding_twice, echo, "must yield once: generator didn't stop"),
        (yielding_twice, fails, "must yield once: generator didn't stop after athrow()"),
        (yielding_never, echo, "must yield once: generator didn't yield"),
        (plain, echo, "must return an async context manager, not _GeneratorContextManager"),
        (named("it", []), raises_as_contextlib, None),
    ],
)
async def test_one_that_breaks_a_rule_is_named_and_fails_the_attempt(
    client: JobClient,
    rows: Rows,
    within: Callable[..., Any],
    *,
    around: Any,
    process: Any,
    error: str | None,
) -> None:
    limits: dict[str, Any] = {"timeout": 0.2} if process is sleeps else {}
    await within(scripted(process, backoff=LATER, **limits), middleware=[around])
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert row["errors"] == 1
    headline = row["last_error"].splitlines()[0]
    if error is None:
        assert headline == "RuntimeError: generator didn't stop"
        return
    passed = "timed out after 0.2 s; " if process is sleeps else ""
    assert headline == f"{passed}MiddlewareFault: middleware {__name__}:{around.__qualname__} {error}"
    if "swallowed ValueError" in error:
        assert "ValueError: wrong" in row["last_error"]


async def test_its_time_counts_to_the_jobs_time_out(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    @asynccontextmanager
    async def slow(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield

    def process(job: Job[Any]) -> None:
        raise AssertionError

    await within(scripted(process, timeout=0.2, backoff=LATER), middleware=[slow])
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "scheduled"))["last_error"] == "timed out after 0.2 s"


async def test_it_sees_that_a_run_is_cancelled_or_lost(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    told: list[str] = []
    gate = Gate()
    running = await within(scripted(gate.process), middleware=[named("it", told)])
    job = await client.enqueue(KIND, {})
    await gate.met()
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    lost = await client.enqueue(KIND, {})
    await gate.met()
    await rows.take_back(lost.id)
    await running.events.told("job.lost")
    assert told == ["it in", "it saw CancelledError"] * 2


async def test_around_a_plain_function_one_that_is_a_plain_context_manager_too_enters_its_thread(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    def process(job: Job[Any]) -> str:
        theirs.seen.append("process")
        return threading.current_thread().name

    theirs.seen.clear()
    await within(scripted(process), scripted(echo, kind="coroutine"), middleware=[Threaded, labelled])
    job = await client.enqueue(KIND, {})
    name = (await rows.becomes(job.id, "completed"))["result"]
    assert name == f"jsworker {KIND} {job.id}"
    assert theirs.seen == ["labelled", f"plain {name}", "process", "plain end of None"]
    theirs.seen.clear()
    job = await client.enqueue("coroutine", {})
    await rows.becomes(job.id, "completed")
    assert theirs.seen == ["async MainThread", "labelled", "async end"]


async def test_a_time_out_of_one_around_a_plain_function_waits_for_the_end_of_its_thread(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    @asynccontextmanager
    async def limited(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            yield

    def process(job: Job[Any]) -> None:
        loop.call_soon_threadsafe(limits[-1].reschedule, 0.0)
        while not limits[-1].expired():
            time.sleep(0.005)
        ends.append(job.attempt)

    loop, limits, ends = asyncio.get_running_loop(), list[asyncio.Timeout](), list[int]()
    await within(scripted(process, max_attempts=2, backoff=AT_ONCE), middleware=[limited])
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert row["last_error"].startswith("TimeoutError")
    assert ends == [1, 2]


async def test_without_any_there_is_no_context_manager_around_a_run(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(attempt, "call_within")
    monkeypatch.delattr(attempt, "opened")
    await start(scripted(echo))
    job = await client.enqueue(KIND, {"n": 1})
    assert (await rows.becomes(job.id, "completed"))["result"] == {"n": 1}


async def test_the_setting_names_some_that_are_outermost(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    theirs.seen.clear()
    setting = f"{noting.__module__}:noting, {noting.__module__}:LABELS"
    await within(scripted(echo), middleware=[labelled], setting=setting)
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert theirs.seen == [f"noting {KIND} of Made in {os.getpid()}", "at module level", "labelled"]


async def test_it_runs_in_the_process_of_a_job_in_quarantine(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    own = settings.model_copy(update={"middleware": f"{noting.__module__}:noting"})
    async with Worker([Alone], own, middleware=[theirs.LABELS]):
        job = await client.enqueue("alone", {})
        row = await rows.becomes(job.id, "completed")
    pid = row["result"]["pid"]
    assert pid != os.getpid()
    assert row["result"]["seen"] == [f"noting alone of Alone in {pid}", "at module level", "labelled"]


async def test_one_that_no_other_process_can_make_keeps_jobs_out_of_quarantine_and_says_so(
    client: JobClient, rows: Rows, within: Callable[..., Any]
) -> None:
    theirs.seen.clear()
    running = await within(Alone, middleware=[Labels("of this process")])
    job = await client.enqueue("alone", {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == {"pid": os.getpid(), "seen": ["of this process", "labelled"]}

    async def told() -> None:
        [complaint] = running.events.of("worker.degraded")
        assert "a middleware of the worker cannot be made in another process" in complaint["reason"]

    await eventually(told)


async def coroutine_function(job: Job[Any], processor: JobProcessor[Any]) -> None:
    """Is no context manager."""


@asynccontextmanager
async def for_the_job(job: Job[Any]) -> AsyncIterator[None]:
    """Takes no processor."""
    yield


class Unshowable:
    def __repr__(self) -> str:
        raise AssertionError


class AnnotatedForTypeCheckers:
    @property
    def __signature__(self) -> Any:
        raise NameError  # as Python 3.14 does where annotations have names that only type checkers import

    def __call__(self, job: Job[Any], processor: JobProcessor[Any]) -> Any: ...


def taking_both(factory: Callable[[Job[Any]], Any]) -> Middleware:
    """Make middleware of what takes no processor."""

    @wraps(factory)
    def middleware(job: Job[Any], processor: JobProcessor[Any]) -> Any:
        return factory(job)

    return middleware


async def undecorated(job: Job[Any], processor: JobProcessor[Any]) -> AsyncIterator[None]:
    yield


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ([undecorated], "undecorated of the worker must be decorated: @asynccontextmanager"),
        ([coroutine_function], "must return an async context manager, not be a coroutine function"),
        ([42], "middleware builtins:int of the worker must be callable with job and processor"),
        ([Unshowable()], "Unshowable of the worker must be callable with job and processor"),
        ([for_the_job], "for_the_job of the worker must be callable with job and processor: too many "),
        ("noting", "middleware of the worker must be a list, not 'noting'"),
        (noting, "middleware of the worker must be a list, not "),
    ],
)
def test_what_can_be_no_middleware_is_refused_at_the_start(
    given: Any, refusal: str, settings: Settings
) -> None:
    with pytest.raises(InvalidTarget) as refused:
        resolve_kinds([Alone], settings, given)
    assert refusal in str(refused.value)
    with pytest.raises(InvalidTarget) as refused:
        resolve_kinds([scripted(echo, middleware=given)], settings)
    assert refusal.replace("the worker", f"kind {KIND} (Made)") in str(refused.value)


def test_what_a_decorator_takes_counts_not_what_it_wraps(settings: Settings) -> None:
    resolve_kinds([Alone], settings, [taking_both(for_the_job)])


def test_annotations_that_cannot_be_evaluated_refuse_no_middleware(settings: Settings) -> None:
    resolve_kinds([Alone], settings, [AnnotatedForTypeCheckers()])


@pytest.mark.parametrize(
    ("setting", "refusal"),
    [
        ("nowhere:noting", "target nowhere:noting: there is no module nowhere in"),
        (f"{noting.__module__}:nothing", f"module {noting.__module__} has no nothing"),
        (f"{__name__}:undecorated", "of JSWORKER_MIDDLEWARE must be decorated: @asynccontextmanager"),
        ("a:b:c", "target 'a:b:c' must read MODULE:NAME, for example my_jobs:log_jobs"),
    ],
)
def test_a_setting_that_names_none_is_refused_at_the_start(
    setting: str, refusal: str, settings: Settings
) -> None:
    with pytest.raises(InvalidTarget) as refused:
        resolve_kinds([Alone], settings.model_copy(update={"middleware": setting}))
    assert refusal in str(refused.value)


def test_a_setting_of_another_form_is_refused(make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(SettingsError) as refused:
        make_settings(middleware="noting")
    assert str(refused.value) == "JSWORKER_MIDDLEWARE='noting' must be a comma list of MODULE:NAME"


def test_a_context_manager_made_beforehand_is_refused(settings: Settings) -> None:
    made: AbstractAsyncContextManager[Any] = labelled(None, None)  # type: ignore[arg-type]  # as users might
    with pytest.raises(InvalidTarget, match="must be callable"):
        resolve_kinds([Alone], settings, [made])  # type: ignore[list-item]  # what it is about
