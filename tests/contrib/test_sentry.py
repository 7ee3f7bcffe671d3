"""Sentry: each failed attempt is one event, with the job's facts and without its payload."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk

from jsworker import JobClient
from jsworker.contrib.sentry import sentry_scope
from jsworker.core.settings import Settings
from jsworker.worker.worker import Worker
from tests.contrib.reported import Collecting, Failing, FailingAlone, FailingPlainly
from tests.test_contents import OLD, text_of_keys
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

SECRET = "a secret of the payload"


@contextmanager
def reported(**options: Any) -> Iterator[list[dict[str, Any]]]:
    transport = Collecting()
    sentry_sdk.init(dsn="https://public@sentry.example/1", transport=transport, **options)
    try:
        yield transport.events
    finally:
        sentry_sdk.get_client().close()
        sentry_sdk.get_global_scope().set_client(None)


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    with reported() as events:
        yield events


async def test_a_failed_attempt_is_an_event_with_its_job(
    client: JobClient, rows: Rows, start: StartWorker, events: list[dict[str, Any]]
) -> None:
    await start(Failing)
    job = await client.enqueue("failing", {"does": "raise", "secret": SECRET})
    await rows.becomes(job.id, "scheduled")
    [event] = events
    [error] = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("ValueError", "wrong")
    assert event["transaction"] == "failing"
    facts = {"kind": "failing", "id": str(job.id), "attempt": 1, "processor": "Failing"}
    assert {name: event["contexts"]["job"][name] for name in facts} == facts
    assert event["tags"] == {"jsworker.kind": "failing", "jsworker.job_id": str(job.id)}
    assert error["stacktrace"]["frames"][-1]["function"] == "process"
    assert SECRET not in json.dumps(event)


@pytest.mark.parametrize("stack_info", [True, False], ids=["of the log", "of every event"])
async def test_a_logged_message_has_its_stack_without_the_payload(
    client: JobClient, rows: Rows, start: StartWorker, *, stack_info: bool
) -> None:
    with reported(attach_stacktrace=not stack_info) as events:
        await start(Failing)
        payload = {"does": "log", "stack_info": stack_info, "secret": SECRET}
        job = await client.enqueue("failing", payload)
        await rows.becomes(job.id, "completed")
    [event] = events
    [thread] = event["threads"]["values"]
    assert event["logentry"]["message"] == "card refused"
    functions = [frame["function"] for frame in thread["stacktrace"]["frames"]]
    assert "process" in functions
    assert functions[-1] != "_without_values"
    assert SECRET not in json.dumps(event)


async def test_what_a_database_repeats_of_a_row_is_left_out(
    client: JobClient, rows: Rows, start: StartWorker, events: list[dict[str, Any]]
) -> None:
    await start(Failing)
    job = await client.enqueue("failing", {"does": "raise as a database", "secret": SECRET})
    await rows.becomes(job.id, "scheduled")
    [event] = events
    assert event["exception"]["values"][0]["value"] == "duplicate key"
    assert SECRET not in json.dumps(event)


async def test_with_a_codec_the_words_of_errors_are_left_out_as_in_the_row(
    make_settings: Callable[..., Settings], rows: Rows, start: StartWorker, events: list[dict[str, Any]]
) -> None:
    sealed = make_settings(encryption_keys=text_of_keys(old=OLD))
    await start(Failing, with_settings=sealed)
    async with JobClient(sealed) as client:
        job = await client.enqueue("failing", {"does": "raise with the secret", "secret": SECRET})
        row = await rows.becomes(job.id, "scheduled")
    [event] = events
    errors = event["exception"]["values"]
    assert [error["type"] for error in errors] == ["KeyError", "ValueError"]
    assert {row["last_error"].splitlines()[0]} == {f"ValueError: {error['value']}" for error in errors}
    assert errors[-1]["stacktrace"]["frames"][-1]["function"] == "process"
    assert SECRET not in json.dumps(event)


@pytest.mark.parametrize(
    ("does", "status", "count"),
    [
        ("fail", "failed", 1),
        ("retry", "scheduled", 0),
        ("snooze", "scheduled", 0),
        ("snooze in a group", "scheduled", 0),
    ],
)
async def test_only_what_is_a_failure_is_reported(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    events: list[dict[str, Any]],
    *,
    does: str,
    status: str,
    count: int,
) -> None:
    await start(Failing)
    job = await client.enqueue("failing", {"does": does, "secret": SECRET})
    await rows.becomes(job.id, status)
    assert len(events) == count


async def test_a_time_limit_is_reported_with_the_place_where_it_waited(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    events: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Failing, "timeout", 1.0)
    await start(Failing)
    job = await client.enqueue("failing", {"does": "wait", "secret": SECRET})
    await rows.becomes(job.id, "scheduled")
    [event] = events
    [error] = event["exception"]["values"]
    assert (error["type"], error["value"]) == ("TimeoutError", "timed out after 1 s")
    assert "process" in [frame["function"] for frame in error["stacktrace"]["frames"]]
    assert SECRET not in json.dumps(event)


async def test_a_cancelled_run_is_not_reported(
    client: JobClient, rows: Rows, start: StartWorker, events: list[dict[str, Any]]
) -> None:
    running = await start(Failing)
    job = await client.enqueue("failing", {"does": "wait", "secret": SECRET})
    await running.events.told("job.started")
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    assert events == []


async def test_a_plain_functions_thread_has_the_scope_of_its_job(
    client: JobClient, rows: Rows, start: StartWorker, events: list[dict[str, Any]]
) -> None:
    await start(FailingPlainly)
    job = await client.enqueue("failing-plainly", {})
    await rows.becomes(job.id, "scheduled")
    [event] = events
    assert event["exception"]["values"][0]["value"] == "of failing-plainly"
    assert event["tags"]["set by"] == "the job"
    assert "set by" not in sentry_sdk.get_isolation_scope()._tags


async def test_in_quarantine_it_is_sent_before_the_process_ends(
    client: JobClient, rows: Rows, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENTRY_FILE", str(tmp_path / "events.json"))
    setting = f"{type(sentry_scope).__module__}:sentry_scope"
    monkeypatch.setattr(FailingAlone, "middleware", ())
    changes = {"middleware": setting, "watchdog_timeout": 20.0}  # it imports much on a busy machine
    async with Worker([FailingAlone], settings.model_copy(update=changes)):
        job = await client.enqueue("failing-alone", {"does": "fail", "secret": SECRET})
        row = await rows.becomes(job.id, "failed")
        assert row["last_error"] == "for good"
    events = json.loads((tmp_path / "events.json").read_text())
    assert {event["contexts"]["job"]["id"] for event in events} == {str(job.id)}
