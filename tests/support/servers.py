"""The servers that tests run against: real ones, tuned for data that nobody will miss."""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar
from urllib.parse import urlsplit

import psutil
import psycopg
from psycopg.sql import SQL, Composed, Identifier

from jsworker.embedded import EmbeddedNats, EmbeddedPostgres
from jsworker.embedded.resources import LOOPBACK
from jsworker.ownership.database import OLDEST_REVISION
from jsworker.ownership.upgrading import upgrade_database

# Nothing waits for the disk. A killed server still finds every commit again, in the system's cache; only a
# crash of the machine would lose some. COMMIT keeps its meaning: synchronous_commit stays on.
# Shared memory lies in the data folder, so that a killed server leaves none behind elsewhere.
THROWAWAY_SETTINGS = MappingProxyType(
    {"fsync": "off", "full_page_writes": "off", "dynamic_shared_memory_type": "mmap"}
)
# Nothing here lives long enough to be vacuumed, and a hundred databases would keep a process looking.
_COMMON_SETTINGS = MappingProxyType({**THROWAWAY_SETTINGS, "autovacuum_naptime": "1d"})

TEMPLATE = "jsworker_template"
"""The migrated database that tests copy."""

ON_OLDEST_SCHEMA = "ON_OLDEST_SCHEMA" in os.environ
"""Whether that is done as the previous minor version did it."""

_REVISION = OLDEST_REVISION if ON_OLDEST_SCHEMA else "head"

_MEMORY = Path("/dev/shm")  # noqa: S108 -- only as the parent of a folder with a random name
_ENOUGH_MEMORY_BYTES = 2 * 1024**3
_PREFIX = "jsworker-test-"
_LONGEST_SESSION = 24 * 3600.0


def new_servers_folder() -> Path:
    """Create an empty folder for servers' data, in memory if there is room: new databases come faster.

    Others may enter it, so that a PostgreSQL started by root has its data there and not elsewhere.
    """
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH_MEMORY_BYTES
    parent = _MEMORY if in_memory else Path(tempfile.gettempdir())
    _delete_leftovers(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    folder.chmod(0o711)
    return folder


def _delete_leftovers(parent: Path) -> None:
    """Delete what sessions that were killed left behind: memory is dear."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):  # another session is faster
            if time.time() - folder.stat().st_mtime > _LONGEST_SESSION:
                shutil.rmtree(folder, ignore_errors=True)


class ThrowawayPostgres(EmbeddedPostgres):
    """A PostgreSQL whose databases are made, whose crash is feigned and whose data are deleted by tests."""

    _administration: psycopg.Connection | None = None

    def start(self) -> None:
        """Start the server, to which no connection leads any more."""
        self._disconnect()
        super().start()

    def administer(self, statement: Composed) -> None:
        """Run a statement as the superuser, on a connection that is kept for the next one.

        A connection of its own would double the work of making and dropping a database.
        """
        if self._administration is None:
            self._administration = psycopg.connect(self.url, autocommit=True)
        self._administration.execute(statement)

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create an empty database, or a copy of one without connections to it, and return its URL."""
        statement = SQL("CREATE DATABASE {} TEMPLATE {}")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.format(Identifier(name), Identifier(template or "template1")))
        return self.database_url(name)

    def kill(self) -> None:
        """End all of the server's processes at once, as a crash would; the next start recovers."""
        if self._process is not None and self.running:
            # Backends could commit after the postmaster's death; stopped first, it makes no new ones.
            self._process.send_signal(signal.SIGSTOP)
            backends = psutil.Process(self._process.pid).children()
            super().kill()
            for backend in backends:
                with suppress(psutil.NoSuchProcess):
                    backend.kill()

    def discard(self) -> None:
        """End the server and delete its folder."""
        self._disconnect()
        self.kill()
        shutil.rmtree(self.data, ignore_errors=True)

    def _disconnect(self) -> None:
        if self._administration is not None:
            self._administration.close()
            self._administration = None


def let_everybody_in(server: EmbeddedPostgres) -> None:
    """Let the roles of tests log in without a password, at this running server and after its restarts."""
    (server.cluster / "pg_hba.conf").write_text(f"host all,replication all {LOOPBACK}/32 trust\n")
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")


def as_role(url: str, role: str) -> str:
    """Return a database's URL for another role, without a password."""
    return urlsplit(url)._replace(netloc=f"{role}@{urlsplit(url).netloc.rpartition('@')[2]}").geturl()


def copy_database(postgres: ThrowawayPostgres, name: str, template: str) -> str:
    """Copy a database file by file and return the copy's URL.

    Half the work of PostgreSQL's own way, which logs each page; the checkpoint that it needs costs nothing
    without fsync.
    """
    statement = SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY")
    postgres.administer(statement.format(Identifier(name), Identifier(template)))
    return postgres.database_url(name)


def prepare_to_copy(postgres: ThrowawayPostgres, template: str) -> None:
    """Connect once, so that PostgreSQL stores what each first connection else reads from the catalogue.

    It is copied with the rest. The start of a server deletes it.
    """
    psycopg.connect(postgres.database_url(template)).close()


def drop_database(postgres: ThrowawayPostgres, name: str) -> None:
    """Drop a database and end its connections."""
    postgres.administer(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


@dataclass(frozen=True)
class TestServers:
    """A running PostgreSQL and a running nats-server of one test session."""

    __test__: ClassVar[bool] = False  # pytest takes classes named like this one for tests

    folder: Path
    postgres: ThrowawayPostgres
    nats: EmbeddedNats

    def stop(self) -> None:
        """End both and delete their folder."""
        self.nats.stop()
        self.postgres.discard()
        shutil.rmtree(self.folder)


def start_test_servers(folder: Path) -> TestServers:
    """Start both servers with their data below ``folder``; whoever stops them deletes the folder."""
    servers = TestServers(
        folder=folder,
        postgres=ThrowawayPostgres(folder / "postgres", settings=_COMMON_SETTINGS),
        nats=EmbeddedNats(folder / "nats"),
    )
    try:
        servers.postgres.start()
        let_everybody_in(servers.postgres)
        servers.nats.start()
    except BaseException:
        servers.stop()
        raise
    return servers


def start_migrated_servers(folder: Path) -> TestServers:
    """Start both servers, with the migrated database ``TEMPLATE``."""
    servers = start_test_servers(folder)
    try:
        upgrade_database(servers.postgres.create_database(TEMPLATE), _REVISION)
        prepare_to_copy(servers.postgres, TEMPLATE)
    except BaseException:
        servers.stop()
        raise
    return servers


def start_copied_servers(folder: Path, shared: Path) -> TestServers:
    """Start the same on a copy of a cluster that the first of several processes prepares in ``shared``.

    Making a cluster and migrating a database is two seconds' work.
    """
    with (shared / "cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "cluster").exists():
            _prepare_cluster(shared / "cluster")
    subprocess.run(["cp", "-a", shared / "cluster", folder / "postgres"], check=True)
    servers = start_test_servers(folder)
    prepare_to_copy(servers.postgres, TEMPLATE)
    return servers


def _prepare_cluster(data: Path) -> None:
    unfinished = data.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    postgres = ThrowawayPostgres(unfinished, settings=_COMMON_SETTINGS)
    try:
        postgres.start()
        upgrade_database(postgres.create_database(TEMPLATE), _REVISION)
    finally:
        postgres.stop()
    unfinished.rename(data)
