"""What the catalogs show of jsworker's tables, and how they must be."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from sqlalchemy import CheckConstraint, text
from sqlalchemy.dialects.postgresql import psycopg as dialect
from sqlalchemy.schema import CreateIndex

from jsworker.ownership.database import Database
from jsworker.ownership.schema import metadata

INDEXES = text("""
SELECT c.relname AS name, t.relname AS "table", i.indisvalid AND i.indisready AS valid,
  pg_get_indexdef(c.oid) AS definition
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
WHERE t.relnamespace = to_regnamespace('jsworker') ORDER BY c.relname
""")

CONSTRAINTS = text("""
SELECT con.conname AS name, t.relname AS "table", con.convalidated AS valid
FROM pg_constraint AS con
JOIN pg_class AS t ON t.oid = con.conrelid
WHERE con.connamespace = to_regnamespace('jsworker') AND con.contype = 'c'
""")

# They fire on a plain connection when they are enabled for the origin or always.
TRIGGERS = text("""
SELECT tg.tgname AS name, tg.tgenabled IN ('O', 'A') AS enabled
FROM pg_trigger AS tg
JOIN pg_class AS c ON c.oid = tg.tgrelid
WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relname = 'jobs' AND NOT tg.tgisinternal
""")


@dataclass(frozen=True, slots=True)
class IndexState:
    """An index, with the statement that makes it."""

    name: str
    table: str
    valid: bool
    definition: str


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables as they are.

    Attributes:
        constraints: names of CHECK constraints.
        doubtful: those that old rows may break, each with its table.
        triggers: those on ``jobs`` by name, and whether each fires.
    """

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


async def read_schema(database: Database) -> Schema:
    """Return how the tables are."""
    constraints = await database.run(CONSTRAINTS)
    return Schema(
        indexes={row.name: IndexState(*row) for row in await database.run(INDEXES)},
        constraints={row.name for row in constraints},
        doubtful={row.name: row.table for row in constraints if not row.valid},
        triggers={row.name: row.enabled for row in await database.run(TRIGGERS)},
    )
