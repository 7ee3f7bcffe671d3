"""Many jobs go in statements that are neither too long nor too large."""

import asyncio
import json
from typing import Any

import pytest

from jsworker import InvalidPayload, JobClient
from jsworker.client import enqueueing
from jsworker.client.enqueueing import JobOptions, insert, new_jobs
from jsworker.core import strict_json
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import enqueue_terms
from jsworker.ownership.transitions.enqueue import Enqueued, NewJob, new_job_id
from tests.worker.rows import Rows


def jobs(*payloads: str, keys: bool = False) -> list[NewJob]:
    return [
        NewJob(new_job_id(), text, f"key-{place}" if keys else None) for place, text in enumerate(payloads)
    ]


def none(_jobs: int) -> float:
    """Return how many seconds relays leave the messages to this client."""
    return 0.0


async def answered(database: Database, new: list[NewJob]) -> list[int]:
    """Insert jobs and return how many each statement took; the answers come in order."""
    keyed = any(job.unique_key for job in new)
    batches = [batch async for batch in insert(database, "kind", new, keyed=keyed, reserved_seconds=none)]
    assert [answer.id for batch in batches for answer in batch.answers] == [job.id for job in new]
    return [len(batch.answers) for batch in batches]


@pytest.mark.parametrize("keys", [False, True])
async def test_a_statement_takes_so_many_jobs(
    database: Database, rows: Rows, monkeypatch: pytest.MonkeyPatch, *, keys: bool
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 3)
    assert await answered(database, jobs(*["{}"] * 8, keys=keys)) == [3, 3, 2]
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 8


async def test_and_so_many_bytes_but_at_least_one_job(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH_CHARACTERS", 10)
    small, large = '{"a":1}', '{"a":"0123456789"}'
    assert await answered(database, jobs(small, small, large, large, "1", "2", "3", small)) == [1, 1, 1, 1, 4]


def test_only_keys_with_a_delay_need_other_statements() -> None:
    for delay, keys, plain in (
        (60.0, [None, None], True),
        (60.0, [None, "a"], False),
        (0.0, [None, "a"], True),
    ):
        new = new_jobs("kind", [{}, {}], keys, JobOptions(1000, delay))
        assert [job.terms is None for job in new] == [plain] * 2


async def test_nothing_is_no_statement(database: Database) -> None:
    assert await answered(database, []) == []


@pytest.mark.parametrize(("keys", "at_once"), [(False, 2), (True, 1)])
async def test_two_statements_are_under_way_at_once_unless_there_are_keys(
    database: Database, monkeypatch: pytest.MonkeyPatch, *, keys: bool, at_once: int
) -> None:
    enqueue_many = enqueue_terms.enqueue_many
    under_way = 0
    seen: list[int] = []

    async def counted(*given: Any, **options: Any) -> list[Enqueued]:
        nonlocal under_way
        under_way += 1
        seen.append(under_way)
        try:
            return await enqueue_many(*given, **options)
        finally:
            under_way -= 1

    monkeypatch.setattr(enqueue_terms, "enqueue_many", counted)
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    await answered(database, jobs(*["{}"] * 8, keys=keys))
    assert (len(seen), max(seen)) == (4, at_once)


async def test_the_next_statement_is_sent_before_answers_are_used(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0

    async def answer(_database: Database, _kind: str, batch: list[NewJob], **_: Any) -> list[Enqueued]:
        nonlocal sent
        sent += 1
        return [Enqueued(job.id, created=True) for job in batch]

    monkeypatch.setattr(enqueue_terms, "enqueue_many", answer)
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    inserted = insert(database, "kind", jobs(*["{}"] * 8), keyed=False, reserved_seconds=none)
    assert [sent async for _ in inserted] == [2, 3, 4, 4]


async def test_an_error_leaves_no_statement_under_way(
    database: Database, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH", 1)
    broken, waiting = jobs("{", "{}")
    before = asyncio.all_tasks()
    async with rows.connection.transaction(force_rollback=True):
        # Not committed: who inserts the same id has to wait.
        await rows.query(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, run_at) "
            "VALUES (%s, 'kind', '1', 'scheduled', now())",
            waiting.id,
        )
        with pytest.raises(RowRefused):
            _ = [
                batch
                async for batch in insert(
                    database, "kind", [broken, waiting], keyed=False, reserved_seconds=none
                )
            ]
        under_way = asyncio.all_tasks() - before
        assert not [task for task in under_way if "insert" in getattr(task.get_coro(), "__qualname__", "")]


@pytest.mark.parametrize(("limit", "most"), [("_BATCH", 2), ("_BATCH_CHARACTERS", len('{"n": 1}') * 2)])
async def test_others_have_the_event_loop_between_the_payloads_of_many_jobs(
    client: JobClient, rows: Rows, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(enqueueing, limit, most)
    turns: list[int] = []
    made: list[int] = []

    async def take_turns() -> None:
        while True:
            turns.append(len(made))
            await asyncio.sleep(0)

    def write(payload: Any, *, what: str) -> str:
        made.append(payload["n"])
        if payload["n"] < 0:
            raise InvalidPayload("negative")
        return json.dumps(payload)

    monkeypatch.setattr(strict_json, "dumps_model", write)
    beside = asyncio.create_task(take_turns())
    try:
        jobs = await client.enqueue_many("kind", [{"n": n} for n in range(9)])
        assert {2, 4, 6, 8, 9} <= set(turns)
        with pytest.raises(InvalidPayload, match=r"^payloads\[5\]: negative$"):
            await client.enqueue_many("kind", [{"n": n} for n in (1, 2, 3, 4, 5, -6, 7)])
    finally:
        beside.cancel()
    stored = await rows.query("SELECT id FROM jsworker.jobs ORDER BY id")
    assert [row["id"] for row in stored] == [job.id for job in jobs]  # what is refused stores nothing
