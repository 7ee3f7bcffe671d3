"""What statements are built of: SQLAlchemy expressions over ``jobs AS j``, compiled once, when their module is imported."""

import typing
from typing import Any, Final, TypeVar

from sqlalchemy import (
    ARRAY,
    CTE,
    Alias,
    BigInteger,
    BindParameter,
    Cast,
    ColumnElement,
    Double,
    FromClause,
    Function,
    Select,
    TableValuedAlias,
    Text,
    TextClause,
    Uuid,
    bindparam,
    cast,
    column,
    func,
    insert,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.dialects.postgresql.base import PGCompiler, PGDialect
from sqlalchemy.sql import ClauseElement
from sqlalchemy.types import TypeEngine

from jsworker.ownership.schema import job_events, jobs

T = TypeVar("T")

j: Final = typing.cast("Alias", jobs.alias("j"))
"""The row that a statement is about; every predicate names it so."""

NOW: Final[Function[Any]] = func.clock_timestamp()
AT_START: Final[Function[Any]] = func.statement_timestamp()
"""An index can be searched by it; ``clock_timestamp()`` would be compared with every row."""


class _Compiler(PGCompiler):
    """Writes constants into the statement, for a parameter matches no partial index; parameters keep their names."""

    def visit_bindparam(self, bindparam: BindParameter[Any], *_: Any, **kwargs: Any) -> str:
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


def compiled(expression: ClauseElement) -> TextClause:
    """Return a statement that any connection and any session can execute without compiling it anew."""
    return text(sql(expression))


def waiting(statement: TextClause) -> TextClause:
    """Return a statement for many rows as it is for one alone: it waits for the lock."""
    return text(statement.text.replace(" SKIP LOCKED", ""))


def given(name: str, type_: type[TypeEngine[T]] | TypeEngine[T]) -> Cast[T]:
    """Return a parameter of a type."""
    return cast(bindparam(name), type_)


def given_array(name: str, type_: type[TypeEngine[Any]] | TypeEngine[Any]) -> Cast[Any]:
    """Return a parameter that is an array."""
    return cast(bindparam(name), ARRAY(type_))


def given_rows(name: str, **columns: ColumnElement[Any]) -> TableValuedAlias:
    """Return rows that a statement is given as arrays of equal length, one for each column."""
    each = [column(key, array.type.item_type) for key, array in columns.items()]  # type: ignore[attr-defined] # arrays
    return func.unnest(*columns.values()).table_valued(*each, name=name).render_derived(name=name)


def given_runs(name: str, **columns: ColumnElement[Any]) -> TableValuedAlias:
    """Return runs that a statement is given: job ids, fencing tokens and what else belongs to each."""
    return given_rows(name, id=given_array("ids", Uuid), token=given_array("tokens", BigInteger), **columns)


def seconds(value: ColumnElement[Any]) -> Function[Any]:
    """Return an interval of so many seconds."""
    return func.make_interval(literal_column("secs").op("=>")(value))


def given_seconds(name: str) -> Function[Any]:
    """Return a parameter in seconds as an interval."""
    return seconds(given(name, Double))


def stall_back_off(stalls: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return how long a job waits after a counted stall that was not its first; ``stalls`` are those before it."""
    jitter = 0.8 + 0.4 * func.random()
    return seconds(func.least(600, 5 * func.power(2, func.least(stalls - 1, 20))) * jitter)


def json_object(**fields: ColumnElement[Any]) -> Function[Any]:
    """Return a JSON object."""
    return func.jsonb_build_object(*(part for field in fields.items() for part in field), type_=JSONB)


def locked(rows: Select[Any]) -> CTE:
    """Return rows of ``j`` locked in the order of their ids, for two unordered statements deadlock; none is waited for.

    The statement that writes them reads this as ``mine``.
    """
    in_order = rows.order_by(j.c.id).with_for_update(key_share=True, of=j, skip_locked=True)
    return in_order.cte("mine")


def entry(
    source: FromClause,
    event: str | ColumnElement[Any],
    *,
    worker_id: ColumnElement[Any] | None = None,
    **columns: ColumnElement[Any],
) -> CTE:
    """Return an entry in the timeline for each job of ``source``, written by the statement that writes the jobs."""
    values: dict[str, Any] = {
        "job_id": source.c.id,
        "event": cast(event, Text) if isinstance(event, str) else event,
        "fencing_token": source.c.fencing_token,
        **columns,
    }
    if worker_id is not None:
        values["worker_id"] = worker_id
    return insert(job_events).from_select(list(values), select(*values.values())).cte("entry")
