"""FIRE: the first worker to come turns a schedule's due instant into one job; and how schedules are written.

The row holds the next instant. The statement that inserts the job also replaces it by the instant after that:
a worker that dies before the statement has done nothing, one that dies after it has done everything, and of
two workers that fire at once, the second finds the row locked or changed.
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from jsworker.core.errors import TransitionRefused
from jsworker.core.priorities import NORMAL, PRIORITIES
from jsworker.core.schedule_rules import Schedule, read_schedule
from jsworker.ownership.database import Database
from jsworker.ownership.predicates import live
from jsworker.ownership.schema import jobs, schedules
from jsworker.ownership.statements import NOW, compiled, given, given_array, given_rows, j
from jsworker.ownership.transitions.audit import AuditEntry, run_noted
from jsworker.ownership.transitions.enqueue import new_job_id

s: Final = typing.cast("sa.Alias", schedules.alias("s"))

_TIME: Final = sa.DateTime(timezone=True)
_OF_JOBS: Final = ("name", "kind", "payload", "priority", "limit_key")
"""The columns that a job takes over from its schedule."""
MOST_READ: Final = 100

due_and_seen: Final = sa.and_(
    s.c.name == sa.bindparam("name"),
    s.c.next_at == given("seen", _TIME),
    s.c.revision == sa.bindparam("revision"),
    s.c.next_at <= NOW,
    ~s.c.paused,
)
"""FIRE's guard: the schedule is due and not paused, and was neither fired nor changed since it was read."""


