"""Jobs that a dead owner had claimed and not begun: no stall of theirs, as far as their rows can tell."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset, settle
from jsworker.ownership.transitions.claim import claim
from jsworker.ownership.transitions.reset import Reset, TakenBack

from .rows import KIND, LIMITS, OTHER_WORKER, WORKER, Sql, ago, change_job, counters, insert_job, read_job

SLOTS = 2
DIED = 60.0
"""Seconds ago."""
Rule = Callable[[Database], Awaitable[TakenBack]]


async def by_silence(database: Database) -> TakenBack:
    late = await reset.look_for_late(database, heartbeat_interval=1.0, limit=500)
    return await reset.reset_stale(
        database, worker_id=OTHER_WORKER, stale=late.suspects, reason="silent", counted=True
    )


async def by_witnesses(database: Database) -> TakenBack:
    late = await reset.look_for_late(database, heartbeat_interval=1.0, limit=500)
    return await reset.reset_crashed(database, worker_id=OTHER_WORKER, crashed=late.suspects, reason="silent")


async def by_evidence(database: Database) -> TakenBack:
    return await reset.reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="it is gone")


every_rule = pytest.mark.parametrize("take_back", [by_silence, by_witnesses, by_evidence])


@pytest.fixture(autouse=True)
def _registered(sql: Sql) -> None:
    sql.execute(
        "INSERT INTO jsworker.workers"
        " (id, hostname, kinds, concurrency, version, pid, heartbeat_interval, state)"
        " VALUES (%s, 'alpha', '{}', %s, '1', 1, '5 s', 'running')",
        [WORKER, SLOTS],
    )


def held(sql: Sql, *, claimed: float, heard: float | None = None, **columns: Any) -> UUID:
    """Insert a job of the dead worker: seconds ago at which it was claimed, and last heard of."""
    times = {"claimed_at": ago(claimed), "last_activity_at": ago(claimed if heard is None else heard)}
    return insert_job(sql, "processing", **times, **columns)


def counts(taken: TakenBack) -> dict[UUID, tuple[str, bool, int]]:
    def fate(one: Reset) -> tuple[str, bool, int]:
        return one.status, one.counted, one.stalls

    return {one.id: fate(one) for one in taken.resets}


@every_rule
async def test_what_was_claimed_last_by_an_owner_without_a_free_slot_is_not_counted(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    running = [held(sql, claimed=DIED + 300, heard=DIED + 3) for _ in range(SLOTS)]
    in_line = [held(sql, claimed=DIED + place / 10) for place in range(5)]
    stalled_before = held(sql, claimed=DIED, stalls=1, attempts=2)
    waited_long = held(sql, claimed=DIED + 20)
    taken_back_before = held(sql, claimed=DIED, cleared=True, clear_reason="its owner died")
    assert counts(await take_back(database)) == {
        **dict.fromkeys([*running, waited_long, taken_back_before], ("queued", True, 1)),
        **dict.fromkeys(in_line, ("queued", False, 0)),
        stalled_before: ("queued", False, 1),
    }
    assert {counters(read_job(sql, job_id)) for job_id in in_line} == {(0, 0, 0)}
    assert all(read_job(sql, job_id)["cleared"] for job_id in in_line)


@every_rule
async def test_an_owner_with_a_free_slot_had_begun_them_all(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    jobs = [held(sql, claimed=DIED) for _ in range(SLOTS)]
    assert counts(await take_back(database)) == dict.fromkeys(jobs, ("queued", True, 1))


@pytest.mark.parametrize("take_back", [by_silence, by_witnesses])
async def test_an_owner_that_was_told_to_stop_was_not_killed_by_its_jobs(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    sql.execute("UPDATE jsworker.workers SET state = 'draining'")
    jobs = [held(sql, claimed=DIED, cleared=True, clear_reason="its owner died") for _ in range(SLOTS)]
    assert counts(await take_back(database)) == dict.fromkeys(jobs, ("queued", False, 0))


@every_rule
async def test_an_owner_that_nobody_knows_tells_nothing(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    sql.execute("DELETE FROM jsworker.workers")
    jobs = [held(sql, claimed=DIED) for _ in range(SLOTS + 2)]
    assert counts(await take_back(database)) == dict.fromkeys(jobs, ("queued", True, 1))


@every_rule
async def test_a_job_that_kills_its_process_at_once_is_believed_once_and_ends(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    """Each time it is the last that its owner claimed, beside others that fill the slots."""
    poison = insert_job(sql)
    counted: list[bool] = []
    while read_job(sql, poison)["status"] in ("queued", "scheduled"):
        change_job(sql, poison, status="queued")  # its back-off is over
        for _ in range(SLOTS):
            held(sql, claimed=DIED + 300, heard=DIED)
        [claimed], _ = await claim(database, worker_id=WORKER, kind=KIND, ids=[poison], limits=LIMITS)
        change_job(sql, poison, claimed_at=ago(DIED), last_activity_at=ago(DIED))
        if claimed.notes_beginning:
            change_job(sql, poison, progress_at=ago(DIED))
        counted.append(counts(await take_back(database))[poison][1])
        assert len(counted) < 10
    assert counted == [False, *[True] * LIMITS.max_stalls]
    job = read_job(sql, poison)
    assert (job["status"], job["failure_reason"], counters(job)) == ("failed", "stalled", (3, 0, 3))


@every_rule
@pytest.mark.parametrize(("stalls", "most"), [(2, 3), (1, 2), (0, 1), (7, 100)])
async def test_what_runs_alone_is_counted_only_if_its_row_tells_that_it_has_begun(
    database: Database, sql: Sql, take_back: Rule, stalls: int, most: int
) -> None:
    """However many job slots were free; progress of an earlier run is no beginning of this one."""
    counts_so_far = {"stalls": stalls, "max_stalls": most, "attempts": stalls + 1}
    columns: dict[str, Any] = {**counts_so_far, "cleared": True, "clear_reason": "killed"}
    never = held(sql, claimed=DIED, **columns)
    earlier = held(sql, claimed=DIED, progress_at=ago(DIED + 1), **columns)
    begun = held(sql, claimed=DIED, progress_at=ago(DIED), **columns)
    ends = ("failed", True, stalls + 1) if stalls + 1 == most else ("scheduled", True, stalls + 1)
    again = ("queued", False, stalls)
    assert counts(await take_back(database)) == {never: again, earlier: again, begun: ends}


@every_rule
async def test_an_error_of_its_own_lets_it_be_believed_anew(
    database: Database, sql: Sql, take_back: Rule
) -> None:
    job_id = held(sql, claimed=DIED, cleared=True, clear_reason="its owner died")
    failure = settle.Failure(job_id, 1, "broken", None, 0.0)
    assert await settle.fail(database, worker_id=WORKER, runs=[failure]) == [settle.Settled.SCHEDULED]
    change_job(sql, job_id, status="queued")
    await claim(database, worker_id=WORKER, kind=KIND, ids=[job_id], limits=LIMITS)
    change_job(sql, job_id, claimed_at=ago(DIED), last_activity_at=ago(DIED))
    for _ in range(SLOTS):
        held(sql, claimed=DIED + 300, heard=DIED)
    assert counts(await take_back(database))[job_id] == ("queued", False, 0)
    assert counters(read_job(sql, job_id)) == (1, 1, 0)


async def test_what_had_not_begun_is_known_still_when_others_were_taken_back_first(
    database: Database, database_url: str, sql: Sql
) -> None:
    """The first look skips a row that the dead one's last statement has locked."""
    running = [held(sql, claimed=DIED + 300, heard=DIED + 3) for _ in range(SLOTS)]
    locked, free = [held(sql, claimed=DIED) for _ in range(2)]
    in_line: reset.NotBegun = {}
    take_back = partial(
        reset.reset_dead, database, worker_id=OTHER_WORKER, owner=WORKER, reason="it is gone", in_line=in_line
    )
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [locked])
        assert counts(await take_back()) == {
            **dict.fromkeys(running, ("queued", True, 1)),
            free: ("queued", False, 0),
        }
        holder.rollback()
    assert counts(await take_back()) == {locked: ("queued", False, 0)}
