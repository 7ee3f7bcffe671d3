"""STEP: kept once under the fence; late, twice, beside a reset, and gone with its job."""

import asyncio
import secrets
from typing import Any
from uuid import UUID

import pytest

from jsworker.core.errors import OwnershipLost
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import prune, reset
from jsworker.ownership.transitions.prune import Ended
from jsworker.ownership.transitions.steps import FoundStep, find_step, keep_step, steps_of

from .calls import claimed, complete, reset_stale, retry, suspect
from .rows import (
    OTHER_WORKER,
    WORKER,
    Sql,
    age,
    ago,
    change_job,
    event_names,
    insert_job,
    read_events,
    read_job,
    read_value,
)
from .winner import Winner


async def keep(
    database: Database,
    job_id: UUID,
    name: str = "charge",
    result: str | None = '{"paid": 5}',
    *,
    token: int = 1,
    worker_id: str = WORKER,
    sleeps: float | None = None,
) -> bool:
    held = job_id, token
    return await keep_step(database, worker_id=worker_id, held=held, name=name, result=result, sleeps=sleeps)


async def find(
    database: Database, job_id: UUID, name: str = "charge", *, token: int = 1, worker_id: str = WORKER
) -> FoundStep:
    return await find_step(database, worker_id=worker_id, held=(job_id, token), name=name)


