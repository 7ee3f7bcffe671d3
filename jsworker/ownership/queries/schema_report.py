"""What the catalogs and statistics show of jsworker's tables, and how they must be."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import CheckConstraint, text
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.schema import CreateIndex

from jsworker.ownership.database import Database
from jsworker.ownership.schema import SCHEMA, metadata

TABLES = text("""
SELECT c.relname AS name, greatest(c.reltuples, 0) AS rows, coalesce(c.reloptions, '{}') AS options,
  coalesce(s.n_dead_tup, 0) AS dead, coalesce(s.n_tup_upd, 0) AS updates, coalesce(s.n_tup_hot_upd, 0) AS hot_updates,
  extract(epoch FROM clock_timestamp() - greatest(s.last_autovacuum, s.last_vacuum)) AS vacuumed_ago,
  greatest(s.n_live_tup, 0) AS live
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
LEFT JOIN pg_stat_user_tables AS s ON s.relid = c.oid
WHERE n.nspname = :schema AND c.relkind IN ('r', 'p') ORDER BY c.relname
""")

INDEXES = text("""
SELECT c.relname AS name, t.relname AS "table", i.indisvalid AND i.indisready AS valid, i.indisunique AS "unique",
  coalesce(s.idx_scan, 0) AS scans, pg_relation_size(c.oid) AS bytes, pg_get_indexdef(c.oid) AS definition
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
JOIN pg_namespace AS n ON n.oid = t.relnamespace
LEFT JOIN pg_stat_user_indexes AS s ON s.indexrelid = c.oid
WHERE n.nspname = :schema ORDER BY c.relname
""")

CONSTRAINTS = text("""
SELECT con.conname AS name, t.relname AS "table", con.convalidated AS valid
FROM pg_constraint AS con
JOIN pg_class AS t ON t.oid = con.conrelid
JOIN pg_namespace AS n ON n.oid = con.connamespace
WHERE n.nspname = :schema AND con.contype = 'c'
""")

# They fire on a plain connection when they are enabled for the origin or always.
TRIGGERS = text("""
SELECT tg.tgname AS name, tg.tgenabled IN ('O', 'A') AS enabled
FROM pg_trigger AS tg
JOIN pg_class AS c ON c.oid = tg.tgrelid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = :schema AND c.relname = 'jobs' AND NOT tg.tgisinternal
""")

_OF_SCHEMA: Final = {"schema": SCHEMA}


@dataclass(frozen=True, slots=True)
class TableState:
    """A table, by the statistics.

    Attributes:
        rows: the planner's estimate.
        options: storage parameters, for example ``fillfactor``.
        live, dead: rows by the statistics.
        hot_updates: of ``updates``, those that touched no index.
        vacuumed_ago: seconds; None: never, as far as is known.
    """

    name: str
    rows: float
    options: Mapping[str, str]
    live: int
    dead: int
    updates: int
    hot_updates: int
    vacuumed_ago: float | None


@dataclass(frozen=True, slots=True)
class IndexState:
    """An index; ``scans`` counts since the statistics were reset."""

    name: str
    table: str
    valid: bool
    unique: bool
    scans: int
    bytes: int
    definition: str


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables as they are.

    Attributes:
        constraints: names of CHECK constraints.
        doubtful: those that old rows may break, each with its table.
        triggers: those on ``jobs`` by name, and whether each fires.
    """

    tables: Mapping[str, TableState]
    indexes: Mapping[str, IndexState]
    constraints: Collection[str]
    doubtful: Mapping[str, str]
    triggers: Mapping[str, bool]


def wanted_indexes() -> dict[str, str]:
    """Return every index that the tables must have by name, with the statement that makes it."""
    compiler = dialect.dialect()  # type: ignore[no-untyped-call] # SQLAlchemy has not typed its dialects
    return {
        str(index.name): " ".join(str(CreateIndex(index).compile(dialect=compiler)).split())
        for table in metadata.tables.values()
        for index in table.indexes
    }


def wanted_constraints() -> set[str]:
    """Return the names of the CHECK constraints that the tables must have."""
    return {
        str(constraint.name)
        for table in metadata.tables.values()
        for constraint in table.constraints
        if isinstance(constraint, CheckConstraint)
    }


def wanted_fillfactors() -> dict[str, str]:
    """Return the fill factor by table, of those that leave room for HOT updates."""
    return {
        table.name: str(table.info["fillfactor"])
        for table in metadata.tables.values()
        if "fillfactor" in table.info
    }


async def read_schema(database: Database) -> Schema:
    """Return how the tables are."""
    tables = await database.run(TABLES, _OF_SCHEMA)
    indexes = await database.run(INDEXES, _OF_SCHEMA)
    constraints = await database.run(CONSTRAINTS, _OF_SCHEMA)
    triggers = await database.run(TRIGGERS, _OF_SCHEMA)
    return Schema(
        tables={
            row.name: TableState(
                name=row.name,
                rows=float(row.rows),
                options=dict(option.split("=", 1) for option in row.options),
                live=int(row.live),
                dead=int(row.dead),
                updates=int(row.updates),
                hot_updates=int(row.hot_updates),
                vacuumed_ago=None if row.vacuumed_ago is None else float(row.vacuumed_ago),
            )
            for row in tables
        },
        indexes={row.name: IndexState(**row._asdict()) for row in indexes},
        constraints={row.name for row in constraints},
        doubtful={row.name: row.table for row in constraints if not row.valid},
        triggers={row.name: row.enabled for row in triggers},
    )
