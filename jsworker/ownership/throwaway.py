"""Databases that live for one test: copies of a migrated template, made and dropped by the server's administrator."""

import secrets
from contextlib import suppress
from typing import Final, LiteralString

import psycopg
from psycopg.errors import ObjectInUse
from psycopg.sql import SQL, Composed, Identifier
from sqlalchemy.engine import URL, make_url

from jsworker.core.errors import JsworkerError, TransitionRefused
from jsworker.ownership.database import REVISIONS, place_of
from jsworker.ownership.pool import CONNECT_ARGUMENTS
from jsworker.ownership.refusals import map_error
from jsworker.ownership.upgrading import current_revision, upgrade_database

PREFIX: Final = "jsworker_test_"
"""The prefix of the names of all databases made here."""
_OPTIONS: Final = {**CONNECT_ARGUMENTS, "application_name": "jsworker testing"}
_ONE_TEMPLATE_AT_A_TIME: Final = 0x6A737774
# Without fsync the checkpoint that copying files needs costs nothing, and the server logs no page.
_BY_FILES: Final[LiteralString] = "CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY"
_BY_LOG: Final[LiteralString] = "CREATE DATABASE {} TEMPLATE {}"
# The trigger refuses to truncate jobs that wait or run.
_EMPTY: Final[LiteralString] = """
DO $$ BEGIN
  SET LOCAL lock_timeout = '10s';
  ALTER TABLE jsworker.jobs DISABLE TRIGGER jobs_live_stay_at_once;
  EXECUTE (SELECT 'TRUNCATE ' || string_agg(format('%I.%I', schemaname, tablename), ', ') FROM pg_tables
    WHERE schemaname = 'jsworker' AND tablename NOT IN ('alembic_version', 'installation'));
  ALTER TABLE jsworker.jobs ENABLE TRIGGER jobs_live_stay_at_once;
END $$
"""


class ThrowawayDatabases:
    """Makes and drops databases on one server; used by one thread. Connects at the first use.

    Every method raises:
        DatabaseUnavailable: PostgreSQL does not answer.
        DatabaseRefused: it refused the login, or to make a database.
    """

    def __init__(self, dsn: str) -> None:
        self._url = make_url(dsn)
        self._administration: psycopg.Connection | None = None
        self._copy: LiteralString = _BY_LOG
        self._names: set[str] = set()

    def make_template(self) -> str:
        """Return the name of a new migrated database; its copies have all that the caller adds to it.

        The template that it is copied from stays on the server, for later calls of any process.
        """
        origin = f"{PREFIX}template_{REVISIONS[-1]}"
        self._execute(SQL("SELECT pg_advisory_lock({})").format(_ONE_TEMPLATE_AT_A_TIME))
        try:
            known = self._connected().execute("SELECT FROM pg_database WHERE datname = %s", [origin])
            if known.fetchone() is None:
                self._execute(SQL("CREATE DATABASE {}").format(Identifier(origin)))
            if current_revision(self.url_of(origin)) != REVISIONS[-1]:  # it may be unfinished
                upgrade_database(self.url_of(origin))
            return self.copy(origin)
        finally:
            self._execute(SQL("SELECT pg_advisory_unlock({})").format(_ONE_TEMPLATE_AT_A_TIME))

    def copy(self, template: str) -> str:
        """Copy a database and return the copy's name; TransitionRefused: ``template`` is in use."""
        name = f"{PREFIX}{secrets.token_hex(6)}"
        self._connected()
        try:
            self._execute(SQL(self._copy).format(Identifier(name), Identifier(template)))
        except ObjectInUse:
            raise TransitionRefused(
                f"database {template} cannot be copied while somebody is connected to it: close what has filled it"
            ) from None
        self._names.add(name)
        return name

    def drop(self, name: str) -> None:
        """Drop a database and end its connections."""
        self._execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
        self._names.discard(name)

    def close(self) -> None:
        """Drop what is left of what was made here, and disconnect."""
        for name in list(self._names):
            with suppress(JsworkerError):
                self.drop(name)
        if self._administration is not None:
            self._administration.close()
            self._administration = None

    def url_of(self, name: str) -> str:
        """Return the URL of a database, with the password."""
        return _rendered(self._url.set(database=name))

    def _connected(self) -> psycopg.Connection:
        if self._administration is None or self._administration.closed:
            try:
                self._administration = psycopg.connect(_rendered(self._url), autocommit=True, **_OPTIONS)
                row = self._administration.execute("SHOW fsync").fetchone()
            except psycopg.Error as error:
                raise map_error(error, place_of(self._url)) from None
            self._copy = _BY_FILES if row == ("off",) else _BY_LOG
        return self._administration

    def _execute(self, statement: Composed) -> None:
        try:
            self._connected().execute(statement)
        except ObjectInUse:
            raise
        except psycopg.Error as error:
            raise map_error(error, place_of(self._url)) from None


def has_workers(dsn: str) -> bool:
    """Return whether a worker has used a database since it was made or emptied.

    Raises:
        DatabaseUnavailable, DatabaseRefused: PostgreSQL does not answer, or the role may not ask.
    """
    try:
        with psycopg.connect(dsn, autocommit=True, **_OPTIONS) as connection:
            return connection.execute("SELECT FROM jsworker.workers LIMIT 1").fetchone() is not None
    except psycopg.Error as error:
        raise map_error(error, place_of(make_url(dsn))) from None


def empty_database(dsn: str) -> None:
    """Delete all jobs, also those that wait or run, and all else that a test may have left in a database.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer.
        DatabaseRefused: the role may not do this, or a transaction held a table for ten seconds.
    """
    try:
        with psycopg.connect(dsn, autocommit=True, **_OPTIONS) as connection:
            connection.execute(_EMPTY)
    except psycopg.Error as error:
        raise map_error(error, place_of(make_url(dsn))) from None


def _rendered(url: URL) -> str:
    return url.render_as_string(hide_password=False)
