"""Parts of SQL statements: SQLAlchemy expressions over ``jobs AS j``, each compiled once."""

import typing
from collections.abc import Callable
from typing import Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql.base import PGCompiler, PGDialect
from sqlalchemy.sql import ClauseElement
from sqlalchemy.types import TypeEngine

from jsworker.ownership.schema import job_events, jobs

T = TypeVar("T")

j: Final = typing.cast("sa.Alias", jobs.alias("j"))
"""The row that a statement is about; every predicate uses this alias."""

NOW: Final[sa.Function[Any]] = sa.func.clock_timestamp()
AT_START: Final[sa.Function[Any]] = sa.func.statement_timestamp()
"""Can be used to search an index; ``clock_timestamp()`` would be compared with every row."""

WAITS_BRIEFLY: Final = sa.text("(SELECT set_config('lock_timeout', '200ms', true)) IS NOT NULL")
"""Lets a statement fail that would wait for the transaction of a producer or a job, which may last as long as it likes:
one that takes a unique key, or adds to the same batch. Tables are locked before it counts."""
NO_OWNER: Final = {"worker_id": sa.null(), "last_activity_at": sa.null()}
"""The values written when a job leaves ``processing``."""
BOUNDED_TEXTS: Final = {
    name: sa.func.left(j.c[name], most).label(name)
    for name, most in {"clear_reason": 1_000, "traceparent": 56, "tracestate": 513}.items()
}
"""Texts that a row may hold at any length, cut where a batch of rows is read: all of them together would fill the
memory. A valid trace context is shorter by a character at least, so one that is cut stays invalid."""
NOT_HELD: Final = dict.fromkeys(("held_by", "held_at", "due_at"), sa.null())
"""The values written when a job is no longer held."""


class _Compiler(PGCompiler):
    """Writes constants as literals, as a parameter matches no partial index; parameters keep their names."""

    def visit_bindparam(self, bindparam: sa.BindParameter[Any], *_: Any, **kwargs: Any) -> str:
        if bindparam.required:
            return f":{bindparam.key}"
        return str(super().visit_bindparam(bindparam, **kwargs | {"literal_binds": True}))  # type: ignore[no-untyped-call] # SQLAlchemy has not typed its compilers

    def render_literal_value(self, value: Any, type_: TypeEngine[Any]) -> str:
        return str(super().render_literal_value(value, type_)).replace(":", r"\:")  # type: ignore[no-untyped-call] # as above


class _Dialect(PGDialect):
    statement_compiler = _Compiler
    supports_statement_cache = False


_DIALECT: Final = _Dialect(paramstyle="named")  # type: ignore[no-untyped-call] # as above


def sql(expression: ClauseElement) -> str:
    """Return an expression as SQL with ``:name`` for each parameter."""
    return "\n".join(line.strip() for line in str(expression.compile(dialect=_DIALECT)).splitlines())


def condition(predicate: sa.ColumnElement[bool]) -> str:
    """Return a predicate as SQL, for a statement about ``jsworker.jobs AS j`` that reads better as text."""
    _, _, where = sql(sa.select().select_from(j).where(predicate)).partition("\nWHERE ")
    return where


def filled(template: str, **parts: str) -> sa.TextClause:
    """Return a template as a statement, each ``{name}`` in it replaced by the part of that name."""
    for name, part in parts.items():
        template = template.replace(f"{{{name}}}", part)
    return sa.text(template)


def json_size(value: str, most_bytes: int) -> str:
    """Return as SQL the bytes of a JSON value's text, or as stored, perhaps compressed, if those exceed the most.

    The size as stored is known without reading the value, so such a large one is not read.
    """
    stored, text = f"pg_column_size({value})", f"octet_length(CAST({value} AS text))"
    return f"CASE WHEN {stored} <= {most_bytes} THEN {text} ELSE {stored} END"


KINDS_BY_LEAPS: Final = """kinds AS (
  (SELECT j.kind FROM jsworker.jobs AS j WHERE {queued}{which} ORDER BY j.kind LIMIT 1)
  UNION ALL
  SELECT (SELECT j.kind FROM jsworker.jobs AS j
          WHERE {queued}{which} AND j.kind > kinds.kind ORDER BY j.kind LIMIT 1)
  FROM kinds WHERE kinds.kind IS NOT NULL
)"""
"""Of a WITH RECURSIVE: queued kinds, found by leaps through the index; the reader takes a limited number of them, for
producers invent kinds as they like."""


