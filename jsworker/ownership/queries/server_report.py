"""What PostgreSQL reports of itself, of this login and of the tables, and what the tables must be like."""

import asyncio
import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias

import psycopg
from sqlalchemy import Constraint, ForeignKeyConstraint, Index, PrimaryKeyConstraint, text
from sqlalchemy.schema import CreateIndex

from jsworker.ownership.database import Database
from jsworker.ownership.pool import DIALECT, Connection, Row, backend_of, connect
from jsworker.ownership.schema import metadata
from jsworker.ownership.session_settings import ENCODING, SESSION_SETTINGS

_LINK_SECONDS: Final = 10.0
_SHARING_ROUNDS: Final = 5

_NEEDED_RIGHTS: Final = {
    "jobs": "SELECT INSERT UPDATE DELETE",
    "job_events": "SELECT INSERT DELETE",
    "workers": "SELECT INSERT UPDATE DELETE",
    "installation": "SELECT INSERT",
    "dead_messages": "SELECT INSERT DELETE",
    "refused_rows": "SELECT INSERT UPDATE DELETE",
    "untold_resets": "SELECT INSERT DELETE",
    "schedules": "SELECT INSERT UPDATE DELETE",
    "limits": "SELECT INSERT UPDATE DELETE",
    "unique_windows": "SELECT INSERT UPDATE DELETE",
    "job_steps": "SELECT INSERT DELETE",
    "workflows": "SELECT INSERT UPDATE DELETE",
    "batches": "SELECT INSERT UPDATE DELETE",
    "batch_needs": "SELECT INSERT",
    "statistics": "SELECT INSERT UPDATE DELETE",
    "audit": "SELECT INSERT DELETE",
    "alembic_version": "SELECT",
}
"""The privileges on each table that the statements of a worker need."""
_NEEDED_OF_A_COLUMN: Final = ("untold_resets", "UPDATE", "at")

_OF_ROLES: Final = ", ".join(
    f"'jsworker_{role}'"
    for role in ("owner", "worker", "producer", "publisher", "reader", "metrics", "debouncer", "operator")
)
"""The roles of deploy/postgres/roles.sql."""
_OF_SESSIONS: Final = ", ".join(f"'{name}'" for name in (*SESSION_SETTINGS, ENCODING))

# Without pg_read_all_stats the type of other roles' backends is not shown, but the login and database of each is; nor
# are their waits and the state of standbys, but there is a row for each standby.
SERVER = text(f"""
SELECT r.rolname AS role, r.rolsuper AS superuser, r.rolconnlimit AS role_limit, d.datconnlimit AS database_limit,
  array(SELECT CAST(its.rolname AS text) FROM pg_roles AS its
    WHERE its.rolname IN ({_OF_ROLES}) AND pg_has_role(r.oid, its.oid, 'MEMBER') ORDER BY 1) AS member_of,
  pg_is_in_recovery() AS standby,
  CAST(current_setting('server_version_num') AS integer) AS version,
  (SELECT count(*) FROM pg_stat_activity WHERE usesysid IS NOT NULL AND datid IS NOT NULL) AS connections,
  (SELECT count(*) FROM pg_stat_replication WHERE coalesce(sync_state, 'sync') IN ('sync', 'quorum')) AS confirming,
  (SELECT count(*) FROM pg_stat_activity
   WHERE wait_event = 'SyncRep' AND clock_timestamp() - query_start > interval '1 s') AS unconfirmed,
  oldest.datname AS oldest_database, oldest.ids_used,
  (SELECT jsonb_object_agg(name, setting) FROM pg_settings WHERE name IN (
    'server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'synchronous_standby_names',
    'default_transaction_read_only', 'autovacuum', 'track_counts', 'max_connections', 'superuser_reserved_connections', 'reserved_connections',
    'statement_timeout', 'transaction_timeout', {_OF_SESSIONS})) AS settings
FROM pg_roles AS r, pg_database AS d,
  (SELECT datname, greatest(age(datfrozenxid), mxid_age(datminmxid)) AS ids_used FROM pg_database ORDER BY 2 DESC LIMIT 1)
    AS oldest
WHERE r.rolname = current_user AND d.datname = current_database()
""")  # noqa: S608 -- constants

