"""Jobs, their events and their steps as records: nothing is missing, and any JSON encoder takes them."""

import copy
import dataclasses
import json
import pickle
import re
from datetime import timedelta
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, get_args
from uuid import UUID, uuid4

import pytest
from sqlalchemy import TextClause

from jsworker import JobClient, JobDetails, JobEvent, JobInfo, StepInfo
from jsworker.client.job_info import JobEventName, JobStatus
from jsworker.ownership import schema, transitions
from jsworker.ownership.queries import listing
from jsworker.ownership.transitions.steps import steps_of
from tests.worker.rows import Rows

INTO_TIMELINE = r"(?s)INSERT INTO jsworker\.job_events [^)]*\)\s+(?:SELECT |VALUES \()\S+(?: AS id)?,\s(.*?),"


def names(record: Any) -> list[str]:
    return [each.name for each in dataclasses.fields(record)]


async def add_history(rows: Rows, job_id: UUID) -> None:
    """Add an event, a step and a sleep."""
    await rows.query(
        "INSERT INTO jsworker.job_events (job_id, event, detail) VALUES (%s, 'reset', %s)",
        job_id,
        '{"cause": "stale"}',
    )
    for name, hours in (("charge", None), ("cool-off", 1)):
        await rows.query(
            "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token, sleeps_until) "
            "VALUES (%s, %s, '[1.5]', 1, clock_timestamp() + make_interval(hours => %s))",
            job_id,
            name,
            hours,
        )


async def test_each_column_is_an_attribute(client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("count", {"a": 1})
    await add_history(rows, job.id)
    assert set(names(JobDetails)) == set(schema.jobs.c.keys())
    [listed] = (await listing.list_jobs(client.database)).jobs
    assert set(names(JobInfo)) == listed.keys()
    [event] = await listing.timeline(client.database, job.id)
    assert set(names(JobEvent)) == event.keys()
    step, _ = await steps_of(client.database, job.id)
    assert set(names(StepInfo)) == step.keys()


async def test_a_record_has_what_the_row_has(client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("count", {"a": 1}, priority="high", delay=60.0)
    await add_history(rows, job.id)
    row, found = await rows.job(job.id), await client.get(job.id)
    assert {name: getattr(found, name) for name in row} == row | {"priority": "high"}
    assert isinstance(found, JobInfo)
    [listed] = await client.list()
    assert all(getattr(listed, name) == getattr(found, name) for name in names(listed))
    with pytest.raises(AttributeError, match="payload"):
        listed.payload  # type: ignore[attr-defined]  # noqa: B018 -- what is not listed is not None
    [event] = await client.timeline(job.id)
    assert (event.event, event.worker_id, event.detail) == ("reset", None, {"cause": "stale"})
    step, sleep = sorted(await client.steps(job.id), key=lambda each: each.name)
    assert (step.result, step.sleeps_until) == ([1.5], None)
    assert sleep.sleeps_until is not None
    assert sleep.sleeps_until > sleep.at


async def test_records_are_frozen_and_values(client: JobClient) -> None:
    found = await client.get((await client.enqueue("count", {"a": 1})).id)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.status = "failed"  # type: ignore[misc]
    for again in (copy.copy(found), pickle.loads(pickle.dumps(found))):  # noqa: S301 -- our own
        assert again == found
    assert not hasattr(found, "__dict__")


async def test_to_dict_is_json(client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("count", {"a": [1, None]}, delay=60.0)
    await add_history(rows, job.id)
    await rows.query(
        "UPDATE jsworker.jobs SET stale_after = '90 seconds', deadline_at = 'infinity', "
        "created_at = '2030-01-31 12:00:00.5+01' WHERE id = %s",
        job.id,
    )
    found = await client.get(job.id)
    assert found.stale_after == timedelta(seconds=90)
    records = [found, *await client.list(), *await client.timeline(job.id), *await client.steps(job.id)]
    assert len(records) == 5
    for record in records:
        told = record.to_dict()
        assert json.loads(json.dumps(told, allow_nan=False)) == told
        assert list(told) == names(record)
    told = found.to_dict()
    assert (told["id"], told["payload"], told["stale_after"]) == (str(job.id), {"a": [1, None]}, 90.0)
    assert (told["created_at"], told["deadline_at"]) == ("2030-01-31T11:00:00.500000Z", "infinity")


async def test_columns_of_a_newer_jsworker_are_left_out(client: JobClient, rows: Rows) -> None:
    job = await client.enqueue("count", {})
    row = await rows.job(job.id)
    assert JobDetails.of_row(row | {"mood": "good"}) == await client.get(job.id)
    with pytest.raises(TypeError, match="give its id"):
        await client.get(await client.get(job.id))  # type: ignore[arg-type]
    assert await client.timeline(uuid4()) == []


def test_words_are_those_of_the_table() -> None:
    assert get_args(JobStatus) == schema.STATUSES
    [held_by, _] = get_args(JobInfo.__annotations__["held_by"])
    assert get_args(held_by) == schema.HELD_BY


def test_names_of_events_are_those_that_statements_write() -> None:
    modules = [
        import_module(each.name) for each in iter_modules(transitions.__path__, f"{transitions.__name__}.")
    ]
    statements = {
        str(each) for module in modules for each in vars(module).values() if isinstance(each, TextClause)
    }
    written = {"failed"}  # by CASE … ELSE failed.status
    for columns in re.findall(INTO_TIMELINE, "\n".join(statements)):
        names = re.findall(r"(?:^|THEN |ELSE )'(\w+)'", columns)
        assert names, columns
        written.update(names)
    assert written == set(get_args(JobEventName))
