"""Checks of the PostgreSQL server, of this login and its connection, and of jsworker's tables."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from jsworker.core.errors import MigrationMissing
from jsworker.core.names import printable
from jsworker.core.settings import Settings
from jsworker.doctor import finding
from jsworker.doctor.finding import Finding, counted, error, info, listed, ok, seconds, warning
from jsworker.doctor.gather import Login
from jsworker.ownership import session_settings
from jsworker.ownership.database import REVISIONS, check_level, upgrade_advice
from jsworker.ownership.queries.job_report import RegisteredWorker
from jsworker.ownership.queries.server_report import (
    Holder,
    Link,
    MissingRight,
    Schema,
    Server,
    Sharing,
    wanted_constraints,
    wanted_indexes,
    wanted_shapes,
    wanted_tables,
)

_LEAST_VERSION: Final = 12
_TRIED_VERSION: Final = 14
_UPGRADE: Final = "Upgrade PostgreSQL to a version that is still maintained."
_UPGRADE_SCHEMA: Final = "Run `jsworker db upgrade`; workers may run meanwhile."
_OF_A_PROCESS: Final = 23
"""Most connections of a worker process: 10 for statements, 10 for statements by key, 3 for heartbeats."""
_OF_A_SLOT: Final = 2
"""More of them per job slot: ``job.transaction()`` and its blocking form each keep a pool of connections."""
_WORKER: Final = "jsworker_worker"
_ANOTHER_LOGIN: Final = (
    f"Let JSWORKER_DATABASE_URL name the login of a worker, a member of {_WORKER}: to grant this one more "
    "would undo what deploy/postgres/roles.sql keeps apart."
)
_TO_READ: Final = ("USAGE", "SELECT")
"""Privileges without which nothing can be read."""
_TRIGGERS: Final = {
    "jobs_guard": "a final job could change, a fencing token could go back",
    "jobs_live_stay": "a job that waits or runs could be deleted",
    "jobs_live_stay_at_once": "all jobs could be deleted at once, by TRUNCATE",
}
_LEFT_BY_REINDEX: Final = re.compile(r"_cc(?:new|old)\d*$")
_UNIQUE_INDEX: Final = re.compile(
    r"CREATE UNIQUE INDEX \w+ ON (?P<table>\S+) \((?P<columns>[\w, ]+)\) WHERE (?P<condition>.+)"
)
_SLOWER: Final = "searches for jobs get slower from hour to hour, and the tables grow"
_RESTORE: Final = "Restore it as `jsworker db upgrade` makes it in an empty database: pg_dump --schema-only."
_MOST_IDS: Final = 2**31 - 1 - 3_000_000
"""PostgreSQL assigns no more transaction ids or multixacts until VACUUM frees some."""
_MANY_IDS: Final = 1_600_000_000
"""``vacuum_failsafe_age``: eight times the age at which autovacuum begins to free them."""
_POOLERS: Final[dict[Sharing, Finding]] = {
    "direct": ok("no pooler between: statements that find rows by key are prepared"),
    "transaction": ok("a pooler in transaction mode is between: workers notice it and prepare nothing"),
    "statement": error(
        "a pooler in statement mode is between: job.transaction() and migrations cannot work",
        "Set pool_mode = transaction.",
    ),
    "unclear": info(
        "a pooler is between; whether in session or in transaction mode could not be seen",
        "Set pool_mode = transaction: in session mode each of a worker's connections holds one of the "
        "server's all the time.",
    ),
}


def connection(server: Server, place: str, login: Login = "worker") -> Iterator[Finding]:
    """Whether the server answers, is not read-only, and has what the statements need."""
    takes_writes = server.settings.get("default_transaction_read_only") != "on"
    name = f"PostgreSQL {server.settings.get('server_version', 'unknown')}"
    if server.standby:
        yield error(
            f"{name} at {place} is a standby: nothing can be written",
            "Let JSWORKER_DATABASE_URL name the primary.",
        )
    elif login == "worker" and not takes_writes:
        yield error(
            "default_transaction_read_only is on: nothing can be written",
            _ANOTHER_LOGIN
            if _is_of_others(server)
            else f"ALTER ROLE {_quoted(server.role)} SET default_transaction_read_only = off, or remove it"
            " from the options in JSWORKER_DATABASE_URL.",
        )
    elif server.version // 10_000 < _LEAST_VERSION:
        yield error(
            f"{name} is too old: {_LEAST_VERSION} has the plan_cache_mode and the MATERIALIZED that "
            "jsworker's statements use",
            _UPGRADE,
        )
    elif server.version // 10_000 < _TRIED_VERSION:
        yield warning(f"{name} is no longer maintained, and jsworker is not tried on it", _UPGRADE)
    else:
        yield ok(f"{name} at {place} answers" + (" and is not read-only" if takes_writes else ""))


def migration(revision: str | None) -> Iterator[Finding]:
    """Whether the tables are those of this version."""
    try:
        check_level(revision)
    except MigrationMissing as missing:
        yield error(str(missing), _UPGRADE_SCHEMA)
        return
    if (advice := upgrade_advice(revision)) is not None:
        yield warning(advice, _UPGRADE_SCHEMA)
    elif revision in REVISIONS:
        yield ok(f"the database is at migration {revision}, this version's own")
    else:
        yield info(
            f"the database is at migration {revision}, newer than this version's own, {REVISIONS[-1]}",
            "Upgrade this installation of jsworker too; it works meanwhile.",
        )


def durability(server: Server) -> Iterator[Finding]:
    """A commit is on the disk before it is acknowledged."""
    names = ("fsync", "full_page_writes", "synchronous_commit")
    for name in (name for name in names if server.settings.get(name) == "off"):
        yield error(
            f"{name} is off: acknowledged jobs and outcomes get lost when the server crashes",
            f"Set {name} = on in postgresql.conf, or for the role or database that has it off, and reload.",
        )


def commits(server: Server) -> Iterator[Finding]:
    """No commit waits for a synchronous standby."""
    names = server.settings.get("synchronous_standby_names")
    if not names or server.settings.get("synchronous_commit") in {"off", "local"}:
        return
    if not server.confirming:
        says = "no synchronous standby is connected"
    elif server.unconfirmed:
        sessions = counted(server.unconfirmed, "session")
        says = f"{sessions} waiting for a synchronous standby for more than a second"
    else:
        return
    yield error(
        f"{says} (synchronous_standby_names = {printable(names, 100)}): statements that write get no answer "
        "in time",
        "Start the standby, or see in pg_stat_replication why it is behind; if it is gone for good, take it "
        "out of synchronous_standby_names and reload. Do not end the sessions that wait.",
    )


def transaction_ids(server: Server) -> Iterator[Finding]:
    """VACUUM frees transaction ids before all are used up."""
    if server.ids_used < _MANY_IDS:
        return
    used = (
        f"database {printable(server.oldest_database, 60)} keeps {min(1.0, server.ids_used / _MOST_IDS):.0%}"
    )
    do = (
        "End what keeps VACUUM from freeing them: old transactions (pg_stat_activity), pg_prepared_xacts, "
        "unused replication slots (pg_replication_slots). Then run VACUUM in that database, without FULL."
    )
    if server.ids_used < _MOST_IDS:
        yield warning(f"{used} of PostgreSQL's transaction ids: without any left it refuses every write", do)
    else:
        yield error(f"{used} of PostgreSQL's transaction ids: it refuses every write", do)


def connections(
    server: Server, link: Link, registered: Sequence[RegisteredWorker], settings: Settings
) -> Iterator[Finding]:
    """Whether the fleet may open as many connections as it can use."""
    alive = [worker.concurrency for worker in registered if worker.alive]
    fleet = alive or [settings.concurrency] * settings.processes
    needed = sum(_OF_A_PROCESS + _OF_A_SLOT * concurrency for concurrency in fleet)
    allowed = _allowed_connections(server)
    whose = counted(len(fleet), "worker process", plural="worker processes")
    says = f"{whose} may open up to {needed} connections, the server allows {allowed}"
    if link.sharing != "direct":
        yield ok(f"{counted(server.connections, 'connection')} on the server; workers connect to a pooler")
    elif needed > allowed:
        yield warning(
            says,
            "Raise max_connections or the role's limit, run fewer processes, or put PgBouncer in transaction "
            "mode between.",
        )
    else:
        yield ok(f"{says}; {server.connections} open now")


def pooler(link: Link) -> Iterator[Finding]:
    """Whether a pooler is between, and in a mode that works."""
    yield _POOLERS[link.sharing]


def sessions(server: Server, settings: Settings) -> Iterator[Finding]:
    """Sessions have the settings that jsworker needs, and leave its statements their time."""
    for says, do in session_settings.faults(server.settings):
        yield error(says, do)
    for name in ("statement_timeout", "transaction_timeout"):
        seconds = int(server.settings.get(name, "0")) / 1000
        if 0 < seconds < settings.statement_timeout:
            yield warning(
                f"{name} is {seconds:g} s in the sessions of a pooler, less than "
                f"JSWORKER_STATEMENT_TIMEOUT={settings.statement_timeout:g}: slower statements never succeed",
                f"{session_settings.undo(name)}, and reconnect the pooler.",
            )


def encryption(link: Link) -> Iterator[Finding]:
    """Whether payloads and passwords can be read on the way."""
    yield finding.encryption(
        encrypted=link.encrypted,
        local=link.local,
        readable="payloads",
        do="Add ?sslmode=verify-full&sslrootcert=PATH to JSWORKER_DATABASE_URL.",
    )


def _is_of_others(server: Server) -> bool:
    """Return whether the login was made for an operator, a producer or another that is no worker."""
    return bool(server.member_of) and _WORKER not in server.member_of


def rights(rights: list[MissingRight], server: Server, login: Login = "worker") -> Iterator[Finding]:
    """The role may do all that a worker needs, and not everything."""
    role = f"role {printable(server.role, 60)}"
    needed = [each for each in rights if login == "worker" or each.privilege in _TO_READ]
    if login == "worker" and needed and _is_of_others(server):
        may_not = (
            f"{role} is a member of {', '.join(server.member_of)}, and may not do all that a worker does"
        )
        yield error(may_not, _ANOTHER_LOGIN)
        return
    by_table: dict[str | None, list[str]] = {}
    for each in needed:
        by_table.setdefault(each.table, []).append(each.privilege)
    for table, privileges in sorted(by_table.items(), key=lambda item: item[0] or ""):
        lacking, place = ", ".join(privileges), f"jsworker.{table}" if table else "SCHEMA jsworker"
        yield error(
            f"{role} lacks {lacking} on {place}, which a {login} needs",
            f"GRANT {lacking} ON {place} TO {_quoted(server.role)}",
        )
    if rights and not needed:
        yield ok(f"{role} may read, as a dashboard must; it may not write all that a worker does")
    if server.superuser:
        yield warning(
            f"{role} is a superuser: who gets into a worker gets the server",
            "Migrate as the tables' owner, and let workers use a role that may only read and write them.",
        )


def presence(schema: Schema) -> Iterator[Finding]:
    """All tables are there."""
    for name in sorted(wanted_tables().difference(schema.tables)):
        yield error(f"table {name} is missing: statements that use it are refused", _RESTORE)


def indexes(schema: Schema) -> Iterator[Finding]:
    """All indexes are there, as they must be, and valid."""
    shapes = wanted_shapes()
    for name, statement in sorted(wanted_indexes().items()):
        if _UNIQUE_INDEX.match(statement):
            continue
        create = _concurrently(statement)
        if name not in schema.indexes:
            yield error(f"index {name} is missing: searches read whole tables", create)
        elif (shape := schema.indexes[name].shape) != shapes[name]:
            yield error(
                f"index {name} is {printable(shape, 200)}, must be {shapes[name]}: searches are slow",
                f"DROP INDEX CONCURRENTLY jsworker.{name}; {create}",
            )
    for index in schema.indexes.values():
        if index.valid or index.name in _unique_indexes():
            continue
        says = f"index {index.name} on {index.table} is invalid"
        if _LEFT_BY_REINDEX.search(index.name):  # to rebuild it would make a second index of the same columns
            yield error(
                f"{says}: a REINDEX CONCURRENTLY that was broken off has left it, and every write keeps it",
                f"DROP INDEX CONCURRENTLY jsworker.{_quoted(index.name)}",
            )
        else:
            yield error(
                f"{says}: it is never read", f"REINDEX INDEX CONCURRENTLY jsworker.{_quoted(index.name)}"
            )


def unique_keys(schema: Schema) -> Iterator[Finding]:
    """No two live jobs of a kind may have the same key."""
    shapes = wanted_shapes()
    for name, (statement, duplicates) in sorted(_unique_indexes().items()):
        index = schema.indexes.get(name)
        if index is None:
            wrong, repair = "is missing", _concurrently(statement)
        elif index.shape != shapes[name]:
            wrong = f"is {printable(index.shape, 200)}, must be {shapes[name]}"
            repair = f"DROP INDEX CONCURRENTLY jsworker.{name}; {_concurrently(statement)}"
        elif not index.valid:
            wrong, repair = "is invalid", f"REINDEX INDEX CONCURRENTLY jsworker.{name}"
        else:
            continue
        yield error(
            f"unique index {name} {wrong}: two live jobs of a kind may have the same key; cancel all but one"
            f" of each line of: {duplicates}",
            repair,
        )


def _concurrently(create_index: str) -> str:
    return create_index.replace("INDEX ", "INDEX CONCURRENTLY ", 1)


def _unique_indexes() -> dict[str, tuple[str, str]]:
    """Return the statement that makes each unique index, and the one that finds what it would refuse."""
    found = {name: _UNIQUE_INDEX.fullmatch(create) for name, create in wanted_indexes().items()}
    return {name: (match[0], _duplicates(**match.groupdict())) for name, match in found.items() if match}


def _duplicates(table: str, columns: str, condition: str) -> str:
    return (
        f"SELECT {columns}, array_agg(id) AS jobs FROM {table} WHERE {condition}"  # noqa: S608 -- constants
        f" GROUP BY {columns} HAVING count(*) > 1"
    )


def constraints(schema: Schema) -> Iterator[Finding]:
    """What the protocol forbids is refused by PostgreSQL itself."""
    missing = sorted(wanted_constraints().difference(schema.constraints))
    if missing:
        says = f"{counted(len(missing), 'constraint')} missing ({listed(missing)}): impossible rows get in"
        yield error(says, _RESTORE)
    for name, fear in _TRIGGERS.items():
        if name not in schema.triggers:
            yield error(f"trigger {name} is missing: {fear}", _RESTORE)
        elif not schema.triggers[name]:
            enable = f"ALTER TABLE jsworker.jobs ENABLE TRIGGER {name}"
            yield error(f"trigger {name} is disabled: {fear}", enable)


def persistence(schema: Schema) -> Iterator[Finding]:
    """No table is emptied by a crash of the server."""
    for name in schema.unlogged:
        yield error(
            f"table {name} is UNLOGGED: PostgreSQL empties it after a crash, and standbys have none of it",
            f"ALTER TABLE jsworker.{_quoted(name)} SET LOGGED",
        )


def row_security(schema: Schema) -> Iterator[Finding]:
    """Row-level security hides no row from this login."""
    for name, has_policy in sorted(schema.filtered.items()):
        disable = f"ALTER TABLE jsworker.{_quoted(name)} DISABLE ROW LEVEL SECURITY"
        if has_policy:
            yield warning(
                f"row-level security of table {name} shows this login only what its policies allow: jobs of"
                " other rows are never run",
                disable,
            )
        else:
            yield error(
                f"row-level security of table {name} hides every row from this login: jobs wait for ever",
                disable,
            )


def vacuum(server: Server, schema: Schema) -> Iterator[Finding]:
    """Autovacuum removes the dead rows of all tables."""
    for name in ("autovacuum", "track_counts"):
        if server.settings.get(name) == "off":
            yield warning(
                f"{name} is off, so no dead row is removed: {_SLOWER}",
                f"Set {name} = on in postgresql.conf, and reload.",
            )
    for name in schema.unvacuumed:
        yield warning(
            f"autovacuum_enabled of table {name} is off, so no dead row of it is removed: {_SLOWER}",
            f"ALTER TABLE jsworker.{_quoted(name)} RESET (autovacuum_enabled)",
        )


def locks(holders: Sequence[Holder]) -> Iterator[Finding]:
    """No transaction has held locks on the tables for long."""
    for each in holders:
        who = f"role {printable(each.role or 'unknown', 60)}"
        if each.pid is None:
            gid = "'" + printable(each.gid or "", 200).replace("'", "''") + "'"
            held = f"prepared transaction {gid} of {who}"
            do = f"End it, which only this can: ROLLBACK PREPARED {gid}, or COMMIT PREPARED."
        else:
            held = f"a transaction of {who}, pid {each.pid},"
            do = f"See what it is in pg_stat_activity, then end it: SELECT pg_terminate_backend({each.pid})"
        since = "" if each.seconds is None else f" for {seconds(each.seconds)}"
        waits = f"; {counted(each.waiting, 'session')} waiting for it" if each.waiting else ""
        where = listed(sorted(each.tables))
        says = f"{held} holds locks on {where}{since}{waits}: what it locks stands still"
        yield info(says, do) if each.seconds is None and not each.waiting else warning(says, do)


def _quoted(name: str) -> str:
    return '"' + printable(name, 100).replace('"', '""') + '"'


def _allowed_connections(server: Server) -> int:
    found = server.settings
    names = ("superuser_reserved_connections", "reserved_connections")
    allowed = int(found.get("max_connections", 0)) - sum(int(found.get(name, 0)) for name in names)
    limits = [limit for limit in (server.role_limit, server.database_limit) if limit >= 0]
    return min([allowed, *limits])


CHECKS: Final = (
    connection,
    sessions,
    migration,
    durability,
    commits,
    transaction_ids,
    rights,
    encryption,
    pooler,
    connections,
)
TABLE_CHECKS: Final = (presence, indexes, unique_keys, constraints, persistence, row_security, vacuum, locks)