class _LateText(sa.TextClause):
    """A text that is made when it is first needed, because a process uses few of all statements."""

    inherit_cache = True

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name not in {"text", "_bindparams"}:  # the attributes that TextClause.__init__ sets
            raise AttributeError(name)
        super().__init__(self._make())
        return getattr(self, name)


def compiled(expression: ClauseElement) -> sa.TextClause:
    """Return a statement that is compiled once, and that any connection and any session can execute."""
    return _LateText(lambda: sql(expression))


def waiting(statement: sa.TextClause) -> sa.TextClause:
    """Return the statement without SKIP LOCKED, for one row: it waits for the lock."""
    return _LateText(lambda: statement.text.replace(" SKIP LOCKED", ""))


def given(name: str, type_: type[TypeEngine[T]] | TypeEngine[T]) -> sa.Cast[T]:
    """Return a parameter of a type."""
    return sa.cast(sa.bindparam(name), type_)


def given_array(name: str, type_: type[TypeEngine[Any]] | TypeEngine[Any]) -> sa.Cast[Any]:
    """Return a parameter that is an array."""
    return sa.cast(sa.bindparam(name), sa.ARRAY(type_))


def given_rows(name: str, /, **columns: sa.ColumnElement[Any]) -> sa.TableValuedAlias:
    """Return the rows of a statement's parameters: arrays of equal length, one for each column."""
    each = [sa.column(key, array.type.item_type) for key, array in columns.items()]  # type: ignore[attr-defined] # arrays
    return sa.func.unnest(*columns.values()).table_valued(*each, name=name).render_derived(name=name)


def given_runs(name: str, **columns: sa.ColumnElement[Any]) -> sa.TableValuedAlias:
    """Return runs from a statement's parameters: job ids, fencing tokens and further columns."""
    return given_rows(
        name, id=given_array("ids", sa.Uuid), token=given_array("tokens", sa.BigInteger), **columns
    )


def seconds(value: sa.ColumnElement[Any]) -> sa.Function[Any]:
    """Return a number of seconds as an interval."""
    return sa.func.make_interval(sa.literal_column("secs").op("=>")(value))


def given_seconds(name: str) -> sa.Function[Any]:
    """Return a parameter in seconds as an interval."""
    return seconds(given(name, sa.Double))


def stall_back_off(stalls: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """Return how long a job waits after a counted stall that was not its first; ``stalls`` are those before it."""
    jitter = 0.8 + 0.4 * sa.func.random()
    return seconds(sa.func.least(600, 5 * sa.func.power(2, sa.func.least(stalls - 1, 20))) * jitter)


def json_object(**fields: Any) -> sa.Function[Any]:
    """Return a JSON object."""
    return sa.func.jsonb_build_object(*(part for field in fields.items() for part in field), type_=JSONB)


def locked(rows: sa.Select[Any], name: str = "mine") -> sa.CTE:
    """Return rows of ``j`` locked in the order of ids, which avoids deadlocks; locked rows are skipped."""
    in_order = rows.order_by(j.c.id).with_for_update(key_share=True, of=j, skip_locked=True)
    return in_order.cte(name)


def entry(
    source: sa.FromClause,
    event: str | sa.ColumnElement[Any],
    *,
    when: sa.ColumnElement[bool] | None = None,
    worker_id: sa.ColumnElement[Any] | None = None,
    **columns: sa.ColumnElement[Any],
) -> sa.CTE:
    """Return an entry in the timeline for each job of ``source``, written by the statement that writes the jobs."""
    values: dict[str, Any] = {
        "job_id": source.c.id,
        "event": sa.literal(event) if isinstance(event, str) else event,
        "fencing_token": source.c.fencing_token,
        **columns,
    }
    if worker_id is not None:
        values["worker_id"] = worker_id
    rows = sa.select(*values.values())
    if when is not None:
        rows = rows.where(when)
    return sa.insert(job_events).from_select(list(values), rows).cte("entry")
