"""Limits, schedules, workflows and keys of which one job waits, each with one protection taken away.

The tests that are there for it must fail: one that passes all the same proves nothing.
"""

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, TextClause, text

from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.statements import condition, waiting
from jsworker.ownership.transitions import admission, reset, schedules, settle, snooze, workflows

from . import test_admission, test_schedules, test_waiting_keys, test_workflow_control, test_workflows
from .rows import Sql, empty_tables
from .winner import Winner

Apply = Callable[[pytest.MonkeyPatch, Sql], None]
Test = Callable[..., Coroutine[Any, Any, None]]
Change = tuple[str, str]


@dataclass(frozen=True)
class FlowMutant:
    """One protection less.

    Attributes:
        apply: takes it away.
        tests: each of which must fail.
        shows: what they say then, as a regular expression.
    """

    name: str
    apply: Apply
    tests: tuple[Test, ...]
    shows: str


def changed(statement: TextClause, *changes: Change) -> TextClause:
    """Return a statement with parts replaced, each of which must be there."""
    found = statement.text
    for part, instead in changes:
        assert part in found, f"{part!r} is not in the statement"
        found = found.replace(part, instead)
    return text(found)


def in_module(module: ModuleType, name: str, *changes: Change) -> Apply:
    """Return what changes parts of one of a module's statements."""
    return lambda patch, _: patch.setattr(module, name, changed(getattr(module, name), *changes))


def settle_with(patch: pytest.MonkeyPatch, module: ModuleType, name: str, *changes: Change) -> None:
    """Replace parts of COMPLETE, FAIL, RELEASE or SNOOZE, for many runs and for one."""
    before = getattr(module, name)
    batch = changed(before.batch, *changes)
    patch.setattr(module, name, replace(before, batch=batch, alone=waiting(batch)))


_NOTHING = text("SELECT 1")
_ANY_LOCK = (admission._LOCKED, "")
_ANY_KEY = ("SELECT l.kind, l.key, x.paused", "SELECT k.kind, k.key, x.paused")


def lock_with_the_count(patch: pytest.MonkeyPatch, _: Sql) -> None:
    """Lock and count in one statement, whose snapshot is older than the lock."""
    lock = f"WITH locked AS ({admission.LOCK.text} RETURNING l.key), asked AS MATERIALIZED"
    after = (admission._LOCKED, " AND (SELECT count(*) FROM locked) >= 0")
    one = changed(admission.ADMIT, after, _ANY_KEY, ("WITH asked AS MATERIALIZED", lock))
    patch.setattr(admission, "ADMIT", one)
    patch.setattr(admission, "LOCK", _NOTHING)


def wake_without_lock(patch: pytest.MonkeyPatch, _: Sql) -> None:
    patch.setattr(admission, "WAKE", changed(admission.WAKE, _ANY_LOCK, _ANY_KEY))
    patch.setattr(admission, "LOCK_KEYS", _NOTHING)


def count_slots_in_a_column(patch: pytest.MonkeyPatch, sql: Sql) -> None:
    """Let whoever claims take a slot, and whoever ends a run give one back."""
    sql.execute("ALTER TABLE jsworker.limits ADD COLUMN IF NOT EXISTS taken integer NOT NULL DEFAULT 0")
    before, _, rest = admission.STATE.partition("CASE WHEN v.max_running IS NOT NULL THEN (")
    count = admission.STATE.removeprefix(before).removesuffix(rest.partition(" AS running")[2])
    patch.setattr(admission, "ADMIT", changed(admission.ADMIT, (count, "l.taken AS running")))

    def counting(module: ModuleType, name: str, slots: Callable[[Any], int]) -> None:
        original = getattr(module, name)

        async def call(*given: Any, **named: Any) -> Any:
            answer = await original(*given, **named)
            sql.execute("UPDATE jsworker.limits SET taken = taken + %s", [slots(answer)])
            return answer

        patch.setattr(module, name, call)

    counting(admission, "admit", lambda taken: len(taken.claimed))
    counting(settle, "complete", lambda settled: -len(settled))
    counting(reset, "reset_stale", lambda taken: -len(taken.resets))


def finish_in_the_settle(patch: pytest.MonkeyPatch, _: Sql) -> None:
    """Let COMPLETE finish the batch if its own jobs are the last that live."""
    ids = "CAST(:ids AS uuid[])"
    others = ("WHERE j.batch_id IS NOT NULL", f"WHERE j.id <> ALL({ids}) AND j.batch_id IS NOT NULL")
    touched = f"b.id IN (SELECT j.batch_id FROM jsworker.jobs AS j WHERE j.id = ANY({ids}))"  # noqa: S608 -- a constant
    finish = changed(workflows.FINISH, others, (f"b.id = ANY({ids})", touched))
    both = f"WITH finish AS ({finish.text}), mine AS"
    settle_with(patch, settle, "complete", ("WITH mine AS", both))
    patch.setattr(workflows, "FINISH", changed(workflows.FINISH, ("b.sealed", "false")))


