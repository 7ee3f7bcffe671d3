"""COMPLETE with child jobs: both are committed, or neither, whatever happens around it."""

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text

from jsworker.core.errors import DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import child_jobs, control, settle
from jsworker.ownership.transitions.child_jobs import complete_with_child_jobs
from jsworker.ownership.transitions.enqueue import ChildJob, JobTerms, NewJob, new_job_id
from jsworker.ownership.transitions.settle import Completion, Refusals, Settled
from tests.support.proxy import proxied

from .calls import complete, opened
from .polling import eventually
from .rows import KIND, WORKER, Sql, change_job, insert_job, read_events, read_job, read_value, waits

CHILD = "child"


def child(number: int = 0, *, kind: str = CHILD, **fields: Any) -> ChildJob:
    return ChildJob(kind, NewJob(new_job_id(), f'{{"n": {number}}}', **fields))


async def settled(
    database: Database, job_id: UUID, *children: ChildJob, token: int = 1, **how: Any
) -> Settled:
    runs = [Completion(job_id, token, '"done"', children)]
    return (await complete_with_child_jobs(database, worker_id=WORKER, runs=runs, **how))[0]


def numbers(sql: Sql, kind: str = CHILD) -> list[int]:
    rows = sql.execute(
        "SELECT CAST(payload ->> 'n' AS int) AS n FROM jsworker.jobs WHERE kind = %s ORDER BY 1", [kind]
    )
    return [row["n"] for row in rows]


def noted(sql: Sql, job_id: UUID) -> list[UUID]:
    """Return the children that a timeline names, as many as it says there are."""
    [event] = read_events(sql, job_id)
    ids = child_jobs.noted_child_jobs(event["detail"])
    assert event["detail"]["jobs"] == len(ids)
    return ids