async def test_what_is_kept_is_found(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing", last_activity_at=ago(20))
    assert await find(database, job_id) == FoundStep(False, None, None, 0)
    assert await keep(database, job_id) is True
    assert await find(database, job_id) == FoundStep(True, '{"paid": 5}', None, 1)
    assert await find(database, job_id, "another") == FoundStep(False, None, None, 1)
    [event] = read_events(sql, job_id)
    assert (event["event"], event["worker_id"], event["fencing_token"]) == ("step", WORKER, 1)
    assert event["detail"] == {"step": "charge"}
    job = read_job(sql, job_id)
    assert max(age(sql, job["last_activity_at"]), age(sql, job["progress_at"])) < 15


async def test_a_step_that_returned_nothing_is_done(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await keep(database, job_id, result=None) is True
    assert await find(database, job_id) == FoundStep(True, None, None, 1)


async def test_kept_again_after_a_lost_answer_the_first_result_stays(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await keep(database, job_id, result="1") is True
    assert await keep(database, job_id, result="2") is False
    assert (await find(database, job_id)).result == "1"
    assert event_names(sql, job_id) == ["step"]


async def test_a_later_run_finds_it_and_the_zombie_keeps_nothing(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    await keep(database, job_id)
    change_job(sql, job_id, last_activity_at=ago(60))
    await reset_stale(database, suspect(sql, job_id))
    [again] = await claimed(database, job_id, worker_id=OTHER_WORKER)
    assert (await find(database, job_id, token=again.fencing_token, worker_id=OTHER_WORKER)).is_done
    before = read_job(sql, job_id)
    for _ in range(2):
        with pytest.raises(OwnershipLost):
            await keep(database, job_id, "ship")
    with pytest.raises(OwnershipLost):
        await find(database, job_id)
    assert read_job(sql, job_id) == before
    assert [step["name"] for step in await steps_of(database, job_id)] == ["charge"]
    rejected = [event for event in read_events(sql, job_id) if event["event"] == "rejected"]
    assert [(event["fencing_token"], event["detail"]["write"]) for event in rejected] == [(1, "step")]


@pytest.mark.parametrize("wins", ["resets", "completes", "fails", "releases"])
async def test_behind_the_lock_of_who_ended_the_run_nothing_is_kept(
    database: Database, sql: Sql, winner: Winner, running: UUID, wins: str
) -> None:
    getattr(winner, wins)(running)
    late = asyncio.create_task(keep(database, running))
    await winner.blocks()
    winner.commit()
    with pytest.raises(OwnershipLost):
        await late
    assert await steps_of(database, running) == []


async def test_who_resets_beside_a_step_that_is_being_kept_finds_its_owner_alive(
    database: Database, sql: Sql, winner: Winner, running: UUID
) -> None:
    """The reset of a row that is just being written skips it, and then its last activity is another."""
    seen = suspect(sql, running)
    winner.keeps_step(running, "charge", "1")
    assert await reset_stale(database, seen) == []
    winner.commit()
    assert await reset_stale(database, seen) == []
    assert (await find(database, running)).is_done


async def test_a_twin_of_the_same_run_waits_and_gets_the_first_result(
    database: Database, sql: Sql, winner: Winner
) -> None:
    job_id = insert_job(sql, "processing")
    winner.keeps_step(job_id, "charge", "1")
    twin = asyncio.create_task(keep(database, job_id, result="2"))
    await winner.blocks()
    winner.commit()
    assert await twin is False
    assert (await find(database, job_id)).result == "1"
    assert event_names(sql, job_id) == ["step"]


async def test_a_step_that_was_rolled_back_is_kept_by_its_twin(
    database: Database, sql: Sql, winner: Winner
) -> None:
    job_id = insert_job(sql, "processing")
    winner.keeps_step(job_id, "charge", "1")
    twin = asyncio.create_task(keep(database, job_id, result="2"))
    await winner.blocks()
    winner.rollback()
    assert await twin is True
    assert (await find(database, job_id)).result == "2"


async def test_a_sleep_tells_how_long_it_lasts(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await keep(database, job_id, "cool-off", None, sleeps=3600.0) is True
    found = await find(database, job_id, "cool-off")
    assert found.sleeps is not None
    assert 3500 < found.sleeps <= 3600
    sql.execute("UPDATE jsworker.job_steps SET sleeps_until = clock_timestamp() - interval '5 s'")
    found = await find(database, job_id, "cool-off")
    assert found.sleeps is not None
    assert found.sleeps < 0
    [event] = read_events(sql, job_id)
    assert (event["event"], event["detail"]["step"]) == ("sleep", "cool-off")
    assert event["detail"]["until"].startswith("20")


async def test_steps_outlive_a_reset_by_hand_and_a_retry(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    await keep(database, job_id)
    await reset.reset_by_operator(database, seen=[(job_id, 1)], reason="stuck")
    assert len(await steps_of(database, job_id)) == 1
    failed = insert_job(sql, "failed")
    sql.execute("INSERT INTO jsworker.job_steps (job_id, name, fencing_token) VALUES (%s, 'a', 1)", [failed])
    await retry(database, failed)
    assert len(await steps_of(database, failed)) == 1


async def test_they_are_pruned_with_their_job(database: Database, sql: Sql) -> None:
    old, young = insert_job(sql, "processing"), insert_job(sql, "processing")
    for job_id in (old, young):
        await keep(database, job_id)
        await complete(database, job_id)
    sql.execute("UPDATE jsworker.jobs SET finished_at = now() - interval '1 day' WHERE id = %s", [old])
    before = await prune.cutoff(database, older_than=3600)
    assert (await prune.prune(database, Ended(before), since=None, limit=10)).jobs == 1
    assert await steps_of(database, old) == []
    assert len(await steps_of(database, young)) == 1


async def test_a_listing_leaves_long_results_out(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    noise = secrets.token_hex(50_000)  # hardly to be compressed
    await keep(database, job_id, "long", f'"{noise}"')
    await keep(database, job_id, "compressed", f'"{"a" * 16_383}"')
    await keep(database, job_id, "short", "[1]")
    await keep(database, job_id, "not too long", f'"{"a" * 16_382}"')
    long, compressed, short, not_too_long = await steps_of(database, job_id)
    assert (long["name"], long["result"], long["stored_bytes"] > 16384) == ("long", None, True)
    assert (compressed["name"], compressed["result"]) == ("compressed", None)
    assert 0 < compressed["stored_bytes"] < 16_384
    assert (short["name"], short["result"], short["fencing_token"]) == ("short", [1], 1)
    assert not_too_long["result"] == "a" * 16_382
    assert (await find(database, job_id, "long")).result == f'"{noise}"'


@pytest.mark.parametrize(
    "values", [{"name": ""}, {"name": "x" * 256}, {"name": "nul\0"}, {"result": "{"}, {"sleeps": 1e15}]
)
async def test_what_no_step_may_hold_is_refused_by_postgresql_too(
    database: Database, sql: Sql, values: dict[str, Any]
) -> None:
    job_id = insert_job(sql, "processing")
    before = read_job(sql, job_id)
    with pytest.raises(RowRefused):
        await keep(database, job_id, **values)
    assert read_job(sql, job_id) == before
    assert read_value(sql, "SELECT count(*) FROM jsworker.job_steps") == 0