def needs_in_finish(patch: pytest.MonkeyPatch, _: Sql) -> None:
    """Let FINISH wake what needs its batches: these have finished, others are as its snapshot says."""
    needs = changed(
        workflows.NEEDS,
        ("mine", "held"),
        ("ANY(CAST(:batches AS uuid[]))", "ANY(SELECT id FROM finished)"),
        ("b.finished_at IS NULL", "b.finished_at IS NULL AND b.id <> ALL(SELECT id FROM finished)"),
        (":limit", "1000"),
        ("SELECT id, batch_id, status FROM moved", "SELECT * FROM finished"),
    ).text.strip()
    finish = workflows.FINISH.text.strip()
    place = finish.index("UPDATE jsworker.batches")
    one = f"{finish[:place].rstrip()}, finished AS ({finish[place:]}), {needs.removeprefix('WITH ')}"
    kept = "NOT EXISTS (SELECT FROM jsworker.batch_needs AS n WHERE n.needs = b.id)"
    patch.setattr(workflows, "FINISH", changed(text(one), (f"propagated = {kept}", "propagated = true")))


def leave_superseded_ones(patch: pytest.MonkeyPatch, _: Sql) -> None:
    never = (condition(predicates.is_superseded), "false")
    for module, name in ((settle, "fail"), (settle, "release"), (snooze, "snooze")):
        settle_with(patch, module, name, never)
    for name in ("RESET_STALE", "RESET_CRASHED", "RESET_DEAD", "RESET_BY_OPERATOR"):
        patch.setattr(reset, name, changed(getattr(reset, name), never))


_AT_ONCE = test_admission.TestAtOnce()
_WAKE = test_admission.TestWake()
_BEHIND_A_LOCK = test_workflows.TestFinishBehindALock()

MUTANTS = (
    FlowMutant(
        "count before lock",
        lock_with_the_count,
        (_AT_ONCE.test_who_waited_for_the_lock_counts_what_its_holder_claimed,),
        r"assert \[UUID\(.*\)\] == \[\]",
    ),
    FlowMutant(
        "WAKE without lock",
        wake_without_lock,
        (_WAKE.test_it_waits_for_a_hold_that_has_counted_and_not_committed,),
        r"\('scheduled', 'limit'\)",
    ),
    FlowMutant(
        "WAKE without sweep",
        in_module(admission, "WAITING_KEYS", (admission.HELD, "false")),
        (_WAKE.test_what_its_owner_did_not_live_to_wake_is_found_by_a_scan,),
        r"\('scheduled', 'limit'\)",
    ),
    FlowMutant(
        "place lost at WAKE",
        in_module(admission, "WAKE", ("coalesce(j.queued_at, clock_timestamp())", "clock_timestamp()")),
        (_WAKE.test_as_many_as_are_free_in_their_order,),
        r"assert datetime\.datetime\(.*\) == \(datetime\.datetime\(2026, 1, 1, ",
    ),
    FlowMutant(
        "release by counter",
        count_slots_in_a_column,
        (test_admission.test_a_zombie_gives_back_no_slot,),
        r"assert \[UUID\(.*\)\] == \[\]",
    ),
    FlowMutant(
        "FIRE without next_at = :due",
        in_module(
            schedules,
            "FIRE",
            ("s.next_at = CAST(:seen AS TIMESTAMP WITH TIME ZONE)", "true"),
            ("s.last_at < CAST(:due AS TIMESTAMP WITH TIME ZONE)", "true"),  # which covers for it
        ),
        (test_schedules.test_twice_and_late_it_is_fired_once,),
        r"Fired\(job_id=UUID",
    ),
    FlowMutant(
        "FINISH in the settle's statement",
        finish_in_the_settle,
        (test_workflows.test_of_two_last_members_the_one_that_commits_last_finishes_it,),
        "assert None == 'completed'",
    ),
    FlowMutant(
        "FINISH without generation",
        in_module(workflows, "FINISH", ("b.generation = seen.generation", "true")),
        (
            _BEHIND_A_LOCK.test_what_was_added_meanwhile_keeps_it_open,
            test_workflow_control.test_finish_behind_a_retry_finishes_nothing,
        ),
        "completed|outcome='failed'",
    ),
    FlowMutant(
        "NEEDS in FINISH's statement",
        needs_in_finish,
        (test_workflows.test_of_two_needs_the_one_that_commits_last_wakes,),
        r"assert \['scheduled', 'scheduled'\] == \['queued', 'queued'\]",
    ),
    FlowMutant(
        "superseded not resolved",
        leave_superseded_ones,
        tuple(
            partial(test_waiting_keys.test_who_comes_back_while_another_waits_is_superseded, way=way)
            for way in test_waiting_keys.BACK
        ),
        "'processing', None|refused",
    ),
)


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_a_mutant_is_found_out(
    database: Database, sql: Sql, engine: Engine, monkeypatch: pytest.MonkeyPatch, mutant: FlowMutant
) -> None:
    async def run(test: Test) -> None:
        empty_tables(sql, ("jobs", "limits", "schedules", "workflows"))
        with Winner(engine, sql) as winner:
            fixtures = {"database": database, "sql": sql, "observer": sql, "winner": winner}
            taken = [name for name in inspect.signature(test).parameters if name in fixtures]
            await test(**{name: fixtures[name] for name in taken})

    for test in mutant.tests:
        await run(test)
    mutant.apply(monkeypatch, sql)
    for test in mutant.tests:
        with pytest.raises(AssertionError, match=mutant.shows):
            await run(test)
