"""EXPIRE: a job that expires before it was ever claimed is cancelled. CLAIM refuses it from then on."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from jsworker.core.errors import DatabaseRefused, TransitionRefused
from jsworker.ownership import predicates, statements
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import RowLocked, RowRefused
from jsworker.ownership.statements import (
    AT_START,
    NOT_HELD,
    NOW,
    compiled,
    entry,
    given_array,
    j,
    json_object,
)
from jsworker.ownership.transitions.refused_rows import RefusedRows, Sweep, run_sweep

_guard: Final = (predicates.waiting, predicates.never_claimed, predicates.is_over)


def _write(mine: sa.CTE) -> sa.TextClause:
    expired = (
        sa.update(j)
        .values(
            status="cancelled", needs_publish=False, finished_at=NOW, failure_reason="expired", **NOT_HELD
        )
        .where(j.c.id == mine.c.id, *_guard)
        .returning(*j.c["id", "kind", "fencing_token", "expires_at"])
        .cte("expired")
    )
    detail = json_object(reason="expired", expires_at=expired.c.expires_at)
    logged = entry(expired, "cancelled", detail=detail)
    return compiled(sa.select(expired.c.id, expired.c.kind).add_cte(logged))


def _expire() -> Sweep:
    over = (predicates.waiting_indexed, j.c.expires_at <= AT_START, predicates.never_claimed)
    limit = sa.bindparam("limit", type_=sa.Integer)
    search = sa.select(j.c.id).where(*over).order_by(j.c.expires_at).limit(limit)
    # Locked in the order of the search: each sweep gets other rows; what never waits needs no lock order.
    taken = search.with_for_update(key_share=True, of=j, skip_locked=True).cte("mine")
    named = sa.select(j.c.id).where(j.c.id == sa.any_(given_array("ids", sa.Uuid)), *_guard)
    find = compiled(search.where(~predicates.set_aside("expire")))
    return Sweep("expire", ("expire",), _write(taken), find, _write(statements.locked(named)))


_EXPIRY: Final = _expire()
EXPIRE: Final = _EXPIRY.at_once

_has_one_of_the_keys: Final = sa.or_(
    *(
        sa.and_(key.is_not(None), key == sa.any_(given_array("unique_keys", sa.Text)))
        for key in (j.c.unique_key, j.c.waiting_key)
    )
)
OVER_BY_KEY: Final = compiled(
    sa.select(j.c.id, sa.func.coalesce(j.c.unique_key, j.c.waiting_key)).where(
        predicates.of_kind, _has_one_of_the_keys, *_guard
    )
)
EXPIRE_HOLDERS: Final = _write(
    statements.locked(sa.select(j.c.id).where(predicates.of_kind, _has_one_of_the_keys, *_guard))
)
"""Cancels expired jobs that hold keys, for a transaction whose other statements need these keys."""

_o: Final = predicates.o
OVER_BESIDE: Final = compiled(
    sa.select(_o.c.id)
    .select_from(j.join(_o, sa.and_(_o.c.kind == j.c.kind, _o.c.id != j.c.id)))
    .where(
        j.c.id == sa.any_(given_array("ids", sa.Uuid)),
        sa.or_(_o.c.unique_key == j.c.unique_key, _o.c.waiting_key == j.c.waiting_key),
        _o.c.status.in_(("scheduled", "queued")),
        _o.c.fencing_token == 0,
        _o.c.expires_at <= NOW,
    )
)
_UNIQUE: Final = ("jobs_unique_live", "jobs_unique_waiting")
_NOT_ALLOWED: Final = "42501"


async def expire(database: Database, *, limit: int, refused_rows: RefusedRows | None = None) -> Sequence[Row]:
    """Cancel up to ``limit`` jobs that have expired and return id and kind of each; refused rows are set aside."""
    values: dict[str, Any] = {"limit": limit}
    return (await run_sweep(database, _EXPIRY, values, refused_rows)).rows


async def free_keys(database: Database, kind: str, unique_keys: Sequence[str | None]) -> None:
    """Cancel expired jobs that still hold one of these keys.

    Raises:
        TransitionRefused: there are some, and this login may not update jobs.
    """
    over = await database.run(OVER_BY_KEY, {"kind": kind, "unique_keys": list(unique_keys)})
    if not over:
        return
    try:
        await database.run(_EXPIRY.write, {"ids": uuid_array([job_id for job_id, _ in over])})
    except DatabaseRefused as error:
        if error.sqlstate != _NOT_ALLOWED:
            raise
        job_id, key = over[0]
        raise TransitionRefused(
            f"unique key {key!r} of kind {kind} is held by job {job_id}, which has expired; "
            "this login may not cancel it, and no worker has done so yet; try again"
        ) from None


async def write_beside_expired(
    database: Database, ids: Iterable[UUID], write: Callable[[], Awaitable[Sequence[Row]]]
) -> Sequence[Row]:
    """Return what ``write`` returns; if expired jobs hold keys of ``ids``, cancel these jobs and write again.

    Raises:
        RowRefused: by ``write``; RowLocked if a locked expired job may hold its key for long.
    """
    try:
        return await write()
    except RowRefused as error:
        if error.constraint not in _UNIQUE:
            raise
        named = {"ids": uuid_array(ids)}
        over = {row.id for row in await database.run(OVER_BESIDE, named)}
        if not over:
            raise
    await database.run(_EXPIRY.write, {"ids": uuid_array(over)})
    try:
        return await write()
    except RowRefused as error:
        if error.constraint not in _UNIQUE:
            raise
        if over.isdisjoint(row.id for row in await database.run(OVER_BESIDE, named)):
            raise  # another job has taken the key since
        raise RowLocked(error.constraint) from None