# By the oids of the tables, because their names cannot be looked up in a schema that the role may not use.
RIGHTS = text("""
SELECT c.relname AS "table", needed.privilege || coalesce(' (' || needed.of_column || ')', '') AS privilege
FROM unnest(CAST(:tables AS text[]), CAST(:privileges AS text[]), CAST(:columns AS text[]))
  AS needed(name, privilege, of_column)
JOIN pg_class AS c ON c.relname = needed.name AND c.relkind IN ('r', 'p')
  AND c.relnamespace = to_regnamespace('jsworker')
WHERE NOT CASE WHEN needed.of_column IS NULL THEN has_table_privilege(c.oid, needed.privilege)
  ELSE has_column_privilege(c.oid, needed.of_column, needed.privilege) END
UNION ALL
SELECT NULL, 'USAGE' WHERE NOT has_schema_privilege(to_regnamespace('jsworker'), 'USAGE')
""")

# Triggers fire on a plain connection when they are enabled for the origin or always.
CATALOG = text("""
SELECT 'index' AS what, c.relname AS name, t.relname AS "table", i.indisvalid AND i.indisready AS holds,
  concat(CASE WHEN i.indisunique THEN 'UNIQUE ' END, t.relname, ' (', (
    SELECT string_agg(coalesce(a.attname, '…'), ', ' ORDER BY k.place)
    FROM unnest(i.indkey) WITH ORDINALITY AS k(attribute, place)
    LEFT JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attribute
  ), ')', CASE WHEN i.indpred IS NOT NULL THEN ' WHERE …' END) AS shape
FROM pg_index AS i
JOIN pg_class AS c ON c.oid = i.indexrelid
JOIN pg_class AS t ON t.oid = i.indrelid
WHERE t.relnamespace = to_regnamespace('jsworker')
UNION ALL
SELECT 'constraint', con.conname, NULL, NULL, NULL
FROM pg_constraint AS con
WHERE con.connamespace = to_regnamespace('jsworker') AND con.conrelid <> 0 AND con.contype IN ('c', 'p', 'f')
UNION ALL
SELECT 'table', c.relname, c.relname, c.relpersistence <> 'u', NULL
FROM pg_class AS c WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relkind IN ('r', 'p')
UNION ALL
SELECT 'filtered', c.relname, c.relname, EXISTS (SELECT FROM pg_policy AS p WHERE p.polrelid = c.oid), NULL
FROM pg_class AS c
WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relrowsecurity AND row_security_active(c.oid)
UNION ALL
SELECT 'unvacuumed', c.relname, NULL, NULL, NULL
FROM pg_class AS c, pg_options_to_table(c.reloptions) AS o
WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relkind = 'r'
  AND o.option_name = 'autovacuum_enabled' AND NOT CAST(o.option_value AS boolean)
UNION ALL
SELECT 'trigger', tg.tgname, c.relname, tg.tgenabled IN ('O', 'A'), NULL
FROM pg_trigger AS tg JOIN pg_class AS c ON c.oid = tg.tgrelid
WHERE c.relnamespace = to_regnamespace('jsworker') AND c.relname = 'jobs' AND NOT tg.tgisinternal
ORDER BY what, name
""")

# Locks that keep others from writing: not those of VACUUM and of CREATE INDEX CONCURRENTLY, not those of readers, unless
# somebody waits for one's lock on a table, behind whom all others wait, and not those of a commit that waits for a
# synchronous standby: to end it would show others what no standby has. A login that is neither of the same role nor in
# pg_read_all_stats does not see how long a transaction has been open.
HOLDERS = text("""
WITH kept_waiting AS MATERIALIZED (
  SELECT unnest(pg_blocking_pids(w.pid)) AS by FROM pg_locks AS w JOIN pg_class AS c ON c.oid = w.relation
  WHERE NOT w.granted AND w.locktype = 'relation' AND c.relnamespace = to_regnamespace('jsworker')
    AND w.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT h.transaction, h.pid, p.gid, coalesce(a.usename, p.owner) AS role, h.tables,
  CAST(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)) AS double precision) AS seconds,
  (SELECT count(DISTINCT w.pid) FROM pg_locks AS w
   WHERE NOT w.granted AND coalesce(h.pid, 0) = ANY (pg_blocking_pids(w.pid))) AS waiting
FROM (
  SELECT l.virtualtransaction AS transaction, l.pid, array_agg(DISTINCT CAST(c.relname AS text)) AS tables
  FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation AND c.relkind IN ('r', 'p')
  WHERE c.relnamespace = to_regnamespace('jsworker') AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND (l.mode NOT IN ('AccessShareLock', 'ShareUpdateExclusiveLock')
      OR l.mode = 'AccessShareLock' AND l.pid IN (SELECT by FROM kept_waiting))
  GROUP BY l.virtualtransaction, l.pid
) AS h
LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
LEFT JOIN pg_locks AS x ON h.pid IS NULL AND x.pid IS NULL AND x.virtualtransaction = h.transaction
  AND x.locktype = 'transactionid' AND x.granted
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = x.transactionid
WHERE a.wait_event IS DISTINCT FROM 'SyncRep'
ORDER BY waiting DESC, seconds DESC NULLS LAST LIMIT 20
""")
HELD_SECONDS: Final = 30.0
"""Transactions that hold locks on jsworker's tables are reported from this age on, or if others wait for them."""
_SEEN_SECONDS: Final = 3.0
"""A transaction whose age is not visible is reported if it is seen again after this time."""

