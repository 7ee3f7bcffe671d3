"""What PostgreSQL itself says a schema is made of, in words that two schemas can be compared by."""

from typing import Any

from .rows import Sql

_COLUMNS = """
SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull,
  a.attidentity, a.attgenerated, a.attcollation::regcollation::text AS collation,
  pg_get_expr(d.adbin, d.adrelid) AS default
FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = 'jsworker'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
"""
_CONSTRAINTS = """
SELECT conrelid::regclass::text AS relation, conname, contype, convalidated,
  pg_get_constraintdef(oid) AS definition
FROM pg_constraint WHERE connamespace = 'jsworker'::regnamespace
"""
_INDEXES = """
SELECT i.indrelid::regclass::text AS relation, pg_get_indexdef(i.indexrelid) AS definition, c.reloptions
FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid WHERE c.relnamespace = 'jsworker'::regnamespace
"""
_TRIGGERS = """
SELECT t.tgenabled, pg_get_triggerdef(t.oid) AS definition
FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
WHERE c.relnamespace = 'jsworker'::regnamespace AND NOT t.tgisinternal
"""
_FUNCTIONS = """
SELECT pg_get_functiondef(oid) AS definition FROM pg_proc WHERE pronamespace = 'jsworker'::regnamespace
"""
_RELATIONS = """
SELECT relname, relkind, relpersistence, reloptions FROM pg_class
WHERE relnamespace = 'jsworker'::regnamespace
"""
_PARTS = {
    "columns": _COLUMNS,
    "constraints": _CONSTRAINTS,
    "indexes": _INDEXES,
    "triggers": _TRIGGERS,
    "functions": _FUNCTIONS,
    "relations": _RELATIONS,
}


def describe_schema(sql: Sql) -> dict[str, list[tuple[Any, ...]]]:
    """Return every part of schema ``jsworker`` but alembic's own table, sorted."""
    return {name: _sorted(sql, query) for name, query in _PARTS.items()}


def _sorted(sql: Sql, query: str) -> list[tuple[Any, ...]]:
    rows = [tuple(row.values()) for row in sql.execute(query.encode())]
    return sorted((row for row in rows if "alembic_version" not in str(row)), key=str)
