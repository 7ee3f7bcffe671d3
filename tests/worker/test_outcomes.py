"""What a run ends in, and what its row, its timeline, its hooks and its events say about that."""

import asyncio
import math
import pickle
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from types import SimpleNamespace
from typing import Annotated, Any, cast
from uuid import UUID

import pytest
from pydantic import BaseModel, PlainSerializer

from jsworker import JobClient
from jsworker.core.errors import Fail, InvalidJson, InvalidPayload, KeyMissing, Retry, Snooze
from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.pipeline.attempt import judge
from jsworker.worker.pipeline.in_flight import Run
from jsworker.worker.pipeline.threads import ThreadNotStarted
from tests.support.polling import eventually
from tests.worker.processors import KIND, LATER, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

MEBIBYTE = 2**20


WHEN = datetime(2026, 11, 23, 12, tzinfo=UTC)


class Colour(Enum):
    RED = "red"


@dataclass
class Spot:
    x: int
    tags: set[int]


class Point(BaseModel):
    x: float
    label: str = ""
    further: Any = None


async def boom(job: Job[Any]) -> None:
    raise ValueError("boom")


async def test_a_returned_value_is_the_result(client: JobClient, rows: Rows, start: StartWorker) -> None:
    value = {"text": "é 漢 \u2028", "list": [1, 2.5, None, True], "nested": {"empty": {}}}
    running = await start(scripted(echo))
    job = await client.enqueue(KIND, value)
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == value
    assert (row["attempts"], row["errors"], row["stalls"]) == (1, 0, 0)
    assert row["last_error"] is row["failure_reason"] is None
    assert await rows.told(job.id) == []  # plain completions leave no timeline
    await running.events.told("job.completed")
    assert running.events.names(job.id) == ["job.claimed", "job.started", "job.completed"]
    await running.stream_is_empty()


