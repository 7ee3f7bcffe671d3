"""STEP: the result of a run's step is stored under the run's fence, and found by later runs of the job.

The steps of a job stay until the job is pruned: a reset, a retry by hand and a release delete none of them.
Only DEBOUNCE, which replaces the payload, deletes them.
"""

from typing import Any, Final, NamedTuple
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB, insert

from jsworker.ownership.database import Database
from jsworker.ownership.predicates import mine, next_progress
from jsworker.ownership.schema import job_steps
from jsworker.ownership.statements import (
    NOW,
    compiled,
    entry,
    given,
    given_seconds,
    j,
    json_object,
    json_size,
)
from jsworker.ownership.transitions.heartbeat import Held, by_owner, run_owned
from jsworker.ownership.transitions.timeline import rejected

SHOWN_BYTES: Final = 16 * 1024
"""A listing leaves out results that are longer, as text or as stored."""
_MOST_LISTED: Final = 1000

_s = job_steps.alias("s")
_mine = mine(sa.bindparam("token"))


def _found() -> sa.TextClause:
    """Return the search for a step; no row: the job is lost."""
    kept = sa.and_(_s.c.job_id == j.c.id, _s.c.name == given("name", sa.Text))
    others = job_steps.alias("others")
    return compiled(
        sa.select(
            j.c.id,
            _s.c.name.is_not(None).label("is_done"),
            sa.cast(_s.c.result, sa.Text).label("result"),
            sa.cast(sa.extract("epoch", _s.c.sleeps_until - NOW), sa.Double).label("sleeps"),
            sa.select(sa.func.count()).where(others.c.job_id == j.c.id).scalar_subquery().label("steps"),
        )
        .select_from(j.outerjoin(_s, kept))
        .where(j.c.id == sa.bindparam("id"), _mine)
    )


def _step() -> sa.TextClause:
    """Return STEP. It keeps the first result.

    The same run writes again if the answer was lost, or if it was cancelled while it wrote and uses the name anew.
    """
    written = (
        sa.update(j)
        .values(last_activity_at=NOW, progress_at=next_progress)
        .where(j.c.id == sa.bindparam("id"), _mine)
        .returning(*j.c["id", "fencing_token", "worker_id"])
        .cte("written")
    )
    values = {
        "job_id": written.c.id,
        "name": given("name", sa.Text),
        "result": given("result", JSONB),
        "fencing_token": written.c.fencing_token,
        "sleeps_until": NOW + given_seconds("sleeps"),
    }
    kept = (
        insert(job_steps)
        .from_select(list(values), sa.select(*values.values()))
        .on_conflict_do_nothing()
        .returning(job_steps.c.job_id.label("id"), *job_steps.c["name", "fencing_token", "sleeps_until"])
        .cte("kept")
    )
    what = sa.case((kept.c.sleeps_until.is_(None), "step"), else_="sleep")
    detail = json_object(step=kept.c.name, until=kept.c.sleeps_until)
    kept_entry = entry(
        kept,
        what,
        worker_id=given("worker_id", sa.Text),
        detail=sa.func.jsonb_strip_nulls(detail),
    )
    run = sa.select(given("id", sa.Uuid).label("id"), given("token", sa.BigInteger).label("token"))
    late = rejected(run.subquery("late"), ~sa.select(written.c.id).exists()).cte("late_entry")
    is_new = sa.select(kept.c.id).exists().label("is_new")
    return compiled(sa.select(written.c.id, is_new).add_cte(kept_entry, late))


FOUND = _found()
STEP = _step()

STEPS = sa.text(f"""
SELECT name, CASE WHEN {json_size("result", SHOWN_BYTES)} <= {SHOWN_BYTES} THEN result END AS result,
  coalesce(pg_column_size(result), 0) AS stored_bytes, fencing_token, at, sleeps_until
FROM jsworker.job_steps WHERE job_id = :id ORDER BY at, name LIMIT {_MOST_LISTED}
""")  # noqa: S608 -- constants


class FoundStep(NamedTuple):
    """What is known of a step.

    Attributes:
        is_done: whether its result is stored already.
        result: the result as JSON text; None: it returned nothing.
        sleeps: for a sleep, the seconds until it is over, negative after that; None: the step is no sleep.
        steps: how many steps the job has.
    """

    is_done: bool
    result: str | None
    sleeps: float | None
    steps: int


async def find_step(
    database: Database, *, worker_id: str, held: Held, name: str, seconds: float | None = None
) -> FoundStep:
    """Return what is known of a step of a run; raise OwnershipLost if the run no longer owns its job."""
    rows = await run_owned(database, FOUND, by_owner(worker_id, held) | {"name": name}, seconds)
    return FoundStep(*rows[0][1:])


async def keep_step(
    database: Database,
    *,
    worker_id: str,
    held: Held,
    name: str,
    result: str | None,
    sleeps: float | None = None,
    tries: int = 0,
) -> bool:
    """Store the result of a step, as JSON text, or how many seconds it sleeps; False: it was stored before.

    Args:
        tries: earlier tries that got no answer; after each of them the statement may take longer.

    Raises:
        OwnershipLost: the run no longer owns the job; only an earlier, unanswered try can have stored it.
    """
    values = by_owner(worker_id, held) | {"name": name, "result": result, "sleeps": sleeps, "write": "step"}
    rows = await run_owned(database, STEP, values, database.seconds_for(len(result or ""), tries=tries))
    return bool(rows[0].is_new)


async def steps_of(database: Database, job_id: UUID) -> list[dict[str, Any]]:
    """Return the steps of a job in their order, each as a dict; ``result`` is None if it is too long."""
    seconds = database.seconds_for(_MOST_LISTED * SHOWN_BYTES)
    return [row._asdict() for row in await database.run(STEPS, {"id": job_id}, seconds=seconds)]
