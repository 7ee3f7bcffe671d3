"""Statements as a driver takes them, for transactions that are not SQLAlchemy's."""

from typing import Any, Final

from sqlalchemy import TextClause
from sqlalchemy.dialects.postgresql import psycopg

_DIALECT: Final = psycopg.dialect()  # type: ignore[no-untyped-call] # SQLAlchemy has not typed its dialects


def for_psycopg(statement: TextClause) -> tuple[str, dict[str, Any]]:
    """Return a statement's SQL and parameters for ``cursor.execute`` of psycopg 3 or psycopg2."""
    compiled = statement.compile(dialect=_DIALECT)
    return str(compiled), dict(compiled.params)
