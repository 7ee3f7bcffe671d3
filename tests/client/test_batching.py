"""Enqueues called at once share statements; each gets the answer of its own job."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.client import enqueueing
from jsworker.core.errors import DatabaseUnavailable
from jsworker.core.settings import Settings
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import enqueue
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.rows import Rows

JOBS = 300

request = ContextVar("request", default="none")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs each shared statement took."""
    taken: list[int] = []
    insert = enqueue.enqueue_many

    async def noted(database: Any, kind: str, new: Sequence[Any], **rest: Any) -> Any:
        taken.append(len(new))
        return await insert(database, kind, new, **rest)

    monkeypatch.setattr(enqueue, "enqueue_many", noted)
    return taken


async def test_a_flood_rides_in_few_statements_and_every_job_is_published(
    settings: Settings, rows: Rows, batches: list[int]
) -> None:
    async with JobClient(settings) as client:
        await a_flood_is_published(client, rows, batches)


async def a_flood_is_published(client: JobClient, rows: Rows, batches: list[int]) -> None:
    answers = await asyncio.gather(*(client.enqueue("kind", {"n": n}) for n in range(JOBS)))
    assert all(answer.created for answer in answers)
    assert len(batches) < JOBS / 10
    for n, answer in enumerate(answers):
        assert (await rows.job(answer.id))["payload"] == {"n": n}

    async def all_marked() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE NOT needs_publish") == JOBS

    await eventually(all_marked)
    assert await rows.value("SELECT count(DISTINCT stream_seq) FROM jsworker.jobs") == JOBS


async def test_large_payloads_ride_in_statements_of_so_many_bytes(
    client: JobClient, rows: Rows, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "_BATCH_CHARACTERS", 1000)
    answers = await asyncio.gather(
        *(client.enqueue("kind", {"text": "x" * 300, "n": n}) for n in range(40)),
        client.enqueue("kind", {"text": "x" * 2000, "n": 40}),
    )
    assert max(batches) == 3
    for n, answer in enumerate(answers):
        assert (await rows.job(answer.id))["payload"]["n"] == n


async def test_calls_at_the_same_time_leave_nothing_to_the_relays(settings: Settings, rows: Rows) -> None:
    async with JobClient(settings) as client:
        for _ in range(3):
            calls = [client.enqueue_many("kind", [{"n": n} for n in range(size)]) for size in (400, 30, 5)]
            await asyncio.gather(*calls)

        async def all_published() -> None:
            assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0

        await eventually(
            all_published,
        )


async def test_one_after_another_goes_alone(client: JobClient, batches: list[int]) -> None:
    for n in range(3):
        await client.enqueue("kind", {"n": n})
    assert batches == []


async def test_delays_limits_and_kinds_stay_each_jobs_own(client: JobClient, rows: Rows) -> None:
    wanted = [(f"kind-{n % 3}", 0.0 if n % 2 else 60.0, n + 1) for n in range(60)]
    answers = await asyncio.gather(
        *(client.enqueue(kind, {}, delay=delay, max_attempts=most) for kind, delay, most in wanted)
    )
    for answer, (kind, delay, most) in zip(answers, wanted, strict=True):
        row = await rows.job(answer.id)
        assert (row["kind"], row["status"], row["max_attempts"]) == (
            kind,
            "scheduled" if delay else "queued",
            most,
        )


async def test_a_job_that_is_refused_harms_no_other(client: JobClient, rows: Rows) -> None:
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT lucky CHECK (payload ->> 'n' <> '13')")
    calls = (client.enqueue("kind", {"n": n}) for n in range(40))
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, RowRefused)] == [13]
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 39


async def test_a_job_with_a_unique_key_holds_up_nobody(client: JobClient, rows: Rows) -> None:
    await rows.query("BEGIN")
    await rows.query(
        "INSERT INTO jsworker.jobs (id, kind, payload, status, unique_key, dispatch, queued_at)"
        " VALUES (uuidv7(), 'kind', '{}', 'queued', 'taken', 1, now())"
    )
    keyed = (client.enqueue("kind", {}, unique_key="taken") for _ in range(12))
    few = (client.enqueue_many("kind", [{}], unique_keys=["taken"]) for _ in range(12))
    many = (client.enqueue_many("kind", [{}] * 30, unique_keys=["taken"] * 30) for _ in range(12))
    waiting = asyncio.gather(*keyed, *few, *many)
    others = await asyncio.gather(*(client.enqueue("kind", {}) for _ in range(40)))
    others.append(await client.enqueue("kind", {}))
    assert (await client.get(others[-1].id)).id == others[-1].id
    assert not waiting.done()
    await rows.query("COMMIT")
    answers = await waiting
    assert not any(answer.created for answer in [*answers[:12], *chain.from_iterable(answers[12:])])
    assert all(other.created for other in others)


async def test_an_enqueue_that_waited_too_long_names_its_unique_key(
    make_settings: Callable[..., Settings], rows: Rows
) -> None:
    await rows.query("BEGIN")
    await rows.query("SELECT jsworker.enqueue('kind', unique_key => 'taken')")
    async with JobClient(make_settings()) as client:
        holds = "another transaction may hold unique key 'taken' of kind kind, or those of others"
        says = rf"did not answer within \d s: {holds}$"
        with pytest.raises(DatabaseUnavailable, match=says):
            await client.enqueue("kind", {}, unique_key="taken")
    await rows.query("ROLLBACK")


async def test_without_an_answer_each_call_says_so(
    make_settings: Callable[..., Settings], database_url: str
) -> None:
    async with (
        proxied(database_url) as (proxy, url),
        JobClient(make_settings(database_url=url, statement_timeout=0.5)) as client,
    ):
        await client.enqueue("kind", {})
        proxy.black_hole()
        calls = (client.enqueue("kind", {"n": n}) for n in range(20))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(answer, DatabaseUnavailable) for answer in answers), answers


async def test_a_shared_statement_is_written_in_the_context_of_no_request(
    settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    insert = enqueue.enqueue_many

    async def noted(*positional: Any, **rest: Any) -> Any:
        seen.append(request.get())
        return await insert(*positional, **rest)

    monkeypatch.setattr(enqueue, "enqueue_many", noted)
    async with JobClient(settings) as client:

        async def serve(number: int) -> None:
            request.set(f"request {number}")
            await client.enqueue("kind", {})

        await asyncio.gather(*(serve(number) for number in range(JOBS)))
    assert set(seen) == {"none"}
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == JOBS


async def test_a_kind_is_forgotten_once_its_jobs_are_inserted(client: JobClient, rows: Rows) -> None:
    """Producers may invent any number of kinds."""
    await rows.query("BEGIN")
    await rows.query("LOCK TABLE jsworker.jobs IN SHARE MODE")
    calls = [asyncio.create_task(client.enqueue(f"kind-{n % 20}", {})) for n in range(40)]

    async def shared() -> None:
        assert client._inserts._kinds

    await eventually(shared)
    for given_up in calls[::4]:
        given_up.cancel()
    await rows.query("COMMIT")
    await asyncio.gather(*calls, return_exceptions=True)
    await client._inserts.flush()
    assert not client._inserts._kinds
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") >= 30
