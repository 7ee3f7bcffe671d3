"""RESET: where a job goes that is taken back by any of the four rules, and what is counted."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import product
from typing import Any
from uuid import UUID

import pytest

from jsworker.ownership.database import Database
from jsworker.ownership.transitions import heartbeat, reset
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.reset import Reset, TakenBack

from .calls import reset_stale, suspect
from .rows import (
    KIND,
    NOW,
    OTHER_WORKER,
    WORKER,
    Sql,
    age,
    ago,
    counters,
    insert_job,
    read_events,
    read_job,
    read_value,
)

Rule = Callable[[Database, Sql, list[UUID], bool], Awaitable[TakenBack]]


async def by_stale(database: Database, sql: Sql, ids: list[UUID], counted: bool) -> TakenBack:  # noqa: FBT001 -- as in the table
    seen = [suspect(sql, job_id) for job_id in ids]
    take = partial(reset.reset_stale, database, worker_id=OTHER_WORKER, reason="silent")
    return await take(stale=seen, counted=counted)


async def by_witnesses(database: Database, sql: Sql, ids: list[UUID], counted: bool) -> TakenBack:  # noqa: FBT001 -- as in the table
    seen = [suspect(sql, job_id) for job_id in ids]
    take = partial(reset.reset_crashed, database, worker_id=OTHER_WORKER, reason="silent")
    return await take(crashed=seen, counted=counted)


async def by_evidence(database: Database, _: Sql, _ids: list[UUID], counted: bool) -> TakenBack:  # noqa: FBT001 -- as in the table
    take = partial(reset.reset_dead, database, worker_id=OTHER_WORKER, reason="silent")
    return await take(owner=WORKER, counted=counted)


async def by_operator(database: Database, _: Sql, ids: list[UUID], _counted: bool) -> TakenBack:  # noqa: FBT001 -- as in the table
    take = partial(reset.reset_by_operator, database, reason="silent")
    return await take(seen=[(job_id, 1) for job_id in ids])


RULES: dict[str, Rule] = {
    "stale": by_stale,
    "crashed": by_witnesses,
    "dead": by_evidence,
    "operator": by_operator,
}
COUNTING = {cause: rule for cause, rule in RULES.items() if cause != "operator"}
LADDER = [
    *product(COUNTING, [True, False], [True, False], [0, 1, 2], [1, 2, 3]),
    *product(["operator"], [False], [True, False], [0, 1, 2], [1, 2, 3]),
]


def destination(*, counted: bool, cancel: bool, stalls: int, max_stalls: int) -> str:
    """Return where the protocol's ladder leads."""
    if cancel:
        return "cancelled"
    if not counted:
        return "queued"
    if stalls + 1 >= max_stalls:
        return "failed"
    return "scheduled" if stalls else "queued"


@pytest.mark.parametrize(("cause", "counted", "cancel", "stalls", "max_stalls"), LADDER)
async def test_the_ladder(
    database: Database,
    sql: Sql,
    *,
    cause: str,
    counted: bool,
    cancel: bool,
    stalls: int,
    max_stalls: int,
) -> None:
    row = {"stalls": stalls, "errors": 2, "attempts": 3 + stalls, "max_stalls": max_stalls}
    times = {"last_activity_at": ago(60), "queued_at": ago(90), "progress_at": NOW}
    job_id = insert_job(sql, "processing", cancel_requested=cancel, **row, **times)
    taken = await RULES[cause](database, sql, [job_id], counted)
    job = read_job(sql, job_id)
    status = destination(counted=counted, cancel=cancel, stalls=stalls, max_stalls=max_stalls)
    now_stalled = stalls + counted
    assert (job["status"], counters(job)) == (status, (2 + now_stalled, 2, now_stalled))
    assert (job["worker_id"], job["last_activity_at"], job["fencing_token"]) == (None, None, 1)
    queued = status == "queued"
    assert (job["dispatch"], job["needs_publish"]) == (1 + queued, queued)
    assert (age(sql, job["queued_at"]) < 80) is queued
    assert job["cleared"] is (status in ("queued", "scheduled"))
    assert job["clear_reason"] == "silent"
    assert job["failure_reason"] == ("stalled" if status == "failed" else None)
    assert (job["finished_at"] is not None) is (status in ("failed", "cancelled"))
    back = Reset(job_id, KIND, status, 1, job["dispatch"], WORKER, counted=counted, stalls=now_stalled)
    assert (taken.resets, taken.refused) == ([back], {})
    detail = {
        "cause": cause,
        "reason": "silent",
        "owner": WORKER,
        "to": status,
        "counted": counted,
        "stalls": now_stalled,
        "dispatch": job["dispatch"],
    }
    (event,) = read_events(sql, job_id)
    assert event == {
        "event": "reset",
        "worker_id": None if cause == "operator" else OTHER_WORKER,
        "fencing_token": 1,
        "error": None,
        "detail": detail,
    }


