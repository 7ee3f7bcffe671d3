"""The reads of those who wait for results: which jobs they find, and how much of them."""

from uuid import UUID, uuid4

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.queries import results
from jsworker.ownership.queries.results import JobEnd, live_kind, read_ends, read_whole_end

from .rows import KIND, Sql, insert_job

LARGE = "to_jsonb((SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, 4000)))"


def complete_with(sql: Sql, expression: str) -> UUID:
    job_id = insert_job(sql)
    ended = "status = 'completed', attempts = 1, finished_at = clock_timestamp()"
    statement = f"UPDATE jsworker.jobs SET {ended}, result = {expression} WHERE id = %s"  # noqa: S608 -- constants
    sql.execute(statement.encode(), [job_id])
    return job_id


@pytest.mark.parametrize("status", ["scheduled", "queued", "processing"])
async def test_one_that_lives_is_not_among_the_ends(database: Database, sql: Sql, status: str) -> None:
    job_id = insert_job(sql, status)
    assert await read_ends(database, [job_id]) == []
    assert await live_kind(database, job_id) == KIND
    assert await read_whole_end(database, JobEnd(job_id, "completed"), tries=0) == JobEnd(job_id, None)


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
async def test_one_that_has_ended_is(database: Database, sql: Sql, status: str) -> None:
    job_id = insert_job(sql, status, last_error="ValueError: x")
    [end] = await read_ends(database, [job_id])
    reason = "attempts" if status == "failed" else None
    assert end == JobEnd(job_id, status, None, None, "ValueError: x", reason, end.kind)
    assert await live_kind(database, job_id) is None
    assert await read_whole_end(database, end, tries=0) == end


async def test_one_that_is_not_there_has_no_status(database: Database, sql: Sql) -> None:
    there, missing = insert_job(sql, "completed"), uuid4()
    ends = {end.id: end.status for end in await read_ends(database, [missing, there])}
    assert ends == {missing: None, there: "completed"}
    assert await live_kind(database, missing) is None


async def test_a_long_result_comes_alone(database: Database, sql: Sql) -> None:
    long, short = complete_with(sql, LARGE), complete_with(sql, "'[1, null]'")
    ends = {end.id: end for end in await read_ends(database, [long, short])}
    assert (ends[short].result, ends[short].is_cut) == ([1, None], False)
    assert (ends[long].result, ends[long].is_cut) == (None, True)
    whole = await read_whole_end(database, ends[long], tries=3)
    assert len(whole.result) == 144_000


async def test_so_does_one_that_is_short_only_as_it_is_stored(database: Database, sql: Sql) -> None:
    long, null = complete_with(sql, "to_jsonb(repeat('a', 65535))"), complete_with(sql, "'null'")
    short = complete_with(sql, "to_jsonb(repeat('a', 65534))")
    ends = {end.id: end for end in await read_ends(database, [long, null, short])}
    assert (ends[long].result, ends[long].is_cut) == (None, True)
    assert ends[long].size == 65_537
    assert (ends[null].result, ends[null].is_cut) == (None, False)
    assert (ends[short].result, ends[short].is_cut) == ("a" * 65_534, False)
    whole = await read_whole_end(database, ends[long], tries=0)
    assert whole.result == "a" * 65_535


async def test_an_answer_has_a_limit(database: Database, sql: Sql) -> None:
    ids = [insert_job(sql, "completed") for _ in range(results.MOST_ENDS + 1)]
    assert len(await read_ends(database, ids)) == results.MOST_ENDS
    assert len(await read_ends(database, ids, most=3)) == 3


async def test_numbers_and_depths_that_python_cannot_hold(database: Database, sql: Sql) -> None:
    job_id = complete_with(sql, "to_jsonb(('1' || repeat('0', 5000))::numeric)")
    other = complete_with(sql, "(repeat('[', 3000) || repeat(']', 3000))::jsonb")
    ends = {end.id: end for end in await read_ends(database, [job_id, other])}
    assert ends[job_id].result == "1" + "0" * 5000
    assert ends[other].status == "completed"
