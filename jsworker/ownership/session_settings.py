"""The settings that jsworker's sessions need, whatever a database or role sets for its sessions."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Final

from sqlalchemy import Engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from jsworker.core.errors import DatabaseRefused
from jsworker.core.own_sockets import own

SESSION_SETTINGS: Final = {
    # A statement that has waited for a lock must see what the lock's last holder has committed.
    "default_transaction_isolation": "read committed",
    "array_nulls": "on",  # else NULL in an array is a text
    "client_encoding": "UTF8",
    # The driver reads times and intervals in these styles only. The order of day and month may be any.
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
}
"""Settings by name, each with the value that it must have, up to a comma."""
ENCODING: Final = "server_encoding"
_CALLS: Final = ", ".join(
    f"set_config('{name}', '{value}', false)" for name, value in SESSION_SETTINGS.items()
)
_BEGIN: Final = f"""
SELECT {_CALLS},
  CASE WHEN CAST(current_setting('tcp_keepalives_idle') AS integer) NOT BETWEEN 1 AND 600 THEN concat(
    set_config('tcp_keepalives_idle', '5', false), set_config('tcp_keepalives_interval', '3', false),
    set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '14000', false)) END"""
_OF_THIS_BACKEND: Final = "\nWHERE pg_backend_pid() = %s\n"
BEGIN_SESSION: Final = _BEGIN + _OF_THIS_BACKEND
"""For a new connection, with its ``backend_pid``: set what jsworker needs. A pooler's connection, whose session
has another pid, is left alone.

PostgreSQL ends a session whose host is gone after 14 s, and its locks with it, unless somebody has said that it
should within ten minutes. By Linux's defaults that takes two hours, and the next run of the job may wait for these
locks. Not by pg_settings, which takes 2 ms for each connection."""

_OWN: Final = """
  set_config('jit', 'off', false), set_config('statement_timeout', '0', false),
  CASE WHEN current_setting('transaction_timeout', true) <> '0' THEN set_config('transaction_timeout', '0', false) END"""
BEGIN_OWN_SESSION: Final = f"{_BEGIN},{_OWN}{_OF_THIS_BACKEND}"
"""The same for a connection whose statements are all jsworker's: they read few rows, but their estimated costs are high
enough for PostgreSQL to compile them. Where it was built with LLVM, that took half a second for each execution.

Each of them has a time limit of its own, and is cancelled after it. With a shorter one of the role some of them would
never succeed, and others always: workers reported in turn that PostgreSQL is away and that it is back."""
BEGIN_SESSION_THAT_KEEPS_PLANS: Final = f"""{_BEGIN},{_OWN}, set_config('plan_cache_mode', 'force_generic_plan', false),
  set_config('enable_seqscan', 'off', false){_OF_THIS_BACKEND}"""
"""The same, and each statement is planned once, and always by index. A pooler's connection gets no row."""

SESSION: Final = text(
    "SELECT "
    + ", ".join(f"current_setting('{name}') AS \"{name}\"" for name in (*SESSION_SETTINGS, ENCODING))
)
"""The settings of a session that ``faults`` looks at, by name."""


def faults(found: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each setting of a session that jsworker cannot work with, in words, and what to do.

    Only a pooler's sessions have settings other than ``BEGIN_SESSION`` sets.
    """
    if found[ENCODING] != "UTF8":
        yield (
            f"the database's encoding is {found[ENCODING]}, and must be UTF8",
            "Let JSWORKER_DATABASE_URL name another one: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0",
        )
    for name, needed in SESSION_SETTINGS.items():
        if found[name].partition(",")[0] != needed:
            says = f"{name} is {found[name]} in the sessions of a pooler, and must be {needed}"
            yield says, f"{undo(name)}, and reconnect the pooler."


def undo(name: str) -> str:
    """Return the advice to give a setting of sessions its default again."""
    return f"Undo it with ALTER ROLE … RESET {name} or ALTER DATABASE … RESET {name}, or in postgresql.conf"


def check_session(found: Mapping[str, str], place: str) -> None:
    """Raise DatabaseRefused if jsworker cannot work with a session's settings."""
    for says, do in faults(found):
        raise DatabaseRefused(f"PostgreSQL at {place} cannot be used: {says}. {do}")


def begin_sessions(engine: Engine) -> None:
    """Have each new connection of an engine set what jsworker needs."""

    @event.listens_for(engine, "connect")
    def begin(connection: DBAPIConnection, record: ConnectionPoolEntry) -> None:
        driver, autocommit = record.driver_connection, connection.autocommit
        if driver is not None:
            own(driver)
            connection.autocommit = True
            with closing(connection.cursor()) as cursor:
                cursor.execute(BEGIN_SESSION, [driver.info.backend_pid])
            connection.autocommit = autocommit