Sharing: TypeAlias = Literal["direct", "statement", "transaction", "unclear"]
"""Whether a pooler is in between, and what it lends a server connection for: a statement, a transaction, or
(``unclear``) a session, unless it was too busy for us to find out."""


@dataclass(frozen=True, slots=True)
class Server:
    """The server and this login.

    Attributes:
        member_of: those of the roles of ``deploy/postgres/roles.sql`` that it is a member of.
        role_limit, database_limit: connections allowed; -1: no limit.
        version: as PostgreSQL counts: 180004 is 18.4.
        confirming: synchronous standbys that are connected; where this login may not see which are, all standbys.
        unconfirmed: sessions that have waited for a synchronous standby for a second, of those that this login may see.
        ids_used: transaction ids or multixacts since the last full VACUUM of ``oldest_database``, whose is the longest ago.
        settings: PostgreSQL's own, as text in their base units.
    """

    role: str
    superuser: bool
    role_limit: int
    database_limit: int
    member_of: Sequence[str]
    standby: bool
    version: int
    connections: int
    confirming: int
    unconfirmed: int
    oldest_database: str
    ids_used: int
    settings: Mapping[str, str]


class MissingRight(NamedTuple):
    """A privilege that a worker needs and this role lacks; ``table`` is None for the schema."""

    table: str | None
    privilege: str


@dataclass(frozen=True, slots=True)
class Link:
    """The connection to the server or a pooler: whether it uses TLS, and whether its other end is on this machine."""

    encrypted: bool
    local: bool
    sharing: Sharing


class Holder(NamedTuple):
    """A transaction that holds locks on jsworker's tables.

    Attributes:
        pid: of its session; None: it is a prepared transaction, and has the name ``gid``.
        seconds: how long it has been open; None: this login may not see it, and it is older than a few seconds.
        waiting: number of sessions that wait for it.
    """

    transaction: str
    pid: int | None
    gid: str | None
    role: str | None
    tables: Sequence[str]
    seconds: float | None
    waiting: int


class IndexState(NamedTuple):
    """An index; one that is not ``valid`` is never read.

    ``shape`` is its table and columns, with ``…`` for expressions, and whether it is unique and partial. PostgreSQL
    writes expressions and conditions in its own words, so they are left out.
    """

    name: str
    table: str
    valid: bool
    shape: str


class Schema(NamedTuple):
    """The tables, and the indexes, constraints and triggers that they have.

    Attributes:
        tables: their names.
        unlogged: names of tables that PostgreSQL empties after a crash.
        constraints: names of CHECK constraints, primary keys and foreign keys.
        triggers: those on ``jobs`` by name, and whether each fires.
        filtered: names of tables of which row-level security hides rows from this login, and whether there is a
            policy that may show it some.
        unvacuumed: names of tables that autovacuum leaves out.
    """

    tables: Collection[str]
    indexes: Mapping[str, IndexState]
    unlogged: Collection[str]
    constraints: Collection[str]
    triggers: Mapping[str, bool]
    filtered: Mapping[str, bool]
    unvacuumed: Collection[str]


async def read_server(database: Database) -> Server:
    """Return what the server reports of itself and of this login."""
    [row] = await database.run(SERVER)
    return Server(**row._asdict())


async def read_missing_rights(database: Database) -> list[MissingRight]:
    """Return the privileges on existing tables that a worker needs and this role lacks."""
    of_tables = [(table, right, None) for table, rights in _NEEDED_RIGHTS.items() for right in rights.split()]
    tables, privileges, columns = zip(*of_tables, _NEEDED_OF_A_COLUMN, strict=True)
    values = {"tables": list(tables), "privileges": list(privileges), "columns": list(columns)}
    return [MissingRight(*row) for row in await database.run(RIGHTS, values)]


