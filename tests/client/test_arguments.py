"""Calls that a newcomer gets wrong: what is wrong is said by name, before anything is written."""

import asyncio
import multiprocessing
import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from jsworker import JobClient
from jsworker.core.errors import InvalidJson, InvalidName, TransitionRefused
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.transitions.enqueue import Enqueued

KIND = "count-lines"


class CountLines(JobProcessor):
    async def process(self, job: Job[dict[str, Any]]) -> None: ...


WRONG: dict[str, tuple[Callable[[JobClient], Awaitable[Any]], type[Exception], str]] = {
    "a timedelta that goes back": (
        lambda client: client.enqueue(KIND, {}, delay=timedelta(minutes=-1)),
        ValueError,
        r"^delay=.* must be from 0 to 316224000 seconds$",
    ),
    "an instant without a zone": (
        lambda client: client.enqueue(KIND, {}, run_at=datetime(2030, 1, 1)),  # noqa: DTZ001 -- the mistake
        ValueError,
        r"^run_at=2030-01-01T00:00:00 must have a time zone, for example tzinfo=UTC$",
    ),
    "an instant as text": (
        lambda client: client.enqueue_many(KIND, [{}], run_at="2030-01-01"),  # type: ignore[call-overload]
        TypeError,
        r"^run_at='2030-01-01' must be a datetime with a time zone, not str$",
    ),
    "an instant that is a mistake": (
        lambda client: client.enqueue(KIND, {}, run_at=datetime(2206, 1, 1, tzinfo=UTC)),
        ValueError,
        r"^run_at=2206-01-01T00:00:00\+00:00 must be from 2000 on and at most ten years ahead$",
    ),
    "the last instant there is": (
        lambda client: client.enqueue(
            KIND, {}, run_at=datetime.max.replace(tzinfo=timezone(-timedelta(hours=9)))
        ),
        ValueError,
        r"^run_at=9999.* must be from 2000 on",
    ),
    "an expiry at once": (
        lambda client: client.enqueue(KIND, {}, expires_in=0),
        ValueError,
        r"^expires_in=0 must be more than 0 seconds$",
    ),
    "an expiry in the past": (
        lambda client: client.enqueue_many(KIND, [{}], expires_in=timedelta(days=-1)),
        ValueError,
        r"^expires_in=.* must be from 0 to 316224000 seconds$",
    ),
    "an expiry as an instant": (
        lambda client: client.enqueue(KIND, {}, expires_in=datetime(2030, 1, 1, tzinfo=UTC)),  # type: ignore[call-overload]
        TypeError,
        r"^expires_in=.* must be a number of seconds or a timedelta, not datetime$",
    ),
    "an expiry before the job is due": (
        lambda client: client.enqueue(KIND, {}, delay=60, expires_in=60),
        ValueError,
        r"^expires_in=60 ends before the job is due: delay=60$",
    ),
    "an expiry before the instant": (
        lambda client: client.enqueue(KIND, {}, run_at=datetime.now(UTC) + timedelta(hours=1), expires_in=60),
        ValueError,
        r"^expires_in=60 ends before the job is due: run_at=",
    ),
    "a scope that there is not": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", unique="running"),  # type: ignore[call-overload]
        ValueError,
        r"^unique='running' must be 'live' or 'waiting'$",
    ),
    "a scope without a key": (
        lambda client: client.enqueue(KIND, {}, unique="waiting"),
        ValueError,
        r"^unique='waiting' needs a unique_key for each job$",
    ),
    "a scope without one of the keys": (
        lambda client: client.enqueue_many(KIND, [{}, {}], unique_keys=["a", None], unique="waiting"),
        ValueError,
        r"^unique='waiting' needs a unique_key for each job$",
    ),
    "a window without a key": (
        lambda client: client.enqueue(KIND, {}, unique_for=60),
        ValueError,
        r"^unique_for=60 needs a unique_key for each job$",
    ),
    "a window of nothing": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", unique_for=timedelta(0)),
        ValueError,
        r"^unique_for=.* must be more than 0 seconds$",
    ),
    "a window and a scope": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", unique_for=60, unique="waiting"),
        ValueError,
        r"^unique_for=60 and unique='waiting': give one of them$",
    ),
    "a debounce without a key": (
        lambda client: client.enqueue(KIND, {}, debounce=5),
        ValueError,
        r"^debounce=5 needs a unique_key for each job$",
    ),
    "a debounce of nothing": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=0),
        ValueError,
        r"^debounce=0 must be more than 0 seconds$",
    ),
    "a debounce beyond its maximum": (
        lambda client: client.enqueue(
            KIND, {}, unique_key="a", debounce=60, debounce_max=timedelta(seconds=5)
        ),
        ValueError,
        r"^debounce=60 must not be longer than debounce_max=datetime.timedelta\(seconds=5\)$",
    ),
    "a maximum of no debounce": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce_max=60),
        ValueError,
        r"^debounce_max=60 needs debounce$",
    ),
    "a debounce and a delay": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=5, delay=5),
        ValueError,
        r"^debounce=5 and delay=5: give one of them$",
    ),
    "a debounce and an instant": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=5, run_at=datetime.now(UTC)),
        ValueError,
        r"^debounce=5 and run_at=.*: give one of them$",
    ),
    "a debounce and a window": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=5, unique_for=60),
        ValueError,
        r"^debounce=5 and unique_for=60: give one of them$",
    ),
    "a debounce among live jobs": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=5, unique="live"),
        ValueError,
        r"^debounce=5 and unique='live': give one of them$",
    ),
    "an expiry before the debounce": (
        lambda client: client.enqueue(KIND, {}, unique_key="a", debounce=60, expires_in=60),
        ValueError,
        r"^expires_in=60 ends before the job is due: debounce=60$",
    ),
    "an instant and a delay": (
        lambda client: client.enqueue(KIND, {}, delay=5, run_at=datetime(2030, 1, 1, tzinfo=UTC)),
        ValueError,
        r"^delay=5 and run_at=.*: give one of them$",
    ),
    "a text": (
        lambda client: client.enqueue_many(KIND, [{}], delay="5"),  # type: ignore[call-overload]
        TypeError,
        r"^delay='5' must be a number of seconds or a timedelta, not str$",
    ),
    "attempts as text": (
        lambda client: client.enqueue(KIND, {}, max_attempts="3"),  # type: ignore[call-overload]
        TypeError,
        r"^max_attempts='3' must be a whole number, not str$",
    ),
    "attempts as a truth value": (
        lambda client: client.enqueue_many(KIND, [{}] * 40, max_attempts=True),
        TypeError,
        r"^max_attempts=True must be a whole number, not bool$",
    ),
    "a list of ids": (
        lambda client: client.cancel([uuid4()]),  # type: ignore[arg-type]
        TypeError,
        r"^a job id is a UUID or its text, not list; each id is an argument of its own: \(\*ids\)$",
    ),
    "a number for an id": (
        lambda client: client.get(7),  # type: ignore[arg-type]
        TypeError,
        r"^a job id is a UUID or its text, not int$",
    ),
    "no such status": (
        lambda client: client.list(status="bogus"),  # type: ignore[arg-type]
        ValueError,
        r"^status='bogus' must be one of scheduled, queued, processing, completed, failed, cancelled$",
    ),
    "an age that is none": (
        lambda client: client.list(no_progress_for=-1.0),
        ValueError,
        r"^no_progress_for=-1\.0 must be a number of seconds, 0 or more$",
    ),
    "an age of a waiting job": (
        lambda client: client.list(status="queued", running_for=1.0),
        ValueError,
        r"^status='queued' with an age: only jobs that are processing have one$",
    ),
    "no such kind": (lambda client: client.list(kind="Bogus"), InvalidName, r"^kind 'Bogus' must match "),
    "a processor": (
        lambda client: client.enqueue(CountLines(), {}),  # type: ignore[call-overload]
        InvalidName,
        r"^kind <.*> must be a kind's name, or the class of its processor$",
    ),
    "less than one": (lambda client: client.list(limit=-1), ValueError, r"^limit=-1 must be from 1 to \d+$"),
    "more than there can be": (
        lambda client: client.list(limit=10**30),
        ValueError,
        r"^limit=1000.* must be",
    ),
    "a limit as text": (
        lambda client: client.list(limit="5"),  # type: ignore[arg-type]
        TypeError,
        r"^limit='5' must be a whole number, not str$",
    ),
    "a delay beyond all floats": (
        lambda client: client.enqueue(KIND, {}, delay=10**400),
        ValueError,
        r"^delay=1000.* must be from 0 to ",
    ),
    "one payload for many": (
        lambda client: client.enqueue_many(KIND, {"n": 1}),
        TypeError,
        r"^payloads must be a list with one for each job, not dict$",
    ),
    "no payloads": (
        lambda client: client.enqueue_many(KIND, None),  # type: ignore[call-overload]
        TypeError,
        r"^payloads must be a list with one for each job, not NoneType$",
    ),
    "one key for many": (
        lambda client: client.enqueue_many(KIND, [{}, {}], unique_keys="ab"),
        TypeError,
        r"^unique_keys must be a list with one for each job, not str$",
    ),
    "keys without an order": (
        lambda client: client.enqueue_many(KIND, [{}, {}], unique_keys={"a", "b"}),  # type: ignore[call-overload]
        TypeError,
        r"^unique_keys must be a list with one for each job, not set$",
    ),
    "a number for a key": (
        lambda client: client.enqueue(KIND, {}, unique_key=7),  # type: ignore[call-overload]
        InvalidName,
        r"^unique key 7 must be text of 1 to 255 printable characters$",
    ),
    "one payload among others": (
        lambda client: client.enqueue_many(KIND, [{}, {"at": b""}, {}]),
        InvalidJson,
        r"^payloads\[1\]: payload holds a value of type bytes, which is no JSON \(at at\)$",
    ),
    "what enqueue returned": (
        lambda client: client.get(Enqueued(uuid4(), created=True)),  # type: ignore[arg-type]
        TypeError,
        r"^a job id is a UUID or its text, not Enqueued; give its id$",
    ),
    "a row": (
        lambda client: client.retry({"id": uuid4()}),  # type: ignore[arg-type]
        TypeError,
        r"^a job id is a UUID or its text, not dict; give its id$",
    ),
    "no reason": (
        lambda client: client.clear_and_reenqueue(uuid4(), None),  # type: ignore[arg-type]
        TypeError,
        r"^reason=None must be text, not NoneType$",
    ),
    "a pause for a number": (
        lambda client: client.pause(KIND, until=3600),  # type: ignore[arg-type]
        TypeError,
        r"^until=.* must be a datetime with a time zone, not int$",
    ),
    "a pause for less than nothing": (
        lambda client: client.pause(KIND, until=timedelta(hours=-1)),
        ValueError,
        r"^until=-1 day, 23:00:00 must lie ahead, at most ten years$",
    ),
    "a pause for too long": (
        lambda client: client.pause(KIND, until=timedelta(days=400_000)),
        ValueError,
        r"^until=400000 days, 0:00:00 must lie ahead, at most ten years$",
    ),
    "a pause until an instant without a zone": (
        lambda client: client.pause(KIND, until=datetime(2030, 1, 1)),  # noqa: DTZ001 -- the mistake
        ValueError,
        r"^until=2030-01-01T00:00:00 must have a time zone",
    ),
    "a pause that is over": (
        lambda client: client.pause(KIND, until=datetime(2020, 1, 1, tzinfo=UTC)),
        ValueError,
        r"^until=2020-01-01T00:00:00\+00:00 must lie ahead, at most ten years$",
    ),
    "a number for a reason": (
        lambda client: client.pause(KIND, reason=7),  # type: ignore[arg-type]
        TypeError,
        r"^reason=7 must be text, not int$",
    ),
    "a schedule with NUL": (
        lambda client: client.schedules.pause("a\0"),
        TransitionRefused,
        r"^there is no schedule 'a\\x00'$",
    ),
    "a schedule that no text can name": (
        lambda client: client.schedules.resume("\ud800"),
        TransitionRefused,
        r"^there is no schedule '\\ud800'$",
    ),
    "a number for a schedule": (
        lambda client: client.schedules.run_now(7),  # type: ignore[arg-type]
        TransitionRefused,
        r"^there is no schedule 7$",
    ),
}


