"""The servers of a fault run, and what may be done to them."""

import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import nats
import psycopg
from nats.aio.client import Client

from jsworker.embedded import EmbeddedNats
from jsworker.embedded.resources import LOOPBACK, free_port
from jsworker.ownership.upgrading import upgrade_database
from tests.faults.records import ROLE, prepare
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, let_everybody_in, new_servers_folder

DATABASE = "faults"
STREAM = "FAULTS"
PREFIX = "faults"


_POSTGRES_SETTINGS = {**THROWAWAY_SETTINGS, "max_wal_size": "128MB"}
_DISKS = {"postgres": "1200m", "nats": "200m"}
"""File systems of their own, so that a full one harms nobody else."""


class Node(EmbeddedNats):
    """A nats-server that keeps its name over restarts: a cluster knows its members by their names."""

    @property
    def server_name(self) -> str:
        """What the cluster calls it."""
        return self._server_name

    def _prepare(self, lock: IO[bytes]) -> None:
        if not self._server_name:
            super()._prepare(lock)


async def _nothing(_: "Stores") -> None:
    """Do nothing."""


def _migrate(stores: "Stores") -> None:
    upgrade_database(stores.admin_url)
    prepare(stores.admin_url)


@dataclass(frozen=True)
class Access:
    """By which logins everybody enters, and what they may; by default everything.

    Attributes:
        fleet, producers, harness: settings of their logins to NATS.
        producer_role: the producers' login to PostgreSQL.
        nats_config: lines of nats-server's configuration.
        migrate: makes the tables.
        operate: does meanwhile what the fleet may not do for itself.
    """

    fleet: Mapping[str, Any] = field(default_factory=dict)
    producers: Mapping[str, Any] = field(default_factory=dict)
    harness: Mapping[str, Any] = field(default_factory=dict)
    producer_role: str = ROLE
    nats_config: str = ""
    migrate: Callable[["Stores"], None] = _migrate
    operate: Callable[["Stores"], Coroutine[Any, Any, None]] = _nothing


EVERYTHING = Access()


@dataclass
class Stores:
    """One PostgreSQL, and one nats-server or a cluster of three."""

    folder: Path
    postgres: ThrowawayPostgres
    nodes: list[Node]
    access: Access = EVERYTHING

    @property
    def nats(self) -> Node:
        """The first nats-server; the only one outside a cluster."""
        return self.nodes[0]

    @property
    def admin_url(self) -> str:
        """The database for the harness itself."""
        return self.postgres.database_url(DATABASE)

    @property
    def database_url(self) -> str:
        """The database for the fleet."""
        return self.url_of(ROLE)

    @property
    def producer_url(self) -> str:
        """The database for the producers."""
        return self.url_of(self.access.producer_role)

    def url_of(self, role: str) -> str:
        """The database for a role."""
        return f"postgresql://{role}@{LOOPBACK}:{self.postgres.port}/{DATABASE}"

    @property
    def nats_url(self) -> str:
        """All nats-servers."""
        return ",".join(node.url for node in self.nodes)

    def start(self) -> None:
        """Start every server and migrate the database."""
        self.postgres.start()
        let_everybody_in(self.postgres)
        for node in self.nodes:
            node.start()
        self.postgres.create_database(DATABASE)
        self.access.migrate(self)

    def restart_all(self) -> None:
        """Start what a fault has ended."""
        for server in (self.postgres, *self.nodes):
            server.start()

    def discard(self) -> None:
        """End every server and delete its data."""
        for node in self.nodes:
            node.kill()
        self.postgres.discard()
        _unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    async def execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Run a statement as the database's superuser."""
        connection = await psycopg.AsyncConnection.connect(self.admin_url, autocommit=True, connect_timeout=5)
        async with connection:
            cursor = await connection.execute(statement.encode(), values)
            return await cursor.fetchall() if cursor.description else []

    @asynccontextmanager
    async def connected_to_nats(self) -> AsyncIterator[Client]:
        """Give a connection of the harness's own."""
        connection = await nats.connect(
            [node.url for node in self.nodes],
            user=self.access.harness.get("nats_user"),
            password=self.access.harness.get("nats_password"),
            connect_timeout=3,
            max_reconnect_attempts=3,
            error_cb=_expected,
        )
        try:
            yield connection
        finally:
            await connection.close()

    def backends(self) -> list[int]:
        """Return the processes of PostgreSQL that serve connections, and its own, without the postmaster."""
        import psutil  # noqa: PLC0415 -- only the faults that stop it need it

        return [child.pid for child in psutil.Process(self.postgres.pid).children()]

    def _wait_for_postgres(self) -> None:
        while self.postgres.running:
            time.sleep(0.02)

    async def stop_postgres_immediately(self) -> None:
        """Shut PostgreSQL down without a checkpoint, as a machine's end of power would."""
        os.kill(self.postgres.pid, signal.SIGQUIT)
        await asyncio.to_thread(self._wait_for_postgres)


async def _expected(_: Exception) -> None:
    """Servers are away in a fault run; whoever needs them sees it by itself."""


def new_stores(*, cluster: bool = False, access: Access = EVERYTHING) -> Stores:
    """Return servers that are not started yet, with their data in a folder of their own."""
    folder = new_servers_folder()
    if not cluster:
        _mount(folder)
    postgres = ThrowawayPostgres(folder / "postgres", settings=_POSTGRES_SETTINGS)
    nodes = _cluster(folder) if cluster else [Node(folder / "nats", config=access.nats_config)]
    return Stores(folder, postgres, nodes, access)


def _mount(folder: Path) -> None:
    """Give each server a small file system, where this is allowed."""
    for name, size in _DISKS.items():
        disk = folder / name
        disk.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", disk],
            check=False,
            stderr=subprocess.DEVNULL,
        )


def _unmount(folder: Path) -> None:
    for name in _DISKS:
        if (folder / name).is_mount():
            subprocess.run(["umount", "--lazy", folder / name], check=False)


def _cluster(folder: Path) -> list[Node]:
    ports = [free_port() for _ in range(3)]
    name = f"c{secrets.token_hex(4)}"  # of digits alone it would be a number
    routes = ", ".join(f'"nats://{LOOPBACK}:{port}"' for port in ports)
    # Without its own addresses in the greeting, clients stay on the ways they were given.
    return [
        Node(
            folder / f"nats-{number}",
            config=(
                f'cluster {{\n  name: {name}\n  listen: "{LOOPBACK}:{port}"\n  no_advertise: true\n'
                f"  routes: [{routes}]\n}}"
            ),
        )
        for number, port in enumerate(ports)
    ]