def wanted_indexes() -> dict[str, str]:
    """Return every index that the tables must have by name, with the statement that makes it."""
    created: Callable[[Index], CreateIndex] = CreateIndex  # SQLAlchemy 2.0 has no types for it
    return {
        str(index.name): " ".join(str(created(index).compile(dialect=DIALECT)).split())
        for table in metadata.tables.values()
        for index in table.indexes
    }


def wanted_shapes() -> dict[str, str]:
    """Return the ``shape`` that each index must have, by name."""
    return {
        str(index.name): "".join(
            (
                "UNIQUE " if index.unique else "",
                f"{table.name} ({', '.join(getattr(each, 'name', '…') for each in index.expressions)})",
                "" if index.dialect_options["postgresql"]["where"] is None else " WHERE …",
            )
        )
        for table in metadata.tables.values()
        for index in table.indexes
    }


def wanted_tables() -> set[str]:
    """Return the names of the tables that there must be."""
    return {table.name for table in metadata.tables.values()}


def wanted_constraints() -> set[str]:
    """Return the names of the CHECK constraints, primary keys and foreign keys that the tables must have."""
    return {
        _name_of(table.name, constraint)
        for table in metadata.tables.values()
        for constraint in table.constraints
    }


def _name_of(table: str, constraint: Constraint) -> str:
    """Return a constraint's name: that of a key is PostgreSQL's own choice."""
    if isinstance(constraint, PrimaryKeyConstraint):
        return f"{table}_pkey"
    if isinstance(constraint, ForeignKeyConstraint):
        return "_".join((table, *constraint.column_keys, "fkey"))
    return str(constraint.name)


async def read_schema(database: Database) -> Schema:
    """Return the tables, and the indexes, constraints and triggers that they have."""
    kinds = ("index", "constraint", "table", "filtered", "unvacuumed", "trigger")
    found: dict[str, list[Row]] = {kind: [] for kind in kinds}
    for row in await database.run(CATALOG):
        found[row.what].append(row)
    return Schema(
        tables={row.name for row in found["table"]},
        indexes={row.name: IndexState(*row[1:]) for row in found["index"]},
        unlogged=[row.name for row in found["table"] if not row.holds],
        constraints={row.name for row in found["constraint"]},
        triggers={row.name: row.holds for row in found["trigger"]},
        filtered={row.name: row.holds for row in found["filtered"]},
        unvacuumed=[row.name for row in found["unvacuumed"]],
    )


async def read_holders(database: Database) -> list[Holder]:
    """Return transactions that have held locks on the tables for long, or for which others wait."""
    found = [Holder(*row) for row in await database.run(HOLDERS)]
    reported = [
        one for one in found if one.waiting or (one.seconds is not None and one.seconds >= HELD_SECONDS)
    ]
    if unclear := {one.transaction for one in found if one.seconds is None and not one.waiting}:
        await asyncio.sleep(_SEEN_SECONDS)
        again = [Holder(*row) for row in await database.run(HOLDERS)]
        reported += [one for one in again if one.transaction in unclear]
    return reported


async def read_link(database: Database) -> Link:
    """Connect twice and return what this shows about the link; with the errors of ``Database.run``."""
    return await database.call(partial(_read_link, database), _LINK_SECONDS)


async def _read_link(database: Database) -> Link:
    # Straight through the driver: SQLAlchemy begins a transaction, which a pooler may refuse.
    arguments = database.arguments() | {"autocommit": True}
    async with await connect(arguments) as first, await connect(arguments) as second:
        return Link(bool(first.pgconn.ssl_in_use), _is_local(first), await _sharing(first, second))


def _is_local(connection: Connection) -> bool:
    address = connection.info.hostaddr.partition("%")[0]
    return connection.info.host.startswith("/") or bool(address and ipaddress.ip_address(address).is_loopback)


async def _sharing(first: Connection, second: Connection) -> Sharing:
    """Find out what a pooler lends.

    Two idle clients that share a server session prove that it does not lend whole sessions.
    """
    if await backend_of(first) == first.info.backend_pid:  # a pooler reports another pid than the server
        return "direct"
    shared = any([await backend_of(first) == await backend_of(second) for _ in range(_SHARING_ROUNDS)])
    try:
        await first.execute("BEGIN")
        await first.execute("ROLLBACK")
    except psycopg.errors.ProtocolViolation:
        return "statement"
    return "transaction" if shared else "unclear"
