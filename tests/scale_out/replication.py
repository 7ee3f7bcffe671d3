"""PostgreSQL twice: a primary, and a standby that streams from it and can be promoted."""

import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import psycopg

from jsworker.embedded.resources import LOOPBACK
from jsworker.ownership.upgrading import upgrade_database
from tests.faults.fleet import send
from tests.faults.records import ROLE, prepare
from tests.support.polling import eventually
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, let_everybody_in, new_servers_folder

DATABASE = "scale_out"
_SLOT = "standby"

STREAMING = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
SYNCHRONOUS = "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
_CAUGHT_UP = "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"


class Standby(ThrowawayPostgres):
    """A copy of a running primary that follows it."""

    name = "PostgreSQL standby"

    def __init__(self, data: Path, *, primary: ThrowawayPostgres, settings: Mapping[str, str]) -> None:
        super().__init__(data, settings=settings)
        self._primary = primary

    def promote(self) -> None:
        """End its recovery and take writes; returns when it does."""
        self._run("pg_ctl", "-D", self.cluster, "-t", "30", "promote")

    def _initdb(self, folder: Path, lock: IO[bytes]) -> None:  # noqa: ARG002 -- nothing outlives the call
        source = f"{self._primary.url}?application_name={_SLOT}"
        self._run("pg_basebackup", "-d", source, "-D", folder, "-R", "-c", "fast", "-C", "-S", _SLOT)

    def _guard_with_password(self, lock: IO[bytes]) -> None:  # noqa: ARG002 -- it has the primary's
        shutil.copy(self._primary.data / "password", self._password_file)

    def _run(self, program: str, *arguments: str | Path) -> None:
        account = self._account()
        user: dict[str, Any] = (
            {"user": account.uid, "group": account.gid, "extra_groups": []} if account else {}
        )
        subprocess.run(
            [self.program(program), *arguments],
            check=True,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            **user,
        )


class Pair:
    """A primary and its standby, and what may happen to them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.primary = ThrowawayPostgres(folder / "primary", settings=THROWAWAY_SETTINGS)
        self.standby = Standby(folder / "standby", primary=self.primary, settings=THROWAWAY_SETTINGS)

    @property
    def url(self) -> str:
        """Where clients find whichever takes writes, tried in random order: one may be silent for ever."""
        hosts = "&".join(f"host={LOOPBACK}:{server.port}" for server in (self.primary, self.standby))
        return (
            f"postgresql://{ROLE}@/{DATABASE}?{hosts}"
            "&target_session_attrs=read-write&load_balance_hosts=random"
        )

    def start(self) -> None:
        """Start and migrate the primary, copy it, start the copy."""
        self.primary.start()
        let_everybody_in(self.primary)
        self.primary.create_database(DATABASE)
        upgrade_database(self.primary.database_url(DATABASE))
        prepare(self.primary.database_url(DATABASE))
        self.standby.start()

    async def follow(self, *, synchronous: bool) -> None:
        """Wait until the standby streams; from then on, commits may wait for it."""
        await self.until(STREAMING, 1)
        if synchronous:
            await ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
            await ask(self.primary, "SELECT pg_reload_conf()")
            await self.until(SYNCHRONOUS, 1)

    async def caught_up(self) -> None:
        """Wait until the standby has replayed everything."""
        await self.until(_CAUGHT_UP, 1)

    async def cut(self) -> None:
        """End the replication: from here on, what the primary commits exists only there."""
        await ask(self.standby, "ALTER SYSTEM SET primary_conninfo = ''")
        await ask(self.standby, "SELECT pg_reload_conf()")
        await self.until("SELECT count(*) FROM pg_stat_replication", 0)

    def freeze_primary(self) -> None:
        """Stop every process of the primary: it refuses nobody, ends nothing and answers nobody."""
        backends = psutil.Process(self.primary.pid).children()
        for pid in (self.primary.pid, *(backend.pid for backend in backends)):
            send(pid, signal.SIGSTOP)

    async def until(self, query: str, count: int) -> None:
        """Wait until a query of the primary gives this number."""

        async def check() -> None:
            assert await ask(self.primary, query) == [(count,)], query

        await eventually(check)

    def discard(self) -> None:
        """End both and delete their data."""
        self.primary.kill()
        self.standby.discard()
        self.primary.discard()
        shutil.rmtree(self._folder, ignore_errors=True)


async def ask(server: ThrowawayPostgres, statement: str, *values: object) -> list[tuple[Any, ...]]:
    """Run a statement as the superuser; without values, as it stands."""
    url = server.database_url(DATABASE)
    connection = await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=5)
    async with connection:
        cursor = await connection.execute(statement.encode(), values or None)
        return await cursor.fetchall() if cursor.description else []


@asynccontextmanager
async def replicated(*, synchronous: bool) -> AsyncIterator[Pair]:
    """Run a pair."""
    pair = Pair(new_servers_folder())
    try:
        pair.start()
        await pair.follow(synchronous=synchronous)
        yield pair
    finally:
        pair.discard()
