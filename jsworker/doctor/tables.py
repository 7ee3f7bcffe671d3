"""Checks of jsworker's tables as the catalogs and statistics show them: complete, in shape, and vacuumed."""

from collections.abc import Iterator
from typing import Final

from jsworker.doctor.finding import Remark, counted, error, info, listed, ok, seconds, warning
from jsworker.ownership.queries.schema_report import (
    IndexState,
    Schema,
    TableState,
    wanted_constraints,
    wanted_fillfactors,
    wanted_indexes,
)
from jsworker.ownership.queries.server_report import Server

_MANY_DEAD: Final = 10_000
_DEAD_SHARE: Final = 0.3
_BUSY_TABLE_ROWS: Final = 100_000
_LARGE_INDEX_BYTES: Final = 10 * 2**20
_BEATS: Final = "last_activity_at"
_TRIGGERS: Final = {
    "jobs_guard": "a final job could change, a fencing token could go back",
    "jobs_live_stay": "a job that waits or runs could be deleted",
}
_RESTORE: Final = "Restore it as `jsworker db upgrade` makes it in an empty database: pg_dump --schema-only."


def indexes(schema: Schema) -> Iterator[Remark]:
    """Whether every index is there and valid, and none keeps heartbeats from being HOT updates."""
    wanted = wanted_indexes()
    sound = True
    for name, statement in sorted(wanted.items()):
        if name not in schema.indexes:
            sound = False
            yield error(f"index {name} is missing: searches read whole tables", _concurrently(statement))
    for index in schema.indexes.values():
        if not index.valid:
            sound = False
            yield error(
                f"index {index.name} on {index.table} is invalid: it is written and never read",
                f"REINDEX INDEX CONCURRENTLY jsworker.{_quoted(index.name)}",
            )
        if index.name not in wanted and index.table == "jobs" and _BEATS in index.definition:
            sound = False
            yield warning(
                f"index {index.name} on jobs holds {_BEATS}: every heartbeat writes every index anew",
                f"DROP INDEX CONCURRENTLY jsworker.{_quoted(index.name)}",
            )
    if sound:
        yield ok(f"all {len(wanted)} indexes are there and valid")


def index_use(schema: Schema) -> Iterator[Remark]:
    """Whether large indexes are used at all."""
    idle = [index for index in schema.indexes.values() if _is_idle(index, schema)]
    for index in idle:
        yield info(
            f"index {index.name} on {index.table} ({_megabytes(index.bytes)}) was never used since the "
            "statistics were reset",
            "Leave it, if it is jsworker's own."
            if index.name in wanted_indexes()
            else f"If nobody needs it: DROP INDEX CONCURRENTLY jsworker.{_quoted(index.name)}",
        )
    if not idle:
        yield ok("no large index lies idle")


def constraints(schema: Schema) -> Iterator[Remark]:
    """Whether PostgreSQL itself refuses what the protocol forbids."""
    missing = sorted(wanted_constraints().difference(schema.constraints))
    if missing:
        yield error(
            f"{counted(len(missing), 'constraint')} missing ({listed(missing)}): impossible rows get in",
            _RESTORE,
        )
    for name, table in sorted(schema.doubtful.items()):
        yield warning(
            f"constraint {name} is NOT VALID: old rows may break it",
            f"ALTER TABLE jsworker.{_quoted(table)} VALIDATE CONSTRAINT {_quoted(name)}",
        )
    lax = {name: fear for name, fear in _TRIGGERS.items() if not schema.triggers.get(name)}
    for name, fear in lax.items():
        if name in schema.triggers:
            yield error(
                f"trigger {name} is disabled: {fear}", f"ALTER TABLE jsworker.jobs ENABLE TRIGGER {name}"
            )
        else:
            yield error(f"trigger {name} is missing: {fear}", _RESTORE)
    if not (lax or missing or schema.doubtful):
        yield ok(f"{len(schema.constraints)} constraints and {len(_TRIGGERS)} triggers hold")


def vacuum(schema: Schema, server: Server) -> Iterator[Remark]:
    """Whether dead rows are removed."""
    off = [table.name for table in schema.tables.values() if table.options.get("autovacuum_enabled") in _OFF]
    sound = True
    if server.settings.get("autovacuum") == "off":
        sound = False
        yield warning("autovacuum is off: tables grow and searches become slow", "Set autovacuum = on.")
    for name in off:
        sound = False
        yield warning(
            f"autovacuum is off for jsworker.{name}: it grows and searches become slow",
            f"ALTER TABLE jsworker.{_quoted(name)} RESET (autovacuum_enabled)",
        )
    for table in schema.tables.values():
        if table.dead > max(_MANY_DEAD, _DEAD_SHARE * table.live):
            sound = False
            yield warning(
                f"jsworker.{table.name} holds {table.dead:,} dead rows beside {table.live:,} live ones; "
                f"vacuumed {_vacuumed(table)}",
                f"VACUUM (ANALYZE) jsworker.{_quoted(table.name)}; an old transaction may keep them alive.",
            )
    if sound:
        jobs = schema.tables.get("jobs")
        yield ok(_figures(jobs) if jobs else "dead rows are removed")


def fillfactor(schema: Schema) -> Iterator[Remark]:
    """Whether pages keep room for heartbeats."""
    wanted = wanted_fillfactors()
    sound = True
    for name, factor in wanted.items():
        table = schema.tables.get(name)
        found = table.options.get("fillfactor", "100") if table else factor
        if found != factor:
            sound = False
            yield warning(
                f"jsworker.{name} has fillfactor {found}, must be {factor}: heartbeats find full pages and "
                "write every index anew",
                f"ALTER TABLE jsworker.{_quoted(name)} SET (fillfactor = {factor})",
            )
    if sound:
        yield ok(f"pages of {listed(sorted(wanted))} keep room for heartbeats")


_OFF: Final = frozenset({"false", "off", "no", "0"})


def _figures(jobs: TableState) -> str:
    hot = f", {100 * jobs.hot_updates / jobs.updates:.0f} % of updates HOT" if jobs.updates else ""
    return f"jsworker.jobs: about {jobs.live:,} rows, {jobs.dead:,} dead{hot}; vacuumed {_vacuumed(jobs)}"


def _vacuumed(table: TableState) -> str:
    return "never yet" if table.vacuumed_ago is None else f"{seconds(table.vacuumed_ago)} ago"


def _is_idle(index: IndexState, schema: Schema) -> bool:
    table = schema.tables.get(index.table)
    busy = table is not None and table.live >= _BUSY_TABLE_ROWS
    return busy and not index.unique and not index.scans and index.bytes >= _LARGE_INDEX_BYTES


def _concurrently(statement: str) -> str:
    return statement.replace("INDEX ", "INDEX CONCURRENTLY ", 1)


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name.islower() else '"' + name.replace('"', '""') + '"'
