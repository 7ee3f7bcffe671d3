"""Values that a slow line cannot carry in one statement time-out, and the limit of each kind of value."""

import asyncio
import secrets
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.ownership.transitions import claim
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.processors import KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

LARGE = 3_000_000
PIECE_BYTES, PIECE_SECONDS = 65_536, 0.02
"""About three megabytes a second in each connection."""


def of_bytes(size: int) -> str:
    """Return text that PostgreSQL cannot compress by much."""
    return secrets.token_hex(size // 2)


async def test_jobs_with_large_payloads_checkpoints_and_results_pass_a_slow_line(
    make_settings: Callable[..., Settings], database_url: str, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        await job.save_checkpoint(job.payload["text"][: LARGE // 2])
        return job.payload

    limits = dict.fromkeys(("max_payload_bytes", "max_result_bytes", "max_checkpoint_bytes"), 2 * LARGE)
    slow = {"statement_timeout": 1.0, "heartbeat_interval": 3.0, **limits}
    payloads = [{"text": of_bytes(LARGE)} for _ in range(6)]
    async with JobClient(make_settings(statement_timeout=5.0, heartbeat_interval=6.0, **limits)) as client:
        jobs = await client.enqueue_many(KIND, payloads)
    async with proxied(database_url) as (proxy, url):
        running = await start(scripted(process), with_settings=make_settings(database_url=url, **slow))
        proxy.slow_down(PIECE_SECONDS, dribble_bytes=PIECE_BYTES)
        for job, payload in zip(jobs, payloads, strict=True):
            row = await rows.becomes(job.id, "completed", seconds=60)
            assert row["result"] == payload
            assert row["fencing_token"] == 1  # no claim was given back
        assert running.events.of("job.released") == []
        proxy.restore()
        await running.end()


async def test_after_an_unclear_claim_half_as_many_are_asked_for(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    all_have_come = asyncio.Event()
    take = claim.claim

    async def only_two_at_once(*arguments: Any, ids: Any, **rest: Any) -> Any:
        asked.append(len(ids))
        await all_have_come.wait()
        if len(ids) > 2 and not recovered:
            raise DatabaseUnavailable("the answer is too long for this line")
        return await take(*arguments, ids=ids, **rest)

    recovered = False
    monkeypatch.setattr(claim, "claim", only_two_at_once)
    jobs = await client.enqueue_many(KIND, [{}] * 8)
    await client.publish_pending()
    running = await start(scripted(echo))

    async def all_are_claimed() -> None:
        assert len(running.worker._context.in_flight.claiming) == len(jobs)

    await eventually(all_are_claimed)
    all_have_come.set()
    for job in jobs:
        await rows.becomes(job.id, "completed", seconds=60)
    assert max(asked) > 2
    after_unclear = [(before, after) for before, after in pairwise(asked) if before > 2]
    assert all(after <= before // 2 for before, after in after_unclear), asked
    [consumer] = running.worker._components.pipeline.consumers
    recovered = True

    async def grown() -> None:
        job = await client.enqueue(KIND, {})
        await rows.becomes(job.id, "completed")
        assert consumer._batches.limit == 500

    await eventually(grown)


async def test_a_job_that_is_lost_while_its_payload_comes_does_not_run(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, tried = claim.fetch_content, list[int]()

    async def slow(*arguments: Any, tries: int, **rest: Any) -> Any:
        tried.append(tries)
        if len(tried) == 2:
            await rows.take_back(job.id)
        if len(tried) <= 2:
            raise DatabaseUnavailable("it takes long")
        return await fetch(*arguments, tries=tries, **rest)

    monkeypatch.setattr(claim, "fetch_content", slow)
    gate = Gate()
    job = await client.enqueue(KIND, {"text": of_bytes(100_000)})
    running = await start(scripted(gate.process))
    [lost] = await running.events.told("job.lost")
    assert lost["job_id"] == str(job.id)
    assert tried in ([0, 1], [0, 1, 2])  # a heartbeat may tell it first
    assert gate._arrived.empty()
    assert job.id not in running.worker._context.in_flight


async def test_a_login_that_is_refused_while_a_payload_comes_is_no_error_of_the_job(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = claim.fetch_content

    async def refused_at_first(*arguments: Any, tries: int, **rest: Any) -> Any:
        if tries == 0:
            raise DatabaseRefused("PostgreSQL refused the login")
        return await fetch(*arguments, tries=tries, **rest)

    monkeypatch.setattr(claim, "fetch_content", refused_at_first)
    await start(scripted(echo))
    job = await client.enqueue(KIND, {"text": of_bytes(100_000)})
    row = await rows.becomes(job.id, "completed")
    assert (row["errors"], row["fencing_token"]) == (0, 1)


async def test_a_job_may_be_cancelled_while_its_payload_comes(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any, **__: Any) -> Any:
        raise DatabaseUnavailable("it takes long")

    monkeypatch.setattr(claim, "fetch_content", never)
    await start(scripted(echo))
    job = await client.enqueue(KIND, {"text": of_bytes(100_000)})
    await rows.becomes(job.id, "processing")
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")


async def test_each_limit_has_its_own_name(
    make_settings: Callable[..., Settings], client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> Any:
        if not job.payload:
            return "x" * 20
        await job.save_checkpoint("y" * job.payload["length"])
        return None

    limited = make_settings(max_payload_bytes=1000, max_result_bytes=21, max_checkpoint_bytes=12)
    await start(scripted(process, backoff=LATER, max_attempts=2), with_settings=limited)
    result = await client.enqueue(KIND, {})
    fits, too_large = await client.enqueue_many(KIND, [{"length": 10}, {"length": 11}])
    row = await rows.becomes(result.id, "failed")
    assert (row["failure_reason"], row["last_error"]) == (
        "result",
        "result of 22 bytes exceeds JSWORKER_MAX_RESULT_BYTES=21",
    )
    await rows.becomes(fits.id, "completed")
    row = await rows.becomes(too_large.id, "scheduled")  # an error of the job's code like any other
    assert "checkpoint of 13 bytes exceeds JSWORKER_MAX_CHECKPOINT_BYTES=12" in row["last_error"]
    assert row["checkpoint"] is None
