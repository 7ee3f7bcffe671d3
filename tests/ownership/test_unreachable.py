"""A database that cannot be reached, refuses the login, restarts, or has become a standby: one line each."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest import mock

import psycopg
import pytest
from psycopg.sql import SQL, Literal
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError

from jsworker.core.errors import (
    DatabaseBusy,
    DatabaseRefused,
    DatabaseUnavailable,
    TooManyConnections,
    TooManyFiles,
)
from jsworker.core.settings import Settings
from jsworker.embedded.resources import free_port
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import map_error
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.enqueue import NewJob, enqueue, new_job_id
from jsworker.ownership.transitions.settle import Completion
from jsworker.ownership.upgrading import current_revision, upgrade_database
from tests.support.files_at_their_limit import no_more_files
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres

from .calls import ONE, everything_said, opened
from .polling import eventually
from .rows import KIND, WORKER, Sql

NONE = Completion(new_job_id(), 1, None)


class TestUnreachable:
    async def test_port_closed(self) -> None:
        url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
        async with opened(url) as database:
            with pytest.raises(
                DatabaseUnavailable, match=rf"^PostgreSQL at {database.place} is not available: .*refused"
            ) as error:
                await database.run(ONE)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
    async def test_a_process_that_may_open_no_more_files(self, database_url: str, host: str) -> None:
        async with opened(database_url.replace("127.0.0.1", host)) as database:
            said = rf"^PostgreSQL at {database.place} is not available: this process has as many files "
            with no_more_files(), pytest.raises(TooManyFiles, match=said):
                await database.run(ONE)
            assert [row.one for row in await database.run(ONE)] == [1]

    async def test_a_process_that_may_start_no_thread_for_a_lookup(self, database_url: str) -> None:
        refused = RuntimeError("can't start new thread")
        async with opened(database_url.replace("127.0.0.1", "localhost")) as database:
            with (
                mock.patch("threading.Thread.start", side_effect=refused),
                pytest.raises(DatabaseUnavailable, match=r"can't start new thread$"),
            ):
                await database.run(ONE)

    async def test_unknown_host(self) -> None:
        async with opened("postgresql://postgres@no-such-host.invalid/postgres") as database:
            with pytest.raises(
                DatabaseUnavailable, match=r"^PostgreSQL at no-such-host\.invalid:5432/postgres "
            ) as error:
                await database.run(ONE)
        assert "\n" not in str(error.value)

    async def test_unknown_database(self, server_url: str) -> None:
        url = make_url(server_url).set(database="nowhere").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(
                DatabaseRefused, match=r'nowhere refused the login: database "nowhere" does not exist$'
            ) as error:
                await database.run(ONE)
        assert error.value.sqlstate is None
        with pytest.raises(DatabaseRefused, match=r'database "nowhere" does not exist$'):
            current_revision(url)

    async def test_unknown_role(self, server_url: str) -> None:
        url = make_url(server_url).set(username="nobody-here").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(DatabaseRefused, match=r'role "nobody-here" does not exist$'):
                await database.migrated_to()

    def test_migrations_say_it_in_the_same_way(self) -> None:
        url = f"postgresql://postgres@127.0.0.1:{free_port()}/postgres"
        for migrate in (upgrade_database, current_revision):
            with pytest.raises(DatabaseUnavailable, match=r"^PostgreSQL at 127\.0\.0\.1:\d+/postgres is not"):
                migrate(url)


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThrowawayPostgres]:
    """A server that a test may stop and reconfigure."""
    server = ThrowawayPostgres(tmp_path_factory.mktemp("own") / "postgres", settings=THROWAWAY_SETTINGS)
    server.start()
    yield server
    server.discard()


@pytest.fixture(scope="module")
def guarded_url(own_server: ThrowawayPostgres) -> str:
    """A database where the role ``guarded`` needs a password."""
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        access = own_server.cluster / "pg_hba.conf"
        access.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        connection.execute("SELECT pg_reload_conf()")
    return make_url(own_server.url).set(username="guarded", password=None).render_as_string()


class TestLogin:
    async def test_right_password(self, guarded_url: str) -> None:
        await eventually_password_needed(guarded_url)
        url = make_url(guarded_url).set(password="right").render_as_string(hide_password=False)
        async with opened(url) as database:
            assert [row.one for row in await database.run(ONE)] == [1]
            assert "right" not in repr(database.url)

    async def test_wrong_password(self, guarded_url: str) -> None:
        await eventually_password_needed(guarded_url)
        url = make_url(guarded_url).set(password="wr0ng-one").render_as_string(hide_password=False)
        async with opened(url) as database:
            with pytest.raises(
                DatabaseRefused,
                match=r'postgres refused the login: password authentication failed for user "guarded"$',
            ) as error:
                await database.run(ONE)
        assert "wr0ng-one" not in everything_said(error.value)

    async def test_a_password_whose_file_changed_is_read_again(
        self,
        own_server: ThrowawayPostgres,
        guarded_url: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        await eventually_password_needed(guarded_url)
        secret = tmp_path / "secret"
        secret.write_text("right\n")
        monkeypatch.setenv("JSWORKER_DATABASE_PASSWORD_FILE", str(secret))
        settings = Settings(database_url=guarded_url)
        with psycopg.connect(own_server.url, autocommit=True) as administrator:

            def change(password: str) -> None:
                administrator.execute(SQL("ALTER ROLE guarded PASSWORD {}").format(Literal(password)))
                administrator.execute(
                    "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = 'guarded'"
                )

            async with Database(settings.current_database_dsn, statement_timeout=10.0) as database:
                sessions = Sessions(database, worker_id=WORKER, size=1, lock_seconds=1.0)
                await database.run(ONE)
                change("another")
                try:
                    with pytest.raises(DatabaseRefused, match="refused the login"):
                        await database.run(ONE)
                    secret.write_text("another\n")
                    assert [row.one for row in await database.run(ONE)] == [1]
                    with suppress(ProgrammingError):  # no schema
                        async with sessions.transaction(lambda: NONE) as session:
                            assert await session.scalar(ONE) == 1
                    with suppress(ProgrammingError), sessions.sync_transaction(lambda: NONE) as plain:
                        assert plain.scalar(ONE) == 1
                    await sessions.close()
                    secret.unlink()
                    change("another")
                    with pytest.raises(DatabaseUnavailable, match=r"PASSWORD_FILE=.* cannot be read"):
                        await database.run(ONE)
                finally:
                    change("right")

    async def test_a_url_that_turns_wrong_counts_as_a_server_that_is_away(self, database_url: str) -> None:
        """Its file may be written while workers run, and put right again."""
        given = [database_url]
        async with Database(lambda: given[-1], statement_timeout=10.0) as database:
            given.append(f"{database_url}?sslmod=disable")
            with pytest.raises(DatabaseUnavailable, match='invalid connection option "sslmod"'):
                await database.run(ONE)
            given.pop()
            assert [row.one for row in await database.run(ONE)] == [1]


async def eventually_password_needed(url: str) -> None:
    def needed() -> bool:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            return True
        return False

    await eventually(needed, "the server has read its new rules")


class TestRestart:
    async def test_unavailable_while_down_and_working_again_afterwards(
        self, own_server: ThrowawayPostgres
    ) -> None:
        async with opened(own_server.url) as database:
            await asyncio.gather(*(database.run(text("SELECT pg_sleep(0.05)")) for _ in range(5)))
            await database.run_heartbeat(ONE)
            own_server.stop()
            for _ in range(8):  # each pooled connection is found dead, then none can be made
                with pytest.raises(DatabaseUnavailable) as error:
                    await database.run(ONE)
                assert "\n" not in str(error.value)
            with pytest.raises(DatabaseUnavailable):
                await database.run_heartbeat(ONE)
            own_server.start()
            assert [row.one for row in await database.run(ONE)] == [1]
            assert [row.one for row in await database.run_heartbeat(ONE)] == [1]

    async def test_no_statement_finds_the_old_connections_dead(self, own_server: ThrowawayPostgres) -> None:
        async with opened(own_server.url) as database:
            await asyncio.gather(*(database.run(text("SELECT pg_sleep(0.05)")) for _ in range(5)))
            own_server.stop()
            own_server.start()
            for _ in range(5):
                await database.run(ONE)

    async def test_a_backend_that_is_terminated_in_a_statement(self, sql: Sql, database: Database) -> None:
        call = asyncio.create_task(database.run(text("SELECT pg_sleep(30)")))
        await eventually(lambda: bool(terminated(sql)), "the backend is found at work")
        said = r"is not available: terminating connection due to administrator command \(SQLSTATE 57P01\)$"
        with pytest.raises(DatabaseUnavailable, match=said):
            await call
        assert [row.one for row in await database.run(ONE)] == [1]


def terminated(sql: Sql) -> int:
    """Terminate the backends of jsworker that sleep; return how many."""
    return sql.execute(
        """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'jsworker' AND wait_event = 'PgSleep'
        """
    ).rowcount


class TestWords:
    """What libpq says at the door; only English words tell whether waiting helps."""

    @pytest.mark.parametrize(
        "reason",
        [
            "the database system is starting up",
            "the database system is shutting down",
            "the database system is in recovery mode",
            "the database system is not yet accepting connections",
            "the database system is not accepting connections",
            "sorry, too many clients already",
            "remaining connection slots are reserved for roles with the SUPERUSER attribute",
            'too many connections for role "jsworker"',
            "terminating connection due to administrator command",
            "no more connections allowed (max_client_conn)",
            "query_wait_timeout",
            "server login has been failing, try again later (server_login_retry)",
            "pgbouncer cannot connect to server",
            "client_login_timeout (server down)",
            "das Datenbanksystem startet",
            "das Datenbanksystem fährt herunter",
            "Datenbanksystem im Wiederherstellungsmodus",
            "das Datenbanksystem nimmt noch keine Verbindungen an",
            "das Datenbanksystem nimmt keine Verbindungen an",
            "tut mir leid, schon zu viele Verbindungen",
            "die verbleibenden Verbindungen sind für Superuser auf Nicht-Replikationsverbindungen reserviert",
            "zu viele Verbindungen von Rolle »jsworker«",
            "Verbindung wird abgebrochen aufgrund von Anweisung des Administrators",
            "le système de bases de données se lance",
            "le système de base de données s'arrête",
            "le système de bases de données est en cours de restauration",
            "le système de bases de données n'accepte pas encore de connexions",
            "désolé, trop de clients sont déjà connectés",
            "les emplacements de connexions restants sont réservés pour les connexions",
            "arrêt des connexions suite à la demande de l'administrateur",
            "el sistema de base de datos está iniciándose",
            "el sistema de base de datos está apagándose",
            "el sistema de base de datos está en modo de recuperación",
            "el sistema de bases de datos aún no está aceptando conexiones",
            "lo siento, ya tenemos demasiados clientes",
            "las conexiones restantes están reservadas a superusuarios y no de replicación",
            "demasiadas conexiones para el rol «jsworker»",
            "terminando la conexión debido a una orden del administrador",
            "データベースシステムは起動処理中です",
            "データベースシステムはシャットダウンしています",
            "データベースシステムはリカバリモードです",
            "データベースシステムはまだ接続を受け付けていません",
            "現在クライアント数が多すぎます",
            "残りの接続スロットはレプリケーションユーザーではないスーパーユーザー用に予約されています",
            "管理者コマンドにより接続を終了しています",
        ],
    )
    def test_a_refusal_that_ends_by_itself(self, reason: str) -> None:
        error = psycopg.OperationalError(
            f'connection failed: connection to server at "10.0.0.1", port 5432 failed: FATAL:  {reason}'
        )
        mapped = map_error(error, "db:5432/app")
        assert isinstance(mapped, DatabaseUnavailable)
        assert reason in str(mapped)

    @pytest.mark.parametrize(
        ("reason", "none_left"),
        [
            ("sorry, too many clients already", True),
            ('too many connections for role "jsworker"', True),
            ("no more connections allowed (max_client_conn)", True),
            ("désolé, trop de clients sont déjà connectés", True),
            ("the database system is starting up", False),
            ("query_wait_timeout", False),
        ],
    )
    def test_a_lack_of_connections(self, reason: str, *, none_left: bool) -> None:
        mapped = map_error(psycopg.OperationalError(f"connection failed: FATAL:  {reason}"), "db:5432/app")
        assert isinstance(mapped, DatabaseBusy)
        assert isinstance(mapped, TooManyConnections) is none_left

    def test_a_refusal_behind_an_unreachable_address(self) -> None:
        error = psycopg.OperationalError(
            'connection failed: connection to server at "::1", port 5432 failed: Connection refused\n'
            'connection to server at "127.0.0.1", port 5432 failed: FATAL:  role "x" does not exist'
        )
        mapped = map_error(error, "db:5432/app")
        assert isinstance(mapped, DatabaseRefused)
        assert str(mapped) == 'PostgreSQL at db:5432/app refused the login: role "x" does not exist'

    def test_a_connection_that_says_nothing(self) -> None:
        mapped = map_error(psycopg.OperationalError(), "db:5432/app")
        assert str(mapped) == "PostgreSQL at db:5432/app is not available: OperationalError"


async def test_a_standby_is_not_available(databases_url_read_only: str) -> None:
    async with opened(databases_url_read_only) as database:
        assert [row.one for row in await database.run(ONE)] == [1]
        with pytest.raises(DatabaseUnavailable, match=r" is read-only, .* \(SQLSTATE 25006\)$"):
            await enqueue(database, KIND, NewJob(new_job_id(), "{}"), publish_after=0.0)


async def test_a_connection_to_what_has_become_a_standby_is_not_lent_again(
    databases_url_read_only: str, sql: Sql
) -> None:
    async with opened(databases_url_read_only) as database:
        with pytest.raises(DatabaseUnavailable, match=r" is read-only, .* \(SQLSTATE 25006\)$"):
            await enqueue(database, KIND, NewJob(new_job_id(), "{}"), publish_after=0.0)
        name = psycopg.sql.Identifier(make_url(databases_url_read_only).database or "")
        sql.execute(psycopg.sql.SQL("ALTER DATABASE {} RESET default_transaction_read_only").format(name))
        await enqueue(database, KIND, NewJob(new_job_id(), "{}"), publish_after=0.0)


@pytest.fixture
def databases_url_read_only(database_url: str, sql: Sql) -> Iterator[str]:
    """A database that refuses writes as a standby does, after a failover left our connections on it."""
    name = make_url(database_url).database
    statement = psycopg.sql.SQL("ALTER DATABASE {} {} default_transaction_read_only {}").format
    identifier = psycopg.sql.Identifier(name or "")
    sql.execute(statement(identifier, psycopg.sql.SQL("SET"), psycopg.sql.SQL("= on")))
    yield database_url
    sql.execute(statement(identifier, psycopg.sql.SQL("RESET"), psycopg.sql.SQL("")))
