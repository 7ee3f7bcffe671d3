"""The protocol with one guard taken away, for each guard: a checker that lets one pass proves nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import TextClause, text

from jsworker.ownership import predicates
from jsworker.ownership.database import Database
from jsworker.ownership.statements import condition, waiting
from jsworker.ownership.transitions import (
    admission,
    claim,
    control,
    enqueue,
    heartbeat,
    publish,
    reset,
    schedules,
    settle,
    workers,
    workflows,
)
from jsworker.ownership.transitions.control import Cancelled
from tests.faults.flow_control import BATCHES, INSTANTS, OVER_LIMIT, PLACES
from tests.faults.walk.walk import Options

Patch = Callable[[pytest.MonkeyPatch], None]

_MINE = "j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = run.token"
_STUCK = frozenset({"lost", "never ended"})


@dataclass(frozen=True)
class Mutant:
    """One guard less.

    Attributes:
        apply: takes it away.
        found_as: rules of which one must find it.
        sweeps: with the layer that covers for it, or without.
        loses_messages: whether messages get lost, which only the sweeps can heal.
        strays: whether orphaned claims are released.
        looks_after: whether held jobs and batches are looked after that nobody came back to.
        habits: what is wrong outside of SQL.
    """

    name: str
    found_as: frozenset[str]
    apply: Patch = lambda _: None
    sweeps: bool = True
    loses_messages: bool = True
    strays: bool = True
    looks_after: bool = True
    habits: frozenset[str] = frozenset()

    def options(self, seed: int) -> Options:
        """Return how it walks."""
        return Options(
            seed=seed,
            sweeps=self.sweeps,
            loses_messages=self.loses_messages,
            strays=self.strays,
            looks_after=self.looks_after,
            habits=self.habits,
        )


def without(statement: TextClause, *changes: tuple[str, str]) -> TextClause:
    """Return a statement with parts replaced.

    Raises:
        ValueError: a part is not there; a mutant that changes nothing shows nothing.
    """
    found = statement.text
    for part, instead in changes:
        if part not in found:
            raise ValueError(f"{part!r} is not in the statement")
        found = found.replace(part, instead)
    return text(found)


def sql(module: ModuleType, name: str, *changes: tuple[str, str]) -> Patch:
    """Return the patch that changes parts of one of a module's statements."""
    return lambda patch: patch.setattr(module, name, without(getattr(module, name), *changes))


def write(name: str, *changes: tuple[str, str]) -> Patch:
    """Return the patch of COMPLETE, FAIL or RELEASE, which exist for batches and for one row alone."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        before = getattr(settle, name)
        batch = without(before.batch, *changes)
        patch.setattr(settle, name, replace(before, batch=batch, alone=waiting(batch)))

    return apply


def in_two(patch: pytest.MonkeyPatch) -> None:
    """Cancel what waits, then ask what runs: a job may go from one to the other in between."""
    live = "j.status IN ('scheduled', 'queued', 'processing')"
    waiting = without(control.CANCEL, (live, "j.status IN ('scheduled', 'queued')"))
    running = without(control.CANCEL, (live, "j.status = 'processing'"))

    async def cancel(database: Database, ids: Any) -> Cancelled:
        cancelled = await database.run(
            waiting, {"ids": ids, "statuses": list(control.LIVE), **predicates.ANY_AGE.values()}
        )
        await asyncio.sleep(0.2)  # what lies between two statements of a busy client
        requested = await database.run(
            running, {"ids": ids, "statuses": list(control.LIVE), **predicates.ANY_AGE.values()}
        )
        return Cancelled([row.id for row in cancelled], [row.id for row in requested], {}, [])

    patch.setattr(control, "cancel", cancel)


def in_turn(*patches: Patch) -> Patch:
    """Return the patch that applies several."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        for one in patches:
            one(patch)

    return apply