async def test_what_is_wrong_is_said_by_name(client: JobClient) -> None:
    for case, (call, error, told) in WRONG.items():
        raised: Any
        [raised] = await asyncio.gather(call(client), return_exceptions=True)
        assert isinstance(raised, error), (case, raised)
        assert re.search(told, str(raised)), (case, raised)


def test_a_client_takes_settings() -> None:
    url: Any = "postgresql://localhost/jobs"
    with pytest.raises(
        TypeError, match=r"^JobClient takes Settings, not str: JobClient\.from_env\(\) makes them"
    ):
        JobClient(url)


async def test_numbers_of_any_sort_are_numbers(client: JobClient) -> None:
    delay: Any = Decimal(3600)
    job = await client.enqueue(KIND, {}, delay=delay)
    assert (await client.get(job.id)).status == "scheduled"


async def test_a_delay_may_be_a_timedelta(client: JobClient) -> None:
    jobs = [
        await client.enqueue(KIND, {}, delay=timedelta(hours=1)),
        *await client.enqueue_many(KIND, [{}, {}], delay=timedelta(hours=1)),
    ]
    for job in jobs:
        row = await client.get(job.id)
        assert row.status == "scheduled"
        assert row.run_at is not None
        assert timedelta(minutes=55) < row.run_at - row.created_at < timedelta(minutes=65)