@pytest.mark.parametrize("rule", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize(("stalls", "base"), [(1, 5), (2, 10), (4, 40), (30, 600)])
async def test_the_back_off_after_a_stall_doubles_up_to_ten_minutes(
    database: Database, sql: Sql, rule: Rule, stalls: int, base: float
) -> None:
    row: dict[str, Any] = {"stalls": stalls, "attempts": stalls + 1, "max_stalls": 99}
    row |= {"last_activity_at": ago(60), "progress_at": NOW}
    ids = [insert_job(sql, "processing", **row) for _ in range(8)]
    await rule(database, sql, ids, True)
    delays = [-age(sql, read_job(sql, job_id)["run_at"]) for job_id in ids]
    assert all(0.8 * base - 5 < delay <= 1.2 * base for delay in delays)
    assert len(set(delays)) == len(delays)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_one_bad_row_keeps_no_neighbour_back(database: Database, sql: Sql, rule: Rule) -> None:
    good = [insert_job(sql, "processing", last_activity_at=ago(60)) for _ in range(6)]
    bad = [insert_job(sql, "processing", last_activity_at=ago(60), dispatch=2**53) for _ in range(2)]
    before = [read_job(sql, job_id) for job_id in bad]
    taken = await rule(database, sql, [*good[:3], *bad, *good[3:]], True)
    assert {one.id for one in taken.resets} == set(good)
    assert taken.refused.keys() == set(bad)
    assert {read_job(sql, job_id)["status"] for job_id in good} == {"queued"}
    assert [read_job(sql, job_id) for job_id in bad] == before


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_more_than_a_batch(database: Database, sql: Sql, rule: Rule) -> None:
    ids = [new_job_id() for _ in range(1203)]
    insert_job(sql, "processing", id=ids[0], last_activity_at=ago(60))
    sql.execute(
        """
        INSERT INTO jsworker.jobs (id, kind, payload, status, worker_id, fencing_token, attempts, max_stalls,
          claimed_at, last_activity_at, stale_after, crash_after, dispatch)
        SELECT unnest(%s::uuid[]), kind, payload, status, worker_id, fencing_token, attempts, max_stalls,
          claimed_at, last_activity_at, stale_after, crash_after, dispatch
        FROM jsworker.jobs
        """,
        [ids[1:]],
    )
    taken = await rule(database, sql, ids, False)
    assert {one.id for one in taken.resets} == set(ids)
    assert len(taken.resets) == len(ids)
    query = "SELECT count(*) FROM jsworker.jobs WHERE status = 'queued' AND attempts = 0"
    assert read_value(sql, query) == len(ids)
    assert read_value(sql, "SELECT count(*) FROM jsworker.job_events") == len(ids)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
async def test_nothing_to_take(database: Database, sql: Sql, rule: Rule) -> None:
    assert await rule(database, sql, [], True) == TakenBack([], {})


async def test_a_batch_takes_what_it_may(database: Database, sql: Sql) -> None:
    stale = insert_job(sql, "processing", last_activity_at=ago(60))
    renewed = insert_job(sql, "processing", last_activity_at=ago(60))
    seen = [suspect(sql, stale), suspect(sql, renewed)]
    await heartbeat.heartbeat(database, worker_id=WORKER, in_flight=[(renewed, 1)])
    assert [one.id for one in await reset_stale(database, *seen)] == [stale]
    taken = await reset.reset_crashed(database, worker_id=OTHER_WORKER, crashed=seen, reason="r")
    assert taken.resets == []
    assert read_job(sql, renewed)["status"] == "processing"


class TestDeadOwner:
    async def test_everything_of_it_and_nothing_of_another(self, database: Database, sql: Sql) -> None:
        """Fresh, without any threshold, at whatever token: the id never lives again."""
        dead = [
            insert_job(sql, "processing"),
            insert_job(sql, "processing", stale_after=None, crash_after=None),
            insert_job(sql, "processing", fencing_token=7, kind="other-kind"),
        ]
        similar = [f"{WORKER}x", WORKER[:-1], WORKER.replace("-", "_"), "%", OTHER_WORKER]
        others = {insert_job(sql, "processing", worker_id=owner): owner for owner in similar}
        taken = await reset.reset_dead(database, worker_id=OTHER_WORKER, owner=WORKER, reason="killed")
        assert {(one.id, one.counted) for one in taken.resets} == {(job_id, True) for job_id in dead}
        assert {job_id: read_job(sql, job_id)["worker_id"] for job_id in others} == others

    @pytest.mark.parametrize(("counted", "cleared"), [(True, False), (False, True)])
    async def test_only_culprits_count_when_there_are_any(
        self, database: Database, sql: Sql, *, counted: bool, cleared: bool
    ) -> None:
        row = {"stalls": 1, "attempts": 2, "max_stalls": 2, "cleared": cleared}
        culprit, *innocent = [insert_job(sql, "processing", **row) for _ in range(4)]
        taken = await reset.reset_dead(
            database,
            worker_id=OTHER_WORKER,
            owner=WORKER,
            reason="killed",
            counted=counted,
            culprits=[culprit, new_job_id()],
        )
        assert {one.id: (one.status, one.counted, one.stalls) for one in taken.resets} == {
            culprit: ("failed", True, 2),
            **dict.fromkeys(innocent, ("queued", False, 1)),
        }
        assert counters(read_job(sql, culprit)) == (2, 0, 2)
        assert {counters(read_job(sql, job_id)) for job_id in innocent} == {(1, 0, 1)}

    async def test_a_culprit_that_need_not_be_one_counts_only_if_it_was_taken_back_before(
        self, database: Database, sql: Sql
    ) -> None:
        first, again = [insert_job(sql, "processing", cleared=cleared) for cleared in (False, True)]
        taken = await reset.reset_dead(
            database,
            worker_id=OTHER_WORKER,
            owner=WORKER,
            reason="killed",
            counted=False,
            culprits=[first, again],
        )
        assert {one.id: one.counted for one in taken.resets} == {first: False, again: True}

    async def test_a_second_time_there_is_nothing(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "processing")
        take = partial(reset.reset_dead, database, worker_id=OTHER_WORKER, owner=WORKER, reason="killed")
        assert len((await take()).resets) == 1
        before: dict[str, Any] = read_job(sql, job_id)
        assert await take() == TakenBack([], {})
        assert read_job(sql, job_id) == before


async def test_what_operators_take_back_is_handed_to_one_teller_each(database: Database, sql: Sql) -> None:
    ids = [insert_job(sql, "processing") for _ in range(20)]
    taken = await by_operator(database, sql, ids, False)
    parts = await asyncio.gather(*(reset.take_unreported(database) for _ in range(4)))
    assert sorted((each for part in parts for each in part), key=lambda each: each.id) == sorted(
        taken.resets, key=lambda each: each.id
    )
    assert await reset.take_unreported(database) == []


@pytest.mark.parametrize("cause", COUNTING)
async def test_what_workers_take_back_they_tell_themselves(database: Database, sql: Sql, cause: str) -> None:
    job_id = insert_job(sql, "processing", last_activity_at=ago(60))
    assert len((await RULES[cause](database, sql, [job_id], True)).resets) == 1
    assert await reset.take_unreported(database) == []