MUTANTS = (
    Mutant(
        "unguarded reset",
        frozenset({"refused by the database", "false resets"}),
        sql(
            reset,
            "RESET_STALE",
            (
                "j.fencing_token = seen.token AND j.last_activity_at = seen.activity",
                "true",
            ),
            (
                "WHERE j.status = 'processing' AND true",
                "WHERE true",
            ),
            (f"AND {condition(predicates.is_stale)}", ""),
            ("WHERE j.id = decided.id AND j.status = 'processing'", "WHERE j.id = decided.id"),
        ),
    ),
    Mutant(
        "unguarded complete",
        frozenset({"result of another token", "refused by the database"}),
        write(
            "complete",
            (_MINE, "true"),
            ("AND j.status = 'processing' AND j.worker_id = :worker_id", "AND :worker_id <> ''"),
        ),
    ),
    Mutant(
        "RELEASE ignores cancel_requested",
        frozenset({"refused by the database"}),
        write("release", ("j.cancel_requested OR ", "false OR ")),
    ),
    Mutant(
        "RESET ignores cancel_requested",
        frozenset({"refused by the database"}),
        sql(reset, "RESET_BY_OPERATOR", ("WHEN taken.cancel_requested THEN 'cancelled'", "")),
    ),
    Mutant("CANCEL as two statements", frozenset({"cancel missed"}), in_two),
    Mutant(
        "CLAIM keeps needs_publish",
        frozenset({"refused by the database"}),
        sql(claim, "CLAIM", ("needs_publish=false", "needs_publish=j.needs_publish")),
    ),
    Mutant(
        "CLAIM takes a live owner's job",
        frozenset({"taken from a live owner"}),
        sql(
            claim,
            "CLAIM",
            ("j.status = 'queued'", "j.status IN ('queued', 'processing')"),
            ("j.attempts + 1", "j.attempts + CASE j.status WHEN 'queued' THEN 1 ELSE 0 END"),
        ),
    ),
    Mutant("no sweep", _STUCK, sweeps=False),
    Mutant(
        "LIKE reconcile",
        frozenset({"false resets"}),
        sql(workers, "EARLIER_LIVES", ("w.hostname = :hostname", "w.hostname LIKE :hostname || '%'")),
    ),
    Mutant(
        "skipped claims are acked",
        _STUCK,
        sweeps=False,
        loses_messages=False,
        habits=frozenset({"ack skipped claims"}),
    ),
    Mutant(
        "MARK without dispatch",
        _STUCK,
        sql(
            publish,
            "MARK",
            ("AND j.needs_publish AND j.dispatch = sent.dispatch", "AND j.needs_publish"),
            ("AND j.needs_publish AND j.dispatch = mine.dispatch", "AND j.needs_publish"),
        ),
        sweeps=False,
        loses_messages=False,
    ),
    Mutant(
        "message id without dispatch",
        _STUCK,
        sweeps=False,
        loses_messages=False,
        habits=frozenset({"message ids of jobs"}),
    ),
    Mutant(
        "no outbox",
        _STUCK,
        sql(enqueue, "ENQUEUE", ("    d.delay <= 0,\n", "    false,\n")),
        sweeps=False,
        loses_messages=False,
    ),
    Mutant(
        "unclear claims are acked",
        _STUCK,
        sweeps=False,
        loses_messages=False,
        habits=frozenset({"ack unclear claims"}),
    ),
    Mutant(
        "newer copies are acked",
        _STUCK,
        sweeps=False,
        loses_messages=False,
        habits=frozenset({"ack newer copies"}),
    ),
    Mutant(
        "heartbeat by worker id alone",
        _STUCK,
        sql(
            heartbeat,
            "HEARTBEAT",
            (
                "FROM jsworker.jobs AS j JOIN unnest",
                "FROM jsworker.jobs AS j LEFT JOIN unnest",
            ),
            ("AND j.fencing_token = run.token", ""),
        ),
        sweeps=False,
        loses_messages=False,
        strays=False,
        habits=frozenset({"beat for all rows"}),
    ),
    Mutant(
        "slots are counted without a lock",
        frozenset({OVER_LIMIT}),
        in_turn(
            lambda patch: patch.setattr(admission, "LOCK", text("SELECT CAST(:kind AS text)")),
            sql(
                admission,
                "ADMIT",
                (" AND CAST(pg_current_xact_id() AS xid) IN (l.xmin, l.xmax)", ""),
                # What lies between counting and claiming on a busy server.
                (
                    "FROM ranked WHERE fits ORDER",
                    "FROM ranked WHERE fits AND pg_sleep(0.03) IS NOT NULL ORDER",
                ),
            ),
        ),
    ),
    Mutant(
        "a job loses its place at WAKE",
        frozenset({PLACES}),
        sql(admission, "WAKE", ("coalesce(j.queued_at, clock_timestamp())", "clock_timestamp()")),
    ),
    Mutant(
        "FIRE whatever the instant at which a schedule stands",
        frozenset({INSTANTS}),
        sql(
            schedules,
            "FIRE",
            ("s.next_at = CAST(:seen AS TIMESTAMP WITH TIME ZONE)", "CAST(:seen AS timestamptz) IS NOT NULL"),
            ("s.last_at IS NULL OR s.last_at < CAST(:due AS TIMESTAMP WITH TIME ZONE)", "true"),
        ),
    ),
    Mutant(
        "FINISH with live members",
        frozenset({BATCHES}),
        sql(workflows, "FINISH", ("AND NOT coalesce(", "AND coalesce(true, ")),
    ),
    Mutant("nobody looks after what is held", _STUCK | {BATCHES}, looks_after=False),
)
