"""Who did what: written with the action or not at all; listed as one entry, however many parts it has."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from jsworker.core.errors import TransitionRefused
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Transaction
from jsworker.ownership.transitions import control, priorities, publish, reset
from jsworker.ownership.transitions.audit import AuditEntry, list_actions, prune_actions
from jsworker.ownership.transitions.enqueue import new_job_id
from jsworker.ownership.transitions.reschedule import reschedule_all

from .calls import reschedule
from .rows import Sql, ago, event_names, insert_job, read_events, read_job
from .winner import Winner

LATER = datetime.now(UTC) + timedelta(days=2)


async def only(database: Database) -> tuple[Any, ...]:
    [action] = await list_actions(database)
    return action.actor, action.action, action.target, action.matched, action.changed


async def test_each_action_on_jobs_is_told_with_what_it_changed(database: Database, sql: Sql) -> None:
    failed = [insert_job(sql, "failed") for _ in range(3)]
    done, waiting, running = (insert_job(sql, status) for status in ("completed", "scheduled", "processing"))
    entry = AuditEntry.of_jobs("retry", [*failed, done], actor="ann")
    retried = await control.retry_all(database, [*failed, done], entry=entry)
    await entry.end(database, matched=4)
    assert (retried.changed, list(retried.refused)) == (failed, [done])
    named = {"jobs": {"ids": [str(each) for each in (*failed, done)]}}
    assert await only(database) == ("ann", "retry", named, 4, 3)

    moved = await priorities.set_priorities(
        database, [*failed, done], 0, entry=AuditEntry("set_priority", {"to": "high"}, actor="bob")
    )
    assert (moved.changed, list(moved.refused)) == (failed, [done])
    again = await priorities.set_priorities(database, failed, 0, entry=AuditEntry("set_priority", {}))
    assert (again.changed, again.refused) == ([], {})  # which nobody needs to be told
    await control.cancel(database, [waiting, running], entry=AuditEntry("cancel", {}))
    await reset.reset_by_operator(
        database, seen=[(running, 1)], reason="r", entry=AuditEntry("clear", {"reason": "r"})
    )
    told = [(each.action, each.matched, each.changed) for each in await list_actions(database)]
    assert told == [("clear", 1, 1), ("cancel", 2, 2), ("set_priority", 3, 3), ("retry", 4, 3)]
    login = sql.execute("SELECT CAST(CURRENT_USER AS text) AS login").fetchone()
    assert login is not None
    last = (await list_actions(database, limit=1))[0]
    assert (last.actor, last.login) == (login["login"], login["login"])
    behind = await list_actions(database, limit=1, after=last.action_id)
    assert [each.action for each in behind] == ["cancel"]


async def test_what_cannot_be_told_is_not_done(database: Database, sql: Sql) -> None:
    job_id = insert_job(sql, "failed")
    before = read_job(sql, job_id)
    entry = AuditEntry("retry", {}, actor="ann")
    await control.retry_all(database, [insert_job(sql, "failed")], entry=entry)
    entry._part = 0  # its part is there already
    refused = await control.retry_all(database, [job_id], entry=entry)
    assert list(refused.refused) == [job_id]
    assert read_job(sql, job_id) == before
    assert event_names(sql, job_id) == []


async def test_an_action_that_changes_nothing_is_told_at_its_end(database: Database, sql: Sql) -> None:
    entry = AuditEntry("cancel", {}, actor="  ")
    await control.cancel(database, [insert_job(sql, "completed")], entry=entry)
    assert await list_actions(database) == []
    await entry.end(database, matched=1)
    [action] = await list_actions(database)
    assert (action.matched, action.changed, action.actor) == (1, 0, action.login)


async def test_a_part_whose_transaction_ran_again_counts_once(database: Database) -> None:
    entry = AuditEntry("retry", {})

    async def undone(transaction: Transaction) -> None:
        await entry.note(transaction, changed=2)
        raise RuntimeError("a conflict")

    with pytest.raises(RuntimeError, match="a conflict"):
        await database.in_transaction(undone)
    await database.in_transaction(lambda opened: entry.note(opened, changed=2))
    await entry.end(database, matched=3)
    [action] = await list_actions(database)
    assert (action.changed, action.matched) == (2, 3)


async def test_old_entries_are_pruned(database: Database, sql: Sql) -> None:
    for _ in range(2):
        await AuditEntry("cancel", {}).end(database, matched=0)
    sql.execute(
        "UPDATE jsworker.audit SET at = clock_timestamp() - interval '401 days'"
        " WHERE action_id = (SELECT action_id FROM jsworker.audit ORDER BY action_id LIMIT 1)"
    )
    assert await prune_actions(database) == 1
    assert len(await list_actions(database)) == 1


async def test_rows_that_postgresql_refuses_are_named_and_the_others_retried(
    database: Database, sql: Sql
) -> None:
    taken = insert_job(sql, "failed", unique_key="a")
    insert_job(sql, unique_key="a")
    others = [insert_job(sql, "failed") for _ in range(3)]
    entry = AuditEntry("retry", {}, actor="ann")
    done = await control.retry_all(database, [others[0], taken, *others[1:], taken], entry=entry)
    assert done.changed == others
    assert done.refused == {taken: f"job {taken} cannot be retried: a live job holds its unique key"}
    assert (await only(database))[3:] == (3, 3)  # in as many parts as there were transactions


class TestReschedule:
    async def test_a_job_that_waits_for_a_time(self, database: Database, sql: Sql) -> None:
        job_id = insert_job(sql, "scheduled")
        before = read_job(sql, job_id)
        await reschedule(database, job_id, LATER)
        assert read_job(sql, job_id) == before | {"run_at": LATER}
        [event] = read_events(sql, job_id)
        assert event["event"] == "rescheduled"
        assert set(event["detail"]) == {"run_at", "was"}

    async def test_one_that_is_being_promoted(self, database: Database, sql: Sql, winner: Winner) -> None:
        job_id = insert_job(sql, "scheduled", run_at=ago(1))
        winner.run(publish.PROMOTE, {"limit": 10, "within": 1e9})
        moving = asyncio.create_task(reschedule(database, job_id, LATER))
        await winner.is_passed_over()
        winner.commit()
        with pytest.raises(TransitionRefused, match="is queued; only a job that waits for a time"):
            await moving
        assert event_names(sql, job_id) == []

    async def test_no_other_job(self, database: Database, sql: Sql) -> None:
        held = insert_job(sql, "scheduled", run_at=None, held_by="rate", held_at=ago(1))
        others = [insert_job(sql, status) for status in ("queued", "processing", "failed")]
        unknown = new_job_id()
        entry = AuditEntry("reschedule", {})
        done = await reschedule_all(database, [held, *others, unknown], LATER, entry=entry)
        assert done.changed == []
        assert [done.refused[each].partition(";")[0].split(maxsplit=2)[2] for each in (held, *others)] == [
            "waits for rate, not for a time",
            "is queued",
            "is processing",
            "is failed",
        ]
        assert done.refused[unknown].endswith("does not exist")
        assert await list_actions(database) == []
