"""How PostgreSQL is asked whether transactions of this database ever waited for each other in a circle."""

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg.sql import SQL, Identifier

from .rows import Sql, read_value


def deadlocks(sql: Sql) -> int:
    """Return how many deadlocks this database has seen, as reported by connections that are closed by now."""
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(read_value(sql, query))


@contextmanager
def hasty_deadlock_detection(sql: Sql) -> Iterator[None]:
    """Let new connections look for a deadlock after 20 ms instead of a second."""
    database = SQL("ALTER DATABASE {} ").format(Identifier(read_value(sql, "SELECT current_database()")))
    sql.execute(database + SQL("SET deadlock_timeout = '20ms'"))
    yield
    sql.execute(database + SQL("RESET deadlock_timeout"))
