"""PostgreSQL has no transaction id left: it refuses every write, and no job pays for that."""

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg.errors import ProgramLimitExceeded

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.doctor import postgresql_checks
from jsworker.embedded.postgres import owner_of
from jsworker.ownership.queries import server_report
from jsworker.ownership.upgrading import upgrade_database
from tests.ownership.calls import opened
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, new_servers_folder
from tests.worker.processors import Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

LEFT = 20_000
"""Ids that a server still has when it starts: more than a worker uses until the test uses them up."""
SLOT = "forgotten"
SETTINGS = {**THROWAWAY_SETTINGS, "wal_level": "logical", "autovacuum_naptime": "1s"}


@pytest.fixture
def almost_out_of_ids() -> Iterator[ThrowawayPostgres]:
    """A server with a migrated database, whose ids a forgotten replication slot keeps from being freed."""
    folder = new_servers_folder()
    server = ThrowawayPostgres(folder / "postgres", settings=SETTINGS)
    try:
        server.start()
        upgrade_database(server.create_database("app"))
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [SLOT])
            connection.execute("ALTER DATABASE template0 ALLOW_CONNECTIONS true")
            names = [name for (name,) in connection.execute("SELECT datname FROM pg_database")]
        for name in names:  # as far as the slot allows: the server itself finds nothing more to free
            with psycopg.connect(server.database_url(name), autocommit=True) as connection:
                connection.execute("VACUUM (FREEZE)")
        with psycopg.connect(server.url, autocommit=True) as connection:
            oldest = connection.execute(
                "SELECT min(CAST(CAST(datfrozenxid AS text) AS bigint)) FROM pg_database"
            )
            [frozen] = oldest.fetchone() or ()
        server.stop()
        use_up_all_but(server, frozen, LEFT)
        server.start()
        yield server
    finally:
        server.discard()
        folder.rmdir()


def use_up_all_but(server: ThrowawayPostgres, frozen: int, left: int) -> None:
    """Let a stopped server continue so many ids before it refuses to assign any."""
    following = frozen + 2**31 - 1 - 3_000_000 - left
    segment = server.cluster / "pg_xact" / f"{following >> 20:04X}"
    segment.write_bytes(bytes(256 * 1024))
    account = owner_of(server.cluster)
    if account is not None:
        os.chown(segment, account.uid, account.gid)
    subprocess.run(
        [server.program("pg_resetwal"), "-x", str(following), "-D", "."],
        cwd=server.cluster,
        user=None if account is None else account.uid,
        group=None if account is None else account.gid,
        check=True,
        capture_output=True,
    )


def use_up_the_rest(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection, pytest.raises(ProgramLimitExceeded):
        connection.execute(
            "DO $$ BEGIN FOR i IN 1..1000000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
        )


@pytest.fixture
def settings(make_settings: Callable[..., Settings], almost_out_of_ids: ThrowawayPostgres) -> Settings:
    """On that server; no job is taken back, because a heartbeat needs an id too."""
    url = almost_out_of_ids.database_url("app")
    return make_settings(database_url=url, stale_threshold=3600.0, ack_wait=4000.0)


async def test_outcomes_are_kept_until_there_are_ids_again(
    client: JobClient, rows: Rows, settings: Settings, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process, max_attempts=1))
    job = await client.enqueue("scripted", {"n": 1})
    await gate.met()
    await asyncio.to_thread(use_up_the_rest, settings.database_dsn())
    gate.open()
    degraded = await running.events.told("worker.degraded")
    assert degraded[0]["what"] == "postgresql"
    assert "not accepting commands that assign new transaction IDs" in degraded[0]["reason"]
    async with opened(settings.database_dsn(), statement_timeout=30.0) as database:
        server = await server_report.read_server(database)
    [finding] = postgresql_checks.transaction_ids(server)
    assert (finding.level, server.ids_used) == ("error", 2**31 - 1 - 3_000_000)

    # The next autovacuum frees the ids.
    await rows.query("SELECT pg_drop_replication_slot(%s)", SLOT)
    row = await rows.becomes(job.id, "completed", seconds=120.0)
    assert (row["result"], row["errors"], row["attempts"]) == ({"n": 1}, 0, 1)
    assert not running.events.of("row.refused")
    assert not running.events.of("job.failed")