@pytest.mark.parametrize(
    ("returned", "stored"),
    [
        (None, None),
        (Point(x=1.5, label="a"), {"x": 1.5, "label": "a", "further": None}),
        ((1, 2), [1, 2]),
        ("", ""),
        (False, False),
        (0, 0),
        (WHEN, "2026-11-23T12:00:00Z"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (Decimal("1.10"), "1.10"),
        ({"nested": [WHEN.date(), timedelta(minutes=1)]}, {"nested": ["2026-11-23", "PT1M"]}),
        (Spot(1, {2}), {"x": 1, "tags": [2]}),
        ({3}, [3]),
        ([Point(x=1)], [{"x": 1.0, "label": "", "further": None}]),
        (b"text", "text"),
        ({1: Colour.RED}, {"1": "red"}),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_results_of_every_sort_are_stored(
    client: JobClient, rows: Rows, start: StartWorker, returned: Any, stored: Any
) -> None:
    async def process(job: Job[Any]) -> Any:
        return returned

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert row["result"] == stored
    assert type(row["result"]) is type(stored)


async def test_events_carry_what_was_raised_for_an_error_tracker(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    raised = [ValueError("first"), KeyError("second")]

    async def process(job: Job[Any]) -> None:
        raise raised[job.attempt - 1]

    running = await start(scripted(process, max_attempts=2))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "failed")
    await running.events.told("job.failed")
    told = [event for event in running.events.events if event.name in ("job.error", "job.failed")]
    assert [event.exception for event in told] == raised
    assert all(event.exception is not None and event.exception.__traceback__ for event in told)
    assert all(event.exception is None for event in running.events.events if event not in told)


class Cents(JobProcessor):
    """Its results are written as their annotation says, not as what they are."""

    async def process(
        self, _job: Job[Any]
    ) -> dict[str, Annotated[Decimal, PlainSerializer(lambda x: int(x * 100))]]:
        return {"price": Decimal("1.10")}


async def test_results_are_written_as_they_are_annotated(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await start(Cents)
    job = await client.enqueue(Cents, {})
    assert (await rows.becomes(job.id, "completed"))["result"] == {"price": 110}


async def test_an_error_is_retried_after_the_backoff_and_its_traceback_is_kept(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(scripted(boom, backoff=Backoff(first=100.0, jitter=0.1)))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    wait = (row["run_at"] - datetime.now(UTC)).total_seconds()
    assert 85 < wait <= 110
    assert (row["attempts"], row["errors"], row["worker_id"]) == (1, 1, None)
    assert row["last_error"].startswith("ValueError: boom\n")
    assert "Traceback (most recent call last)" in row["last_error"]
    assert "in boom" in row["last_error"]
    [told] = await rows.timeline(job.id)
    assert (told["event"], told["error"]) == ("error", row["last_error"])
    assert told["detail"]["errors"] == 1
    [event] = await running.events.told("job.error")
    assert event["error"] == "ValueError: boom"
    await running.stream_is_empty()


async def test_the_backoff_grows_with_each_attempt(client: JobClient, rows: Rows, start: StartWorker) -> None:
    await start(scripted(boom, backoff=Backoff(first=100.0, factor=3.0, jitter=0.0)))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "scheduled")
    await rows.query("UPDATE jsworker.jobs SET run_at = clock_timestamp() WHERE id = %s", job.id)

    async def waits_longer() -> None:
        row = await rows.job(job.id)
        assert (row["status"], row["attempts"]) == ("scheduled", 2)
        assert 290 < (row["run_at"] - datetime.now(UTC)).total_seconds() <= 300

    await eventually(waits_longer)


async def test_the_last_attempt_fails_the_job_and_on_failed_is_called_once(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    attempts: list[int] = []

    async def process(job: Job[Any]) -> None:
        attempts.append(job.attempt)
        raise ValueError(f"attempt {job.attempt}")

    processor = scripted(process, max_attempts=3)
    running = await start(processor)
    job = await client.enqueue(KIND, {"n": 1})
    row = await rows.becomes(job.id, "failed")
    assert attempts == [1, 2, 3]
    assert (row["failure_reason"], row["errors"], row["attempts"]) == ("attempts", 3, 3)
    assert [told["event"] for told in await rows.timeline(job.id) if told["error"]] == [
        "error",
        "error",
        "failed",
    ]
    errors = [told["error"].split("\n")[0] for told in await rows.timeline(job.id) if told["error"]]
    assert errors == ["ValueError: attempt 1", "ValueError: attempt 2", "ValueError: attempt 3"]
    await running.events.told("job.failed")
    await running.stream_is_empty()
    [(failed_job, error)] = processor.failed
    assert (failed_job.id, failed_job.payload, str(error)) == (job.id, {"n": 1}, "attempt 3")
    assert processor.lost == []


async def test_retry_waits_as_long_as_it_says(client: JobClient, rows: Rows, start: StartWorker) -> None:
    waits: dict[str, float | timedelta] = {"seconds": 500.0, "timedelta": timedelta(seconds=500)}

    async def process(job: Job[Any]) -> None:
        raise Retry(after=waits[job.payload["as"]], reason="rate limited")

    await start(scripted(process))
    for job in await client.enqueue_many(KIND, [{"as": name} for name in waits]):
        row = await rows.becomes(job.id, "scheduled")
        assert 490 < (row["run_at"] - datetime.now(UTC)).total_seconds() <= 500
        assert (row["last_error"], row["errors"]) == ("rate limited", 1)


async def test_retry_without_a_wait_takes_the_backoff(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        raise Retry

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert 2800 < (row["run_at"] - datetime.now(UTC)).total_seconds() < 4400


@pytest.mark.parametrize(
    "after", [-1, -0.001, math.nan, math.inf, 1e12, 10**400, True, timedelta(days=-1), [1]]
)
def test_a_retry_refuses_a_wait_that_is_none(after: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^retry after=.* must be a timedelta or a number of seconds, from 0 to"
    ):
        Retry(after)


def test_a_retry_says_how_a_reason_is_given() -> None:
    rule = "must be a timedelta or a number of seconds; a reason is given as Retry(reason=…)"
    with pytest.raises(TypeError, match=re.escape(f"retry after='the API is down' {rule}")):
        Retry("the API is down")  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [Retry(5, "429", pause="key"), Retry(reason="429"), Snooze(5, "429")])
def test_a_retry_and_a_snooze_can_be_raised_in_a_process_pool(error: Retry | Snooze) -> None:
    for found in (pickle.loads(pickle.dumps(error)), copy(error)):  # noqa: S301 -- its own bytes
        assert (type(found), str(found), vars(found)) == (type(error), "429", vars(error))


IMPOSSIBLE_WAITS: dict[str, Any] = {
    "nan": math.nan,
    "text": "soon",
    "inf": math.inf,
    "1e300": 1e300,
    "past": -5.0,
}


async def test_a_retry_that_is_refused_is_a_failed_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        raise Retry(after=-5.0)

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert 2800 < (row["run_at"] - datetime.now(UTC)).total_seconds() < 4400
    assert row["last_error"].startswith("ValueError: retry after=-5.0 must be a timedelta or a number")


async def test_a_retry_whose_wait_was_changed_to_an_impossible_one_is_still_an_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        error = Retry()
        error.after = IMPOSSIBLE_WAITS[job.payload["after"]]
        raise error

    await start(scripted(process, backoff=LATER))
    jobs = await client.enqueue_many(KIND, [{"after": name} for name in IMPOSSIBLE_WAITS], max_attempts=2)
    nan, text, *endless, past = jobs
    for job in (nan, text):  # the back-off
        row = await rows.becomes(job.id, "scheduled")
        assert 2800 < (row["run_at"] - datetime.now(UTC)).total_seconds() < 4400
    for job in endless:
        row = await rows.becomes(job.id, "scheduled")
        assert (row["run_at"] - datetime.now(UTC)).days > 3650
    row = await rows.becomes(past.id, "failed")
    assert (row["failure_reason"], row["errors"]) == ("attempts", 2)


async def test_fail_is_final_at_once(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> None:
        raise Fail("no such repository")

    processor = scripted(process)
    running = await start(processor)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["attempts"], row["last_error"]) == (
        "permanent",
        1,
        "no such repository",
    )
    [event] = await running.events.told("job.failed")
    assert event["error"] == "no such repository"
    await running.stream_is_empty()
    assert isinstance(processor.failed[0][1], Fail)


@pytest.mark.parametrize(
    ("others", "status"),
    [
        ([], "failed"),
        ([Fail("no such repository"), Retry(after=5), Snooze(5)], "failed"),
        ([ValueError("another task")], "scheduled"),
    ],
)
async def test_fail_in_a_task_group_counts_if_nothing_else_was_raised_there(
    client: JobClient, rows: Rows, start: StartWorker, others: list[Exception], status: str
) -> None:
    async def raise_after_a_turn(error: Exception) -> None:
        await asyncio.sleep(0)
        raise error

    async def process(job: Job[Any]) -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            outer.create_task(asyncio.sleep(60.0))
            for error in [Fail("no such repository"), *others]:
                inner.create_task(raise_after_a_turn(error))

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, status)
    if status == "scheduled":
        assert row["last_error"].startswith("ExceptionGroup: ")
    else:
        assert (row["failure_reason"], row["last_error"]) == ("permanent", "no such repository")


@pytest.mark.parametrize(
    ("raised", "errors"),
    [
        ([Retry(after=3000.0)], 1),
        ([Snooze(3000.0)], 0),
        ([Retry(after=30.0), Retry(after=3000.0), Retry()], 1),
        ([Snooze(30.0), Snooze(3000.0)], 0),
        ([Snooze(30.0), Retry(after=3000.0), Snooze(9000.0)], 1),
    ],
)
async def test_retry_and_snooze_in_a_task_group_keep_their_wait(
    client: JobClient, rows: Rows, start: StartWorker, raised: list[Exception], errors: int
) -> None:
    async def raise_it(error: Exception) -> None:
        raise error

    async def process(job: Job[Any]) -> None:
        async with asyncio.TaskGroup() as group:
            for error in raised:
                group.create_task(raise_it(error))

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "scheduled")
    assert 2800 < (row["run_at"] - datetime.now(UTC)).total_seconds() <= 3000
    assert row["errors"] == errors


def missing_key() -> KeyMissing:
    error = KeyMissing.of("step a", "key 'k'")
    error.of_run = True
    return error


@pytest.mark.parametrize("error", [missing_key(), ThreadNotStarted("no thread")])
@pytest.mark.parametrize("others", [[], [Retry(after=3000.0), Snooze(3000.0)]])
async def test_a_fault_that_is_not_the_jobs_is_not_counted_out_of_a_task_group_either(
    client: JobClient, rows: Rows, start: StartWorker, error: Exception, others: list[Exception]
) -> None:
    async def process(_: Job[Any]) -> None:
        raise ExceptionGroup("of a TaskGroup", [error, *others])

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {}, max_attempts=1)
    assert (await running.events.told("job.released"))[0]["reason"] == str(error)
    assert (await rows.job(job.id))["errors"] == 0


@pytest.mark.parametrize("error", [ValueError("broken"), Fail("broken")], ids=["error", "fail"])
async def test_a_group_in_which_each_group_holds_the_next_one_twice_holds_up_nobody(
    client: JobClient, rows: Rows, start: StartWorker, error: Exception
) -> None:
    async def process(job: Job[Any]) -> None:
        group = error
        for _ in range(60):  # 2**60 ways lead to the error
            group = ExceptionGroup("many", [group, group])
        raise group

    await start(scripted(process, backoff=LATER))
    job = await client.enqueue(KIND, {})
    if isinstance(error, Fail):
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["last_error"]) == ("permanent", "broken")
    else:
        row = await rows.becomes(job.id, "scheduled")
        assert row["last_error"].startswith("ExceptionGroup: many (2 sub-exceptions)\nTraceback ")
        assert "in process" in row["last_error"]


async def test_limits_of_the_class_beat_the_settings_and_the_producer_beats_the_class(
    client: JobClient, rows: Rows, make_settings: Callable[..., Settings], start: StartWorker
) -> None:
    settings = make_settings(max_attempts=7, max_stalls=6)
    of_settings, of_class = (
        scripted(boom, kind="plain", backoff=LATER),
        scripted(boom, max_attempts=2, max_stalls=4, backoff=LATER),
    )
    await start(of_settings, of_class, with_settings=settings)
    plain = await client.enqueue("plain", {})
    by_class = await client.enqueue(KIND, {})
    by_producer = await client.enqueue(KIND, {}, max_attempts=1, max_stalls=9)
    limits = {}
    for job, status in ((plain, "scheduled"), (by_class, "scheduled"), (by_producer, "failed")):
        row = await rows.becomes(job.id, status)
        limits[job.id] = (row["max_attempts"], row["max_stalls"])
    assert limits == {plain.id: (7, 6), by_class.id: (2, 4), by_producer.id: (1, 9)}


def _circle() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


UNSTORABLE = {
    "no JSON": (object(), "no JSON"),
    "no JSON within": (
        {"rows": [{"price": 1}, {"price": object()}]},
        "object, which is no JSON (at rows[1].price)",
    ),
    "bytes that are no text": ({"raw": b"\xff"}, "JSON"),
    "keys that have no text": ({object(): 2}, "JSON"),
    "NUL": ({"a": "b\0c"}, "u0000"),
    "NUL in a key": ({"b\0c": 1}, "u0000"),
    "NaN": ([math.nan], "finite number (at [0])"),
    "an infinity": (-math.inf, "finite"),
    "a huge number": (10**400, "1e308"),
    "a lone surrogate": ("\ud800", "surrogate"),
    "a circle": (_circle(), "nests deeper"),
    "too large": ("x" * (MEBIBYTE + 1), "exceeds"),
    "too large in bytes": ("é" * (MEBIBYTE // 2), "exceeds"),
    "a model with NaN": (Point(x=math.nan), "finite"),
    "a model with an infinity": (Point(x=1, further={"deep": [math.inf]}), "finite"),
    "a model without a JSON form": (Point(x=1, further=object()), "JSON"),
    "a circle in a model": (Point(x=1, further=_circle()), "circle"),
    "a class": (Point, "no JSON"),
}


async def test_results_that_cannot_be_stored_fail_at_once_and_harm_no_neighbour(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        return UNSTORABLE[job.payload["case"]][0] if "case" in job.payload else "fine"

    processor = scripted(process)
    running = await start(processor)
    bad = await client.enqueue_many(KIND, [{"case": case} for case in UNSTORABLE])
    good = await client.enqueue_many(KIND, [{}] * 20)
    for (_, why), job in zip(UNSTORABLE.values(), bad, strict=True):
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["attempts"], row["result"]) == ("result", 1, None)
        assert why in row["last_error"]
        assert "\n" not in row["last_error"]
        assert len(row["last_error"]) < 300
    for job in good:
        assert (await rows.becomes(job.id, "completed"))["result"] == "fine"
    await running.stream_is_empty()
    told = {job.id: error for job, error in processor.failed}
    for job in bad:
        assert isinstance(told[job.id], InvalidJson)
        assert str(told[job.id]) == (await rows.job(job.id))["last_error"]


async def test_a_result_that_only_postgresql_refuses_fails_at_once_and_harms_no_neighbour(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = {"good": '"fine"', "bad": "1e999999"}  # a numeric that jsonb has no room for
    monkeypatch.setattr(
        "jsworker.worker.pipeline.outcomes.result_text", lambda _run, value, *_: written[value]
    )

    async def process(job: Job[Any]) -> Any:
        return job.payload["result"]

    processor = scripted(process)
    running = await start(processor)
    bad = await client.enqueue(KIND, {"result": "bad"})
    good = [await client.enqueue(KIND, {"result": "good"}) for _ in range(5)]
    row = await rows.becomes(bad.id, "failed")
    assert (row["failure_reason"], row["attempts"]) == ("result", 1)
    assert "refused" in row["last_error"]
    for job in good:
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert len(processor.failed) == 1


class Strict(BaseModel):
    n: int


UNFIT: list[Any] = [{"n": "MARKER"}, {}, [], "MARKER", None]


class Doubling(JobProcessor[Strict]):
    backoff = LATER

    async def process(self, job: Job[Strict]) -> int:
        return 2 * job.payload.n


async def test_a_payload_that_fails_the_model_at_run_time_fails_at_once_and_harms_no_neighbour(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    running = await start(Doubling())
    bad = [await client.enqueue("doubling", payload) for payload in UNFIT]
    good = [await client.enqueue("doubling", {"n": n}) for n in range(5)]
    for job in bad:
        row = await rows.becomes(job.id, "failed")
        assert (row["failure_reason"], row["attempts"]) == ("payload", 1)
        assert row["last_error"].startswith("payload of kind doubling: ")
        assert "MARKER" not in row["last_error"]
    for n, job in enumerate(good):
        assert (await rows.becomes(job.id, "completed"))["result"] == 2 * n
    await running.stream_is_empty()
    assert "job.started" not in running.events.names(bad[0].id)


async def test_an_invalid_payload_of_the_processors_own_making_is_an_ordinary_error(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        raise InvalidPayload("of another job that this one wanted to enqueue")

    await start(scripted(process))
    job = await client.enqueue(KIND, {}, max_attempts=2)
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], row["attempts"]) == ("attempts", 2)


async def test_a_run_that_its_worker_has_left_gets_no_outcome_when_it_is_cancelled() -> None:
    run = cast("Run", SimpleNamespace(abandoned=True))
    assert judge(run, asyncio.CancelledError()) is None
