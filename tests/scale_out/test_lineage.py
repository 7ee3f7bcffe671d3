"""A worker notices that the database it speaks to has another history than before."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import psycopg
from psycopg.sql import SQL

from jsworker.core.events import Event, Events
from jsworker.ownership.database import Database, DatabaseHistory, read_history
from jsworker.worker.maintenance.watches import DatabaseWatch
from tests.scale_out.replication import DATABASE, Pair, replicated
from tests.support.contexts import make_context
from tests.support.polling import eventually
from tests.support.servers import (
    THROWAWAY_SETTINGS,
    ThrowawayPostgres,
    as_role,
    let_everybody_in,
    new_servers_folder,
)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Database]:
    database = Database(url, statement_timeout=5.0)
    try:
        yield database
    finally:
        await database.close()


class Watched:
    """A watch, and what it has told."""

    def __init__(self, database: Database) -> None:
        events = Events()
        self.told: list[Event] = []
        events.on("database.changed", self.told.append)
        events.on("worker.degraded", self.told.append)
        self.restored: list[Event] = []
        events.on("worker.restored", self.restored.append)
        context = make_context(database, events=events)
        self.health = context.health
        self.watch = DatabaseWatch(context, on_failover=lambda: None)

    async def look(self) -> list[Event]:
        """Look once and return everything that was told so far."""
        await self.watch.step()
        return self.told


async def test_a_promotion_is_a_new_timeline() -> None:
    async with replicated(synchronous=False) as pair, connected(pair.url) as database:
        watched = Watched(database)
        assert await watched.look() == []
        assert await watched.look() == []
        await check_standby(pair)
        pair.primary.kill()
        await watched.look()
        assert not watched.health.up
        pair.standby.promote()
        watched.health.answered()
        [degraded, changed] = await watched.look()
        assert degraded.fields["what"] == "postgresql"
        # At once: the control file tells the old timeline until the first checkpoint has ended.
        assert changed == Event("database.changed", {"what": "timeline", "was": 1, "is": 2})
        assert len(await watched.look()) == 2


async def check_standby(pair: Pair) -> None:
    async with (
        connected(pair.primary.database_url(DATABASE)) as primary,
        connected(pair.standby.database_url(DATABASE)) as standby,
    ):
        here = await read_history(primary)
        assert here.timeline == 1
        assert await read_history(standby) == DatabaseHistory(here.system_identifier, None)


async def test_a_standby_in_between_changes_nothing() -> None:
    async with (
        replicated(synchronous=False) as pair,
        connected(pair.url) as primary,
        connected(pair.standby.database_url(DATABASE)) as standby,
    ):
        watched = Watched(primary)
        for database in (primary, standby, primary):
            watched.watch._context = replace(watched.watch._context, database=database)
            assert await watched.look() == []


async def test_another_cluster_at_the_same_address_is_another_system() -> None:
    folder = new_servers_folder()
    old = ThrowawayPostgres(folder / "old", settings=THROWAWAY_SETTINGS)
    new = ThrowawayPostgres(folder / "new", port=old.port, settings=THROWAWAY_SETTINGS)
    try:
        old.start()
        async with connected(old.url) as database:
            watched = Watched(database)
            [no_schema] = await watched.look()
            assert no_schema.fields["what"] == "schema"
            before = (await read_history(database)).system_identifier
            old.stop()
            new.start()
            let_everybody_in(new)
            [_, changed] = await watched.look()
            after = (await read_history(database)).system_identifier
            assert before != after
            assert changed.fields == {"what": "system identifier", "was": before, "is": after}
    finally:
        old.discard()
        new.discard()
        folder.rmdir()


async def test_a_role_that_may_not_ask_is_told_of_once(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
        connection.execute("CREATE ROLE unlucky LOGIN")
        try:
            async with connected(as_role(database_url, "unlucky")) as database:
                watched = Watched(database)
                await watched.look()
                [degraded] = await watched.look()
                assert "pg_control_system" in degraded.fields["reason"]
                assert watched.health.up  # everything else goes on
        finally:
            connection.execute("DROP ROLE unlucky")


async def test_row_level_security_that_hides_all_rows_is_told_of(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE filtered LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA jsworker TO filtered")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA jsworker TO filtered")
        connection.execute("GRANT EXECUTE ON FUNCTION pg_control_system() TO filtered")
        try:
            async with connected(as_role(database_url, "filtered")) as database:
                watched = Watched(database)
                assert await watched.look() == []
                connection.execute("ALTER TABLE jsworker.jobs ENABLE ROW LEVEL SECURITY")
                [degraded] = await watched.look()
                assert degraded.fields["what"] == "row-level security"
                *_, statement = degraded.fields["reason"].split(": ")
                assert "hides every row of jobs from this login" in degraded.fields["reason"]
                connection.execute("CREATE POLICY everything ON jsworker.jobs USING (true)")
                await watched.look()
                connection.execute("DROP POLICY everything ON jsworker.jobs")
                assert len(await watched.look()) == 2  # it was over in between
                connection.execute(statement.encode())
                assert await database.hidden_tables() == []
        finally:
            connection.execute("DROP OWNED BY filtered")
            connection.execute("DROP ROLE filtered")


async def test_commits_that_wait_for_a_synchronous_standby_are_told_of(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:

        async def configure(names: str) -> None:
            connection.execute(SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(names))
            connection.execute("SELECT pg_reload_conf()")

            async def loaded() -> None:
                assert connection.execute("SHOW synchronous_standby_names").fetchone() == (names,)

            await eventually(loaded)

        async with connected(database_url) as database:
            watched = Watched(database)
            assert await watched.look() == []
            await configure("away")
            try:

                async def told() -> None:  # the watch's own connection may not have loaded it yet
                    assert await watched.look()

                await eventually(told)
                [degraded] = watched.told
                assert degraded.fields["what"] == "commits"
                assert "synchronous_standby_names" in degraded.fields["reason"]
            finally:
                await configure("")

            async def over() -> None:
                assert not await database.waits_for_standby()

            await eventually(over)
            assert len(await watched.look()) == 1
            assert [event.fields["what"] for event in watched.restored] == ["commits"]