async def test_jobs_are_due_at_an_instant(client: JobClient) -> None:
    at = datetime(2030, 5, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    one = await client.enqueue(KIND, {}, run_at=at, unique_key="a")
    again = await client.enqueue(KIND, {}, run_at=at, unique_key="a")
    many = await client.enqueue_many(KIND, [{}, {}, {}], unique_keys=["a", "b", "b"], run_at=at)
    assert (one.created, again) == (True, Enqueued(one.id, created=False))
    assert [each.created for each in many] == [False, True, False]
    assert (many[0].id, many[2].id) == (one.id, many[1].id)
    for job in (one, many[1]):
        row = await client.get(job.id)
        assert (row.status, row.run_at, row.dispatch) == ("scheduled", at, 0)
        assert (row.queued_at, row.needs_publish) == (None, False)


async def test_an_instant_that_is_over_is_now(client: JobClient) -> None:
    at = datetime(2020, 1, 1, tzinfo=UTC)
    for job in [await client.enqueue(KIND, {}, run_at=at), *await client.enqueue_many(KIND, [{}], run_at=at)]:
        row = await client.get(job.id)
        assert (row.status, row.run_at, row.dispatch, row.queued_at is None) == (
            "queued",
            at,
            1,
            False,
        )
    assert await client.publish_pending() >= 0


async def test_jobs_are_listed_by_their_processor(client: JobClient) -> None:
    await client.enqueue("another-kind", {})
    job = await client.enqueue(CountLines, {})
    assert [row.id for row in await client.list(kind=CountLines)] == [job.id]


CALLS: dict[str, Callable[[JobClient], Awaitable[Any]]] = {
    "enqueue": lambda client: client.enqueue(KIND, {}),
    "enqueue_many": lambda client: client.enqueue_many(KIND, [{}]),
    "publish_pending": lambda client: client.publish_pending(),
    "get": lambda client: client.get(uuid4()),
    "timeline": lambda client: client.timeline(uuid4()),
    "list": lambda client: client.list(),
    "cancel": lambda client: client.cancel(uuid4()),
    "retry": lambda client: client.retry(uuid4()),
    "clear_and_reenqueue": lambda client: client.clear_and_reenqueue(uuid4(), "stuck"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_client_that_is_not_open_says_so(settings: Settings, name: str) -> None:
    client = JobClient(settings)
    with pytest.raises(RuntimeError, match=r"^the client is not open: use `async with`, or call open\(\)$"):
        await CALLS[name](client)
    async with client:
        await client.list()
    with pytest.raises(RuntimeError, match=r"^the client is closed$"):
        await CALLS[name](client)


async def test_what_was_taken_from_a_client_before_it_was_closed_says_so(settings: Settings) -> None:
    async with JobClient(settings) as client:
        limits, schedules, workflows = client.limits, client.schedules, client.workflows
        failed = client.select(status="failed")
        async with client.workflow("mine") as flow:
            flow.job(KIND, {})
        unfinished = client.workflow("another")
        await unfinished.__aenter__()
        unfinished.job(KIND, {})
    calls: list[Callable[[], Awaitable[Any]]] = [
        limits.list,
        schedules.list,
        workflows.list,
        failed.count,
        failed.retry,
        flow.result,
        lambda: limits.reset(KIND),
        lambda: workflows.cancel(flow.id),
        lambda: unfinished.__aexit__(None, None, None),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"^the client is closed$"):
            await call()


async def test_a_client_that_is_open_is_not_opened_twice(settings: Settings) -> None:
    client = JobClient(settings)
    async with client:
        with pytest.raises(RuntimeError, match=r"^the client is open already: "):
            await client.open()
        await client.list()


def test_a_client_that_was_closed_can_be_opened_in_another_event_loop(settings: Settings) -> None:
    client = JobClient(settings)

    async def use() -> None:
        async with client:
            jobs = await asyncio.gather(*(client.enqueue(KIND, {}) for _ in range(50)))
            await asyncio.gather(*(client.get(job.id) for job in jobs))
            with pytest.raises(TimeoutError):
                await jobs[0].result(timeout=0.5)
            assert client.publisher._keeping is not None
            assert not client.publisher._keeping.done()
            assert any(pool._idle for pool in client.database.pools_by_name().values())

    asyncio.run(use())
    asyncio.run(use())


def test_a_client_that_has_waited_for_a_result_in_one_event_loop_closes_in_the_next(
    settings: Settings,
) -> None:
    client = JobClient(settings)

    async def wait_for_result() -> None:
        async with client:
            with pytest.raises(TimeoutError):
                await (await client.enqueue(KIND, {})).result(timeout=0.5)

    async def close() -> None:
        await client.open()
        await asyncio.wait_for(client.close(), 60)

    asyncio.run(wait_for_result())
    asyncio.run(close())


def test_a_client_that_is_open_in_another_event_loop_says_so_instead_of_waiting_for_ever(
    settings: Settings,
) -> None:
    with asyncio.Runner() as first, asyncio.Runner() as second:
        client = JobClient(settings)
        first.run(client.open())
        job = first.run(client.enqueue(KIND, {}))
        with pytest.raises(TimeoutError):
            first.run(job.result(timeout=0.5))  # its reader lives in this loop
        calls: list[Callable[[], Awaitable[Any]]] = [
            *(partial(call, client) for call in CALLS.values()),
            partial(job.result, timeout=60),
            client.open,
            client.close,
        ]
        for call in calls:
            with pytest.raises(RuntimeError, match=r"^the client was opened in another event loop"):
                second.run(asyncio.wait_for(call(), 60))
        assert first.run(client.get(job.id)) is not None
        first.run(client.close())
        second.run(client.open())
        second.run(client.close())


def test_a_client_that_was_opened_before_a_fork_is_refused_in_the_child_process(settings: Settings) -> None:
    with asyncio.Runner() as runner:
        client = JobClient(settings)
        runner.run(client.open())

        def use() -> None:
            calls: list[Callable[[], Awaitable[Any]]] = [
                *(partial(call, client) for call in CALLS.values()),
                client.close,
            ]
            for call in calls:
                with pytest.raises(
                    RuntimeError, match=r"^the client was opened before this process was forked"
                ):
                    runner.run(asyncio.wait_for(call(), 60))

        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        child.join(120)
        assert child.exitcode == 0
        job = runner.run(client.enqueue(KIND, {}))
        assert runner.run(client.get(job.id)) is not None
        runner.run(client.close())
