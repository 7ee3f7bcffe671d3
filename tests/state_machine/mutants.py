"""Faults to put into the statements, one at a time: the machine has to find each of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from unittest.mock import patch

from sqlalchemy import TextClause, text

from jsworker.ownership import predicates
from jsworker.ownership.statements import condition
from jsworker.ownership.transitions import (
    admission,
    claim,
    control,
    heartbeat,
    publish,
    reopen,
    republish,
    reset,
    schedules,
    settle,
    snooze,
    steps,
    workers,
    workflow_control,
    workflows,
)
from jsworker.ownership.transitions.refused_rows import Sweep


@dataclass(frozen=True)
class Mutant:
    """A statement with one piece of it replaced.

    Attributes:
        name: what the statement then does wrong.
        statement: its name in the module that runs it.
        old, new: the piece, or several, and what stands in its place.
    """

    name: str
    module: ModuleType
    statement: str
    old: str | tuple[str, ...]
    new: str = ""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let the module run the mutant."""
        original = getattr(self.module, self.statement)
        mutated: object
        if isinstance(original, TextClause):
            mutated = self._mutated(original)
        elif isinstance(original, Sweep):
            mutated = replace(
                original, at_once=self._mutated(original.at_once), write=self._mutated(original.write)
            )
        else:  # the two forms of a statement that settles, in a batch and alone
            mutated = replace(
                original, batch=self._mutated(original.batch), alone=self._mutated(original.alone)
            )
        with patch.object(self.module, self.statement, mutated):
            yield

    def _mutated(self, statement: TextClause) -> TextClause:
        mutated = statement.text
        for piece in (self.old,) if isinstance(self.old, str) else self.old:
            assert piece in mutated, f"{self.statement} no longer holds {piece!r}"
            mutated = mutated.replace(piece, self.new)
        return text(mutated)


_SEEN_STALE = f" AND j.last_activity_at = seen.activity AND {condition(predicates.is_stale)}"
_BATCH_TOKEN = " AND j.fencing_token = run.token"

MUTANTS = [
    Mutant("complete without its token", settle, "complete", _BATCH_TOKEN),
    Mutant("fail without its token", settle, "fail", _BATCH_TOKEN),
    Mutant("release without its token", settle, "release", _BATCH_TOKEN),
    Mutant(
        "fail ignores a cancel",
        settle,
        "fail",
        "WHEN j.cancel_requested THEN 'cancelled' ",
    ),
    Mutant("release ignores a cancel", settle, "release", "j.cancel_requested OR ", "false OR "),
    Mutant(
        "release keeps its dispatch",
        settle,
        "release",
        "j.dispatch + CASE WHEN (NOT mine.cancel AND mine.delay IS NULL) THEN 1 ELSE 0 END",
        "j.dispatch",
    ),
    Mutant("snooze without its token", snooze, "snooze", _BATCH_TOKEN),
    Mutant("snooze ignores a cancel", snooze, "snooze", "WHEN j.cancel_requested THEN 'cancelled' "),
    Mutant("snooze without an end", snooze, "snooze", "WHEN (j.snoozes >= run.most) THEN 'failed' "),
    Mutant("step without its token", steps, "STEP", " AND j.fencing_token = :token"),
    Mutant(
        "the last result of a step stays",
        steps,
        "STEP",
        "DO NOTHING",
        "(job_id, name) DO UPDATE SET result = excluded.result",
    ),
    Mutant("heartbeat without its token", heartbeat, "HEARTBEAT", _BATCH_TOKEN),
    Mutant("progress without its token", heartbeat, "PROGRESS", " AND j.fencing_token = :token"),
    Mutant(
        "orphaned claims among the runs in flight",
        heartbeat,
        "ORPHANED",
        "j.fencing_token = run.token",
        "false",
    ),
    Mutant(
        "claim of a live owner's job",
        claim,
        "CLAIM",
        "j.status = 'queued'",
        "j.status IN ('queued', 'processing')",
    ),
    Mutant(
        "claim without a new token", claim, "CLAIM", "j.fencing_token + 1", "greatest(j.fencing_token, 1)"
    ),
    Mutant("claim keeps needs_publish", claim, "CLAIM", ", needs_publish=false"),
    Mutant("claim of another kind", claim, "CLAIM", " AND j.kind = :kind"),
    Mutant(
        "stale claim of what is not stale",
        claim,
        "CLAIM_STALE",
        _SEEN_STALE,
    ),
    Mutant(
        "mark without its dispatch",
        publish,
        "MARK",
        ("j.dispatch = sent.dispatch", "j.dispatch = mine.dispatch"),
        "true",
    ),
    Mutant("promote without a message", publish, "_PROMOTION", "needs_publish=true", "needs_publish=false"),
    Mutant("publish keeps its turn", publish, "_PUBLISHING", "make_interval(secs=>5.0)", "interval '0'"),
    Mutant(
        "stale reset of what is not stale",
        reset,
        "RESET_STALE",
        _SEEN_STALE,
    ),
    Mutant("clear without its token", reset, "RESET_BY_OPERATOR", " AND j.fencing_token = seen.token"),
    Mutant("reset ignores a cancel", reset, "RESET_DEAD", "WHEN taken.cancel_requested THEN 'cancelled'"),
    Mutant(
        "cancel of a running job is not noted",
        control,
        "CANCEL",
        "cancel_requested=(j.status = 'processing')",
        "cancel_requested=false",
    ),
    Mutant(
        "retry keeps its counters",
        control,
        "RETRY",
        "attempts=0, errors=0,",
        "attempts=j.errors, errors=j.errors,",
    ),
    Mutant("republish keeps its dispatch", republish, "REPUBLISH", "j.dispatch + 1", "j.dispatch"),
    Mutant(
        "earlier lives by a pattern",
        workers,
        "EARLIER_LIVES",
        "w.hostname = :hostname",
        "w.hostname LIKE :hostname || '%'",
    ),
]

FLOW_MUTANTS = [
    Mutant("what runs takes no slot", admission, "ADMIT", "x.max_running - x.running", "x.max_running"),
    Mutant("a paused key admits", admission, "ADMIT", "CASE WHEN x.paused THEN 0", "CASE WHEN false THEN 0"),
    Mutant("a run uses no token", admission, "ADMIT", "state.step * a.jobs", "0.0 * a.jobs"),
    Mutant(
        "a place is lost at WAKE",
        admission,
        "WAKE",
        "coalesce(j.queued_at, clock_timestamp())",
        "clock_timestamp()",
    ),
    Mutant(
        "a batch finishes with live members", workflows, "FINISH", "AND NOT coalesce(", "AND coalesce(true, "
    ),
    Mutant(
        "what needs two batches waits for one",
        workflows,
        "_NEEDS_SWEEP",
        "WHERE n.batch = d.id AND b.finished_at IS NULL",
        "WHERE n.batch = d.id AND false",
    ),
    Mutant(
        "a run that has lost its job adds members",
        workflow_control,
        "ADD_MEMBERS",
        " AND j.fencing_token = :token",
    ),
    Mutant(
        "what was cancelled for a retried member stays so",
        reopen,
        "HOLD_AGAIN",
        "WHERE j.batch_id",
        "WHERE false AND j.batch_id",
    ),
    Mutant(
        "an instant is fired again",
        schedules,
        "FIRE",
        "s.next_at = CAST(:seen AS TIMESTAMP WITH TIME ZONE)",
        "CAST(:seen AS timestamptz) IS NOT NULL",
    ),
    Mutant("a schedule is fired as it was", schedules, "FIRE", "s.revision = :revision", "true"),
]