def _has_no_job(instant: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    """Return that an instant is later than the last one that got a job.

    An earlier one may come up again if the clock went back before the rule was changed.
    """
    return sa.or_(s.c.last_at.is_(None), s.c.last_at < instant)


def _unless_ahead(last_at: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return the last instant, or NULL if it lies in the future because the clock was ahead.

    Only writes of operators use this: they alone may let such an instant fire once more.
    """
    return sa.case((last_at <= NOW, last_at))


# A job of a previous kind holds up none of the present one.
_last_job_lives: Final = sa.select(j.c.id).where(j.c.id == s.c.last_job, j.c.kind == s.c.kind, live).exists()


_is_held_up: Final = sa.and_(s.c.overlap == "skip", _last_job_lives)


def _job_of(source: sa.FromClause, instant: sa.ColumnElement[Any]) -> sa.Insert:
    """Return the INSERT of the job of each row of ``source``, as ENQUEUE makes jobs that are due at once."""
    values: dict[str, Any] = {
        "id": given("job_id", sa.Uuid),
        "kind": source.c.kind,
        "payload": source.c.payload,
        "status": sa.literal("queued"),
        "run_at": NOW,
        "dispatch": sa.literal(1),
        "needs_publish": sa.true(),
        "publish_after": NOW,
        "queued_at": NOW,
        "schedule": source.c.name,
        "scheduled_for": instant,
        "priority": source.c.priority,
        "limit_key": source.c.limit_key,
    }
    return sa.insert(jobs).from_select(list(values), sa.select(*values.values()).select_from(source))


def _fire() -> sa.TextClause:
    due = given("due", _TIME)
    mine = (
        sa.select(
            s.c.name,
            sa.and_(due.is_not(None), _has_no_job(due), ~_is_held_up).label("runs"),
            _is_held_up.label("held_up"),
        )
        .where(due_and_seen)
        .with_for_update(skip_locked=True)  # another worker is firing it, or somebody keeps its row locked
        .cte("mine")
    )
    moved = (
        sa.update(s)
        .values(
            next_at=given("then", _TIME),
            last_at=sa.case((mine.c.runs, due), else_=s.c.last_at),
            last_job=sa.case((mine.c.runs, given("job_id", sa.Uuid)), else_=s.c.last_job),
        )
        .where(s.c.name == mine.c.name, due_and_seen)
        .returning(*s.c[_OF_JOBS], mine.c.runs, mine.c.held_up)
        .cte("moved")
    )
    runs = sa.select(moved).where(moved.c.runs).cte("runs")
    created = _job_of(runs, due).cte("created")
    return compiled(sa.select(moved.c.runs, moved.c.held_up).add_cte(created))


def _run_now() -> sa.TextClause:
    described = sa.select(*s.c[_OF_JOBS])
    chosen = described.where(s.c.name == sa.bindparam("name")).cte("chosen")
    created = _job_of(chosen, NOW).cte("created")
    return compiled(sa.select(chosen.c.kind).add_cte(created))


def _write(set_by: Literal["code", "operator"]) -> sa.TextClause:
    """Return the statement that writes an operator's schedules, or the code's, which never replace those."""
    texts = ("name", "kind", "payload", "rule", "tz", "missed", "overlap", "limit_key")
    each = given_rows(
        "each",
        **{name: given_array(f"{name}s", sa.Text) for name in texts},
        priority=given_array("priorities", sa.SmallInteger),
        next_at=given_array("next_ats", _TIME),
    )
    described = [*texts[1:], "priority"]
    columns = ["name", *described, "next_at"]
    # In the order of names: two workers that start at once may wait for each other, but do not deadlock.
    values = [sa.cast(each.c[name], schedules.c[name].type) for name in columns]
    rows = sa.select(*values, sa.literal(set_by)).order_by(each.c.name)
    new = insert(schedules).from_select([*columns, "set_by"], rows)
    same_rule = sa.and_(schedules.c.rule == new.excluded.rule, schedules.c.tz == new.excluded.tz)
    is_same = sa.and_(*(schedules.c[name].is_not_distinct_from(new.excluded[name]) for name in described))
    described_anew: dict[str, Any] = {name: new.excluded[name] for name in described}
    next_at: sa.ColumnElement[Any] = schedules.c.next_at
    if set_by == "code":
        # A schedule of one of this worker's kinds may pass, with its name, to another one of its kinds.
        of_mine = schedules.c.kind == sa.any_(given_array("served", sa.Text))
        may = sa.and_(schedules.c.set_by == "code", of_mine, ~is_same)
    else:
        may = given("replace", sa.Boolean)
        next_at = sa.func.least(next_at, new.excluded.next_at)  # it may be far ahead, as the clock was
        described_anew["last_at"] = _unless_ahead(schedules.c.last_at)
    return compiled(
        new.on_conflict_do_update(
            index_elements=[schedules.c.name],
            set_=described_anew
            | {
                # While the rule is unchanged, the next instant stays, even if it was missed.
                "next_at": sa.case((same_rule, next_at), else_=new.excluded.next_at),
                "set_by": set_by,
                "revision": schedules.c.revision + 1,
            },
            where=may,
        ).returning(schedules.c.next_at)
    )


FIRE = _fire()
RUN_NOW = _run_now()
WRITE_CODE = _write("code")
WRITE_OPERATOR = _write("operator")

# Deletes what the code of a kind no longer has; a running worker of an older version does not write it back.
# A paused one stays, else a version that does not have it yet would end the pause: the next one writes it anew.
FORGET = compiled(
    sa.delete(schedules).where(
        schedules.c.set_by == "code",
        schedules.c.kind == sa.any_(given_array("kinds", sa.Text)),
        schedules.c.name != sa.all_(given_array("names", sa.Text)),
        ~schedules.c.paused,
    )
)
KIND_OF = compiled(sa.select(s.c.name, s.c.kind).where(s.c.name == sa.any_(given_array("names", sa.Text))))

# In the order in which they come due: the first one that is not yet due tells how long to wait.
_read = [
    s.c[name] for name in ("name", "kind", "rule", "tz", "missed", "overlap", "next_at", "revision", "paused")
]
NEXT = compiled(
    sa.select(*_read, NOW.label("now"))
    .where(~s.c.paused, s.c.name != sa.all_(given_array("besides", sa.Text)))
    .order_by(s.c.next_at)
    .limit(MOST_READ)
)

LIST = compiled(
    sa.select(
        *(
            s.c[name]
            for name in ("name", "kind", "rule", "tz", "next_at", "last_at", "last_job", "missed", "overlap")
        ),
        *(s.c[name] for name in ("paused", "set_by", "revision", "payload", "priority", "limit_key")),
        sa.select(j.c.status).where(j.c.id == s.c.last_job).scalar_subquery().label("last_status"),
    )
    .order_by(s.c.next_at, s.c.name)
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
ONE = compiled(sa.select(*_read, NOW.label("now")).where(s.c.name == sa.bindparam("name")))
PRESENT = compiled(sa.select(NOW.label("now")))

PAUSE = compiled(sa.update(s).values(paused=True).where(s.c.name == sa.bindparam("name")).returning(s.c.name))
# Instants that came due during the pause get no job.
RESUME = compiled(
    sa.update(s)
    .values(paused=False, next_at=given("then", _TIME), last_at=_unless_ahead(s.c.last_at))
    .where(s.c.name == sa.bindparam("name"), s.c.revision == sa.bindparam("revision"), s.c.paused)
    .returning(s.c.name)
)
REMOVE = compiled(
    sa.delete(schedules).where(schedules.c.name == sa.bindparam("name")).returning(schedules.c.name)
)


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to write: ``payload`` is JSON text, ``first`` its first instant."""

    name: str
    kind: str
    payload: str
    schedule: Schedule
    first: datetime
    priority: int = NORMAL
    limit_key: str | None = None


def _values(new: Sequence[NewSchedule]) -> dict[str, Any]:
    """Return the parameters of the statements that write schedules."""
    return {
        "names": [each.name for each in new],
        "kinds": [each.kind for each in new],
        "payloads": [each.payload for each in new],
        "rules": [each.schedule.text for each in new],
        "tzs": [each.schedule.tz for each in new],
        "misseds": [each.schedule.missed_text for each in new],
        "overlaps": [each.schedule.overlap for each in new],
        "priorities": [each.priority for each in new],
        "limit_keys": [each.limit_key for each in new],
        "next_ats": [each.first for each in new],
    }


@dataclass(frozen=True, slots=True)
class StoredSchedule:
    """A schedule as it was read at ``now``, the database's time."""

    name: str
    kind: str
    rule: str
    tz: str
    missed: str
    overlap: str
    next_at: datetime
    revision: int
    paused: bool
    now: datetime

    def read(self) -> Schedule:
        """Return the schedule's rule and policies.

        Raises:
            ValueError: this version, or this system, cannot read them.
        """
        return read_schedule(self.rule, self.tz, self.missed, overlap=self.overlap)


@dataclass(frozen=True, slots=True)
class Fired:
    """The result of FIRE: the id of the new job, or None.

    ``held_up``: the schedule's overlap is ``skip``, and its previous job has not ended.
    """

    job_id: UUID | None
    held_up: bool = False


async def upcoming(database: Database, *, besides: Sequence[str] = ()) -> list[StoredSchedule]:
    """Return schedules that are not paused in the order in which they come due, at most 100."""
    return [_stored(row) for row in await database.run(NEXT, {"besides": list(besides)})]


async def fire(
    database: Database, schedule: StoredSchedule, *, seen: datetime, instant: datetime | None, then: datetime
) -> Fired | None:
    """Enqueue the job of an instant and move the schedule on; None: its row was changed or locked meanwhile.

    Args:
        database: the database.
        schedule: the schedule as it was read.
        seen: the next instant that its row must still hold.
        instant: the instant that gets a job; None: no job, the schedule is only moved on.
        then: the instant at which the schedule is due next, which its row then holds.
    """
    job_id = new_job_id()
    values = {
        "name": schedule.name,
        "revision": schedule.revision,
        "seen": seen,
        "due": instant,
        "then": then,
    }
    rows = await database.run(FIRE, values | {"job_id": job_id})
    return Fired(job_id if rows[0].runs else None, rows[0].held_up) if rows else None


async def database_now(database: Database) -> datetime:
    """Return the database's time, by which schedules come due."""
    [row] = await database.run(PRESENT)
    now: datetime = row.now
    return now.astimezone(UTC)


async def write_code(
    database: Database, *, kinds: Sequence[str], new: Sequence[NewSchedule]
) -> dict[str, str]:
    """Write the schedules that the code of these kinds has, and delete those that it no longer has.

    A schedule that an operator has set under one of the names stays, and so does one that is paused.

    Returns:
        Names that a schedule of another kind has, each with that kind; nothing was written for them.
    """
    names = [each.name for each in new]
    # In this order: two versions that start at once would delete each other's schedules.
    await database.run(FORGET, {"kinds": list(kinds), "names": names})
    if new:
        await database.run(WRITE_CODE, _values(new) | {"served": list(kinds)})
    rows = await database.run(KIND_OF, {"names": names}) if new else ()
    kind_of = {each.name: each.kind for each in new}
    return {row.name: row.kind for row in rows if row.kind != kind_of[row.name]}


async def add(
    database: Database, new: NewSchedule, *, replace: bool, entry: AuditEntry | None = None
) -> datetime:
    """Write an operator's schedule and return when it is due next; one that is paused stays paused.

    Raises:
        TransitionRefused: there is one of that name, and ``replace`` is not set.
    """
    rows = await run_noted(database, WRITE_OPERATOR, _values([new]) | {"replace": replace}, entry)
    if not rows:
        raise TransitionRefused(f"there is a schedule {new.name!r} already")
    next_at: datetime = rows[0].next_at
    return next_at.astimezone(UTC)


async def list_schedules(database: Database, *, limit: int | None = None) -> list[dict[str, Any]]:
    """Return all schedules or the first ``limit``, each as a dict by column name, the next one due first.

    ``last_status`` is the status of the schedule's last job; ``priority`` is a word.
    """
    rows = await database.run(LIST, {"limit": limit})
    return [row._asdict() | {"priority": PRIORITIES[row.priority]} for row in rows]


async def pause(database: Database, name: str, *, entry: AuditEntry | None = None) -> None:
    """Keep a schedule from firing until it is resumed."""
    _found(name, await run_noted(database, PAUSE, {"name": name}, entry))


async def resume(database: Database, name: str, *, entry: AuditEntry | None = None) -> datetime:
    """Resume a schedule and return when it is due next; instants during the pause get no job."""
    [row] = _found(name, await database.run(ONE, {"name": name}))
    stored = _stored(row)
    if not stored.paused:
        return stored.next_at
    try:
        then = stored.read().after(stored.now)
    except ValueError as error:
        raise TransitionRefused(f"schedule {name!r}: {error}") from None
    values = {"name": name, "revision": stored.revision, "then": then}
    if not await run_noted(database, RESUME, values, entry):
        raise TransitionRefused(f"schedule {name!r} was changed this very moment; look at it again")
    return then


async def run_now(database: Database, name: str, *, entry: AuditEntry | None = None) -> UUID:
    """Enqueue a job of a schedule at once, in addition to those of its instants, and return its id."""
    job_id = new_job_id()
    _found(name, await run_noted(database, RUN_NOW, {"name": name, "job_id": job_id}, entry))
    return job_id


async def remove(database: Database, name: str, *, entry: AuditEntry | None = None) -> None:
    """Delete a schedule; its jobs stay. The next worker that starts with it in its code writes it again."""
    _found(name, await run_noted(database, REMOVE, {"name": name}, entry))


def _found(name: str, rows: Sequence[Any]) -> Sequence[Any]:
    if not rows:
        raise TransitionRefused(f"there is no schedule {name!r}")
    return rows


def _stored(row: Any) -> StoredSchedule:
    # In UTC, because Python subtracts two datetimes of one time zone by their wall clocks.
    stored = StoredSchedule(*row)
    return replace(stored, next_at=stored.next_at.astimezone(UTC), now=stored.now.astimezone(UTC))