async def test_both_are_one_commit(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    children = [child(n) for n in range(3)] + [
        child(3, kind="other", delay=3600.0, priority=0, limit_key="k", max_attempts=2, traceparent="t")
    ]
    assert await settled(database, job_id, *children) is Settled.COMPLETED
    assert read_job(sql, job_id)["result"] == "done"
    written_by = "SELECT count(DISTINCT CAST(xmin AS text)) AS found FROM jsworker.jobs"
    assert read_value(sql, written_by) == 1
    rows = [read_job(sql, each.job.id) for each in children]
    assert [row["status"] for row in rows] == ["queued"] * 3 + ["scheduled"]
    assert [row["needs_publish"] for row in rows] == [True] * 3 + [False]
    assert [row["queued_at"] for row in rows[:3]] == sorted(row["queued_at"] for row in rows[:3])
    last = {name: rows[3][name] for name in ("priority", "limit_key", "max_attempts", "traceparent")}
    assert last == {"priority": 0, "limit_key": "k", "max_attempts": 2, "traceparent": "t"}


async def test_the_timeline_of_a_job_names_its_children(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    children = [child(n) for n in range(150)] + [child(kind=f"kind-{n}") for n in range(5)]
    for tries in range(2):
        assert await settled(database, job_id, *children, tries=tries) is Settled.COMPLETED
    [event] = read_events(sql, job_id)
    assert (event["event"], event["worker_id"], event["fencing_token"]) == ("child_jobs", WORKER, 1)
    detail = event["detail"]
    assert (detail["jobs"], detail["kinds"]) == (155, "child, kind-0, kind-1, kind-2, kind-3, …")
    assert child_jobs.noted_child_jobs(detail) == [each.job.id for each in children[:100]]
    others: list[Any] = [None, [], {}, {"ids": 7}, {"ids": [None, {}, "no id"]}]
    for other in others:
        assert child_jobs.noted_child_jobs(other) == []


async def test_children_with_a_statement_each_get_time_for_their_round_trips(
    database_url: str, sql: Sql
) -> None:
    job_id, terms = insert_job(sql, "processing"), JobTerms(debounce=60.0)
    children = [child(n, unique_key=f"key {n}", terms=terms) for n in range(150)]
    async with proxied(database_url) as (proxy, url), opened(url, statement_timeout=1.0) as slow:
        await slow.run(text("SELECT 1"))
        proxy.slow_down(0.005)  # each way: a second and a half in all
        assert await settled(slow, job_id, *children, tries=2) is Settled.COMPLETED
    assert numbers(sql) == [*range(150)]


@pytest.mark.parametrize("wait", [True, False])
async def test_a_lost_job_leaves_no_child(database: Database, sql: Sql, *, wait: bool) -> None:
    job_id = insert_job(sql, "processing")
    change_job(sql, job_id, fencing_token=2)
    assert await settled(database, job_id, child(), wait=wait) is Settled.LOST
    assert numbers(sql) == []
    assert read_job(sql, job_id)["status"] == "processing"


async def test_a_second_try_finds_what_the_first_has_written(database: Database, sql: Sql) -> None:
    job_id, one = insert_job(sql, "processing"), child()
    for tries in range(2):
        assert await settled(database, job_id, one, tries=tries) is Settled.COMPLETED
    assert numbers(sql) == [0]


async def test_of_twins_under_one_token_one_writes(database: Database, sql: Sql) -> None:
    for turn in range(20):
        job_id, kind = insert_job(sql, "processing"), f"child-{turn}"
        # Two processes with one worker id, each of which has run the job and made children of its own.
        found = await asyncio.gather(
            *(settled(database, job_id, child(n, kind=kind), child(n, kind=kind)) for n in (1, 2))
        )
        assert found == [Settled.COMPLETED] * 2
        assert numbers(sql, kind) in ([1, 1], [2, 2])


async def test_an_error_between_the_two_leaves_the_job_with_its_owner(
    database: Database, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*run: Any) -> Any:
        yield from insertions(*run)
        raise psycopg.OperationalError("the connection is lost")

    insertions = child_jobs.insertions
    job_id, one = insert_job(sql, "processing"), child()
    with monkeypatch.context() as patched:
        patched.setattr(child_jobs, "insertions", broken)
        with pytest.raises(DatabaseUnavailable):
            await settled(database, job_id, one)
    assert (read_job(sql, job_id)["status"], numbers(sql)) == ("processing", [])
    assert await settled(database, job_id, one) is Settled.COMPLETED
    assert numbers(sql) == [0]


async def test_a_locked_row_is_told_and_nothing_written(
    database: Database, sql: Sql, database_url: str
) -> None:
    job_id, one = insert_job(sql, "processing"), child()
    with psycopg.connect(database_url) as other:
        other.execute("SELECT FROM jsworker.jobs WHERE id = %s FOR UPDATE", [job_id])
        assert await settled(database, job_id, one, wait=False) is Settled.LOCKED
    assert numbers(sql) == []
    assert await settled(database, job_id, one, wait=False) is Settled.COMPLETED


async def test_a_refused_child_refuses_the_completion(database: Database, sql: Sql) -> None:
    job_id, refusals = insert_job(sql, "processing"), Refusals()
    bad = ChildJob(CHILD, NewJob(new_job_id(), "no JSON"))
    assert await settled(database, job_id, child(), bad, refusals=refusals) is Settled.REFUSED
    assert list(refusals) == [(job_id, 1)]
    assert (read_job(sql, job_id)["status"], numbers(sql)) == ("processing", [])


async def test_the_jobs_own_key_is_free_for_its_child(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing", unique_key="every night")
    again = child(1, kind=KIND, unique_key="every night", delay=3600.0)
    assert await settled(database, job_id, again) is Settled.COMPLETED
    assert read_job(sql, again.job.id)["status"] == "scheduled"


async def test_a_live_job_keeps_its_key(database: Database, sql: Sql) -> None:
    insert_job(sql, "queued", kind=CHILD, unique_key="a", payload='{"n": 7}')
    job_id = insert_job(sql, "processing")
    children = [child(1, unique_key="a"), child(2, unique_key="b"), child(3, unique_key="b"), child(4)]
    assert await settled(database, job_id, *children) is Settled.COMPLETED
    assert numbers(sql) == [2, 4, 7]
    assert noted(sql, job_id) == [children[1].job.id, children[3].job.id]
    second = insert_job(sql, "processing")
    assert await settled(database, second, child(5, unique_key="a")) is Settled.COMPLETED
    assert read_events(sql, second) == []


@pytest.mark.parametrize("commits", [True, False])
async def test_a_key_that_is_being_taken_is_waited_for(
    database: Database, sql: Sql, database_url: str, *, commits: bool
) -> None:
    job_id = insert_job(sql, "processing")
    with psycopg.connect(database_url) as twin:
        twin.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, unique_key, status, run_at)"
            " VALUES (%s, %s, '{\"n\": 7}', 'a', 'scheduled', now() + interval '1 hour')",
            [new_job_id(), CHILD],
        )
        settling = asyncio.create_task(settled(database, job_id, child(1, unique_key="a")))
        await eventually(lambda: waits(sql), "the completion waits for the key")
        assert not settling.done()
        assert read_job(sql, job_id)["status"] == "processing"
        if commits:
            twin.commit()
        else:
            twin.rollback()
    assert await settling is Settled.COMPLETED
    assert numbers(sql) == [7 if commits else 1]


@pytest.mark.parametrize("scope", ["live", "waiting", "window", "debounce"])
async def test_terms_hold_for_children(database: Database, sql: Sql, scope: Any) -> None:
    terms = JobTerms(
        scope=scope,
        expires_in=600.0,
        unique_for=3600.0 if scope == "window" else None,
        debounce=60.0 if scope == "debounce" else None,
    )
    first, second = (
        [child(10 * round_ + n, unique_key="k" if n else None, terms=terms) for n in range(2)]
        for round_ in range(2)
    )
    for children, made in ((first, first), (second, second[:1])):
        job_id = insert_job(sql, "processing")
        assert await settled(database, job_id, *children) is Settled.COMPLETED
        assert noted(sql, job_id) == [each.job.id for each in made]
    kept = {0, 10, 11} if scope == "debounce" else {0, 1, 10}  # the payload of the last one
    assert set(numbers(sql)) == kept
    assert read_value(sql, "SELECT count(*) AS found FROM jsworker.jobs WHERE expires_at IS NOT NULL") == 3


async def test_the_key_of_an_expired_job_is_freed_in_the_same_commit(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    over = insert_job(sql, "queued", kind=CHILD, unique_key="a", payload='{"n": 7}')
    sql.execute("UPDATE jsworker.jobs SET expires_at = now() - interval '1 s' WHERE id = %s", [over])
    one = child(1, unique_key="a", terms=JobTerms(expires_in=600.0))
    assert await settled(database, job_id, one) is Settled.COMPLETED
    assert read_job(sql, one.job.id)["status"] == "queued"
    assert read_job(sql, over)["failure_reason"] == "expired"
    by = "SELECT count(DISTINCT CAST(xmin AS text)) AS found FROM jsworker.jobs"
    assert read_value(sql, by) == 1


async def test_only_expired_jobs_lose_their_keys_to_children_with_delays(
    database: Database, sql: Sql
) -> None:
    job_id = insert_job(sql, "processing")
    over, held, kept = (
        insert_job(sql, "queued", kind=CHILD, unique_key=key, payload='{"n": 7}') for key in ("a", "b", "d")
    )
    expired = "UPDATE jsworker.jobs SET expires_at = now() - interval '1 s' WHERE id = ANY(%s)"
    sql.execute(expired, [[over, kept]])
    children = [child(n, unique_key=key, delay=60.0, terms=JobTerms()) for n, key in enumerate("abcc")]
    assert await settled(database, job_id, *children, child(4, unique_key="d")) is Settled.COMPLETED
    assert noted(sql, job_id) == [children[0].job.id, children[2].job.id]
    assert read_job(sql, over)["failure_reason"] == "expired"
    assert [read_job(sql, each)["status"] for each in (held, kept)] == ["queued"] * 2


@pytest.mark.parametrize(
    "terms",
    [[None] * 3, [JobTerms(scope="waiting")] * 3, [None, JobTerms(), JobTerms()]],
    ids=["live", "waiting", "some with a delay"],
)
async def test_parents_that_enqueue_the_same_keys_do_not_deadlock(
    database_url: str, sql: Sql, monkeypatch: pytest.MonkeyPatch, terms: list[JobTerms | None]
) -> None:
    monkeypatch.setattr("jsworker.ownership.database._CONFLICT_TRIES", 1)  # a deadlock is an error
    async with opened(database_url, 30.0) as database:
        for turn in range(20):
            parents = [insert_job(sql, "processing") for _ in range(6)]
            kinds = [f"kind-{turn}-{n}" for n in range(4)]

            def children(order: Callable[[list[str]], Any]) -> list[ChildJob]:
                return [
                    child(
                        n, kind=kind, unique_key=str(n), delay=60.0 if each == JobTerms() else 0.0, terms=each
                    )
                    for kind in order(kinds)  # noqa: B023 -- called at once
                    for n, each in zip(order([0, 1, 2]), terms, strict=True)  # type: ignore[list-item] # numbers
                ]

            orders: list[Callable[[Any], Any]] = [list, lambda given: list(reversed(given))]
            found = await asyncio.gather(
                *(settled(database, job_id, *children(orders[n % 2])) for n, job_id in enumerate(parents))
            )
            assert found == [Settled.COMPLETED] * 6
            assert [len(numbers(sql, kind)) for kind in kinds] == [3] * 4


async def test_completions_without_children_are_as_before(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "processing")
    assert await complete(database, job_id) is Settled.COMPLETED
    assert "child_jobs" not in settle.complete.values(WORKER, [Completion(job_id, 1, None, (child(),))])
    cancelled = insert_job(sql, "processing")
    await control.cancel(database, [cancelled])
    assert await settled(database, cancelled, child(1)) is Settled.COMPLETED  # it was done all the same
    assert numbers(sql) == [1]
