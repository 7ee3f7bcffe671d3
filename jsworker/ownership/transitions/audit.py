"""The audit log: an entry for each action, written in the transaction of the action; and the list of them."""

import asyncio
import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.core.errors import JsworkerError
from jsworker.core.names import printable
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Parameters, Row, Transaction
from jsworker.ownership.transitions.enqueue import new_job_id

KEPT_SECONDS: Final = 400 * 86400.0
_LONGEST_ACTOR: Final = 255
_MOST_NAMED: Final = 100
_PRUNED_AT_ONCE: Final = 1_000
_INTERRUPTED_SECONDS: Final = 2.0

NOTE_ACTION = text("""
INSERT INTO jsworker.audit (action_id, part, actor, action, target, matched, changed)
VALUES (:action_id, :part, coalesce(CAST(:actor AS text), CAST(CURRENT_USER AS text)), :action,
  CAST(:target AS jsonb), :matched, :changed)
""")

# Reads what was committed, not what this process has tried: a transaction may run again after a conflict.
NOTED = text("""
SELECT CAST(coalesce(sum(a.matched), 0) AS bigint) AS matched, count(*) > 0 AS is_noted
FROM jsworker.audit AS a WHERE a.action_id = :action_id
""")

# Along the primary key, whose first column is ordered by time: no more groups are read than needed.
ACTIONS = text("""
SELECT a.action_id, min(a.at) AS at, max(a.at) AS ended_at, min(a.actor) AS actor, min(a.login) AS login,
  min(a.action) AS action, (array_agg(a.target ORDER BY a.part DESC))[1] AS target,
  CAST(sum(a.matched) AS bigint) AS matched, CAST(sum(a.changed) AS bigint) AS changed
FROM jsworker.audit AS a
WHERE a.action_id < coalesce(CAST(:after AS uuid), CAST('ffffffff-ffff-ffff-ffff-ffffffffffff' AS uuid))
GROUP BY a.action_id ORDER BY a.action_id DESC LIMIT :limit
""")

PRUNE_ACTIONS = text("""
DELETE FROM jsworker.audit AS a WHERE a.ctid = ANY(ARRAY(
  SELECT o.ctid FROM jsworker.audit AS o
  WHERE o.at < statement_timestamp() - make_interval(secs => CAST(:kept AS double precision))
  ORDER BY o.at LIMIT :limit))
RETURNING a.part
""")


class AuditEntry:
    """The entry for an action in progress: each transaction of the action writes a part of it.

    Attributes:
        action_id: identifies the entry; later entries have greater ids.
        action: the verb, such as ``retry`` or ``limits.set``.
        target: what the action is done to, for JSON: ids or a selection, no payload.
        actor: who does it; None: the login of the database.
    """

    def __init__(self, action: str, target: Mapping[str, Any], *, actor: str | None = None) -> None:
        self.action_id = new_job_id()
        self.action = action
        self.target = target
        self.actor = None if actor is None else printable(actor.strip(), _LONGEST_ACTOR) or None
        self._part = 0

    @classmethod
    def of_jobs(cls, action: str, ids: Sequence[UUID], *, actor: str | None, **how: Any) -> Self:
        """Return the entry for an action on jobs given by ids; of many it names only the first ones."""
        named = {"ids": [str(each) for each in ids[:_MOST_NAMED]]}
        return cls(
            action, {"jobs": named | ({"of": len(ids)} if len(ids) > _MOST_NAMED else {}), **how}, actor=actor
        )

    async def note(self, transaction: Transaction, *, changed: int, others: int = 0) -> None:
        """Write a part in the transaction: how many were changed, and how many others were meant."""
        self._part += 1
        values: Parameters = {
            "action_id": self.action_id,
            "part": self._part,
            "actor": self.actor,
            "action": self.action,
            "target": json.dumps(self.target),
            "matched": changed + others,
            "changed": changed,
        }
        await transaction.run(NOTE_ACTION, values)

    async def end(self, database: Database, *, matched: int, interrupted: bool = False) -> None:
        """Write a last part for those of ``matched`` that no part counts; also if no part was written yet.

        ``interrupted``: others were left that may not be counted in ``matched``; the target says so.
        """
        if interrupted:
            self.target = {**self.target, "interrupted": True}
        [noted] = await database.run(NOTED, {"action_id": self.action_id})
        left = max(matched - noted.matched, 0)
        if left or interrupted or not noted.is_noted:
            await database.in_transaction(lambda opened: self.note(opened, changed=0, others=left))

    async def interrupt(self, database: Database, *, matched: int) -> None:
        """Write that it was interrupted, unless this fails or takes 2 s: the interruption must go on."""
        with suppress(JsworkerError, TimeoutError):
            async with asyncio.timeout(_INTERRUPTED_SECONDS):
                await self.end(database, matched=matched, interrupted=True)


def os_user() -> str:
    """Return the user and the host of this process, for people: ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Action:
    """An action that was done.

    Attributes:
        action_id: identifies it; the next page of a list begins behind it.
        at, ended_at: when its first and its last part were written, by the database's clock.
        actor: who did it, as the caller stated; ``login``: the login of the database that wrote it.
        action: the verb, such as ``retry`` or ``limits.set``.
        target: what it was done to: ids, or a selection; with ``interrupted`` if it is known to have
            ended early.
        matched: how many were meant.
        changed: how many it changed.
    """

    action_id: UUID
    at: datetime
    ended_at: datetime
    actor: str
    login: str
    action: str
    target: dict[str, Any]
    matched: int
    changed: int


async def run_noted(
    database: Database,
    statement: TextClause,
    values: Parameters,
    entry: AuditEntry | None,
) -> Sequence[Row]:
    """Run a statement that returns what it changes; if anything, write a part of ``entry`` with it."""
    if entry is None:
        return await database.run(statement, values)

    async def write(transaction: Transaction) -> Sequence[Row]:
        rows = await transaction.run(statement, values)
        if rows:
            await entry.note(transaction, changed=len(rows))
        return rows

    return await database.in_transaction(write)


async def list_actions(database: Database, *, limit: int = 50, after: UUID | None = None) -> list[Action]:
    """Return actions, the last one first; ``after``: begin behind the action of this id."""
    rows = await database.run_along_index(ACTIONS, {"limit": limit, "after": after})
    return [Action(**row._asdict() | {"target": _object(row.target)}) for row in rows]


def _object(target: Any) -> dict[str, Any]:
    # A role that may write entries may write any JSON value.
    return target if isinstance(target, dict) else {"target": target}


async def prune_actions(database: Database) -> int:
    """Delete entries that were kept for ``KEPT_SECONDS``, and return how many parts they had."""
    parts, rows = 0, None
    while rows is None or len(rows) == _PRUNED_AT_ONCE:
        rows = await database.run(PRUNE_ACTIONS, {"kept": KEPT_SECONDS, "limit": _PRUNED_AT_ONCE})
        parts += len(rows)
    return parts
