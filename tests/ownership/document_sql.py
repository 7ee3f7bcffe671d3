"""Writes docs/sql.md: the SQL of each transition, to read beside the protocol.

python -m tests.ownership.document_sql docs/sql.md
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import TextClause

from jsworker.ownership.transitions import (
    admission,
    audit,
    claim,
    clock_ahead,
    control,
    enqueue,
    enqueue_terms,
    expire,
    heartbeat,
    limits,
    priorities,
    publish,
    reopen,
    republish,
    reschedule,
    reset,
    schedules,
    settle,
    snooze,
    steps,
    waiting_keys,
    workflow_control,
    workflows,
)

WIDTH = 110
HEADER = """# The SQL of the ownership protocol

Written by `python -m tests.ownership.document_sql docs/sql.md`; do not edit. `:name` is a parameter,
`j` the row of a job. The guards are the predicates of `jsworker/ownership/predicates.py`, word for
word. What settles a job exists in two forms: as shown for a batch, and without `SKIP LOCKED` for one
row alone.
"""
STATEMENTS: dict[str, TextClause] = {
    "ENQUEUE": enqueue.ENQUEUE,
    "ENQUEUE with terms": enqueue_terms.ENQUEUE_TERMS,
    "PUBLISH": publish.PUBLISH,
    "MARK": publish.MARK,
    "CLAIM": claim.CLAIM,
    "CLAIM of a row that others lock in turn, first statement": claim.LOCK_ROWS,
    "CLAIM of a stale owner's job": claim.CLAIM_STALE,
    "Read back after an unclear CLAIM": claim.READ_BACK,
    "HEARTBEAT": heartbeat.HEARTBEAT,
    "What HEARTBEAT skipped": heartbeat.STILL_MINE,
    "PROGRESS": heartbeat.PROGRESS,
    "CHECKPOINT": heartbeat.CHECKPOINT,
    "Quiet phase": heartbeat.QUIET,
    "Quiet phase of another run of the owner": heartbeat.QUIET_BESIDE,
    "End of a quiet phase": heartbeat.QUIET_OVER,
    "Orphaned claims": heartbeat.ORPHANED,
    "COMPLETE": settle.COMPLETE,
    "FAIL": settle.FAIL,
    "RELEASE": settle.RELEASE,
    "SNOOZE": snooze.SNOOZE,
    "STEP": steps.STEP,
    "STEP found": steps.FOUND,
    "What a zero-row write means": settle.VERDICT,
    "RESET by rule 1 (stale)": reset.RESET_STALE,
    "RESET by rule 2 (evidence of death)": reset.RESET_DEAD,
    "RESET by rule 3 (two witnesses)": reset.RESET_CRASHED,
    "RESET by rule 4 (operator)": reset.RESET_BY_OPERATOR,
    "PROMOTE": publish.PROMOTE,
    "ENQUEUE beside one of its key that runs": enqueue_terms.ENQUEUE_WAITING,
    "ENQUEUE once in a window": enqueue_terms.ENQUEUE_WINDOW,
    "Windows that have ended": enqueue_terms.ENDED_WINDOWS,
    "Forget windows": enqueue_terms.FORGET_WINDOWS,
    "DEBOUNCE": enqueue_terms.DEBOUNCE,
    "DEFER behind a run of the same key": waiting_keys.DEFER,
    "WAKE after a run of the same key": waiting_keys.WAKE,
    "EXPIRE": expire.EXPIRE,
    "EXPIRE what holds keys that children need": expire.EXPIRE_HOLDERS,
    "REPUBLISH": republish.REPUBLISH,
    "What lies ahead of the clock": clock_ahead.AHEAD,
    "BRING BACK what lies ahead of the clock": clock_ahead.BRING_BACK,
    "BRING BACK pauses": clock_ahead.BRING_BACK_PAUSES,
    "BRING BACK workers": clock_ahead.BRING_BACK_WORKERS,
    "BRING BACK refused rows": clock_ahead.BRING_BACK_REFUSED,
    "CANCEL": control.CANCEL,
    "RETRY": control.RETRY,
    "SET_PRIORITY": priorities.SET_PRIORITY,
    "RESCHEDULE": reschedule.RESCHEDULE,
    "What is written with an operator's action": audit.NOTE_ACTION,
    "FIRE": schedules.FIRE,
    "ADMIT, first statement: lock": admission.LOCK,
    "ADMIT, second statement: count, CLAIM and HOLD": admission.ADMIT,
    "WAKE, after the same lock": admission.WAKE,
    "A rate's bucket that is further ahead than its period": limits.BOUND_RATES,
    "What runs without a key is counted for its kind": limits.COUNT_RUNNING,
    "What is held without a key gets that of its kind": limits.GIVE_KEYS,
    "FINISH of a batch": workflows.FINISH,
    "NEEDS": workflows.NEEDS,
    "NEEDS has come to its end": workflows.PROPAGATED,
    "FINISH of a workflow": workflows.FINISH_WORKFLOW,
    "What a process that died has left of these": workflows.LEFT,
    "A member adds members": workflow_control.ADD_MEMBERS,
    "CANCEL of a workflow": workflow_control.CANCEL_WORKFLOW,
    "RETRY of members: the workflow moves on": reopen.MOVE_ON,
    "RETRY of members: batches are opened again": reopen.REOPEN,
    "RETRY of members": reopen.RETRY_MEMBERS,
    "RETRY of members: what was cancelled for them is held again": reopen.HOLD_AGAIN,
}
_CLAUSE = re.compile(r" (?=(?:SET|FROM|WHERE|ORDER BY|RETURNING|SELECT|VALUES|FOR NO KEY UPDATE|FOR SHARE) )")


def document() -> str:
    """Return the whole page."""
    parts = [f"## {name}\n\n```sql\n{readable(statement)}\n```\n" for name, statement in STATEMENTS.items()]
    return "\n".join([HEADER, *parts])


def readable(statement: TextClause) -> str:
    """Return a statement with a line for each of its clauses, as far as it has none of its own."""
    given = statement.text.strip().replace("\\:", ":")
    if "\n  " in given:  # written by hand
        return given
    return "\n".join(_lines(given))


def _lines(given: str) -> Iterator[str]:
    depth = 0
    for line in given.splitlines():
        for clause in _clauses(line):
            indent = "  " * depth
            yield from textwrap.wrap(
                clause,
                WIDTH,
                initial_indent=indent,
                subsequent_indent=indent + "    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            depth += clause.count("(") - clause.count(")")


def _clauses(line: str) -> Iterator[str]:
    """Split a line before its clauses, but not within brackets that it opens and closes itself."""
    begin = 0
    for found in _CLAUSE.finditer(line):
        before = line[begin : found.start()]
        if before.count("(") <= before.count(")") or before.startswith("("):
            yield before
            begin = found.end()
    yield line[begin:]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document())
