"""Checks of jsworker's tables as the catalogs show them: complete, and guarded by PostgreSQL itself."""

from collections.abc import Iterator
from typing import Final

from jsworker.doctor.finding import Remark, counted, error, listed, ok, warning
from jsworker.ownership.queries.schema_report import Schema, wanted_constraints, wanted_indexes

_HEARTBEAT: Final = "last_activity_at"
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
        if index.name not in wanted and index.table == "jobs" and _HEARTBEAT in index.definition:
            sound = False
            yield warning(
                f"index {index.name} on jobs holds {_HEARTBEAT}: every heartbeat writes every index anew",
                f"DROP INDEX CONCURRENTLY jsworker.{_quoted(index.name)}",
            )
    if sound:
        yield ok(f"all {len(wanted)} indexes are there and valid")


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


def _concurrently(statement: str) -> str:
    return statement.replace("INDEX ", "INDEX CONCURRENTLY ", 1)


def _quoted(name: str) -> str:
    return name if name.isidentifier() and name.islower() else '"' + name.replace('"', '""') + '"'
