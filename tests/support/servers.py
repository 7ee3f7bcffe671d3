"""The servers that tests run against: real ones, tuned for data that nobody will miss."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from jsworker.embedded import EmbeddedNats, EmbeddedPostgres

# Nothing waits for the disk. A killed server still finds every commit again, in the system's cache; only a
# crash of the machine would lose some. COMMIT keeps its meaning: synchronous_commit stays on.
THROWAWAY_SETTINGS = MappingProxyType({"fsync": "off", "full_page_writes": "off"})

_MEMORY = Path("/dev/shm")  # noqa: S108 -- only as the parent of a folder with a random name
_ENOUGH_MEMORY_BYTES = 2 * 1024**3


def new_servers_folder() -> Path:
    """Create an empty folder for servers' data, in memory if there is room: new databases come faster.

    Others may enter it, so that a PostgreSQL started by root has its data there and not elsewhere.
    """
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH_MEMORY_BYTES
    folder = Path(tempfile.mkdtemp(prefix="jsworker-test-", dir=_MEMORY if in_memory else None))
    folder.chmod(0o711)
    return folder


@dataclass(frozen=True)
class TestServers:
    """A running PostgreSQL and a running nats-server of one test session."""

    __test__: ClassVar[bool] = False  # pytest takes classes named like this one for tests

    postgres: EmbeddedPostgres
    nats: EmbeddedNats

    def stop(self) -> None:
        """End both and delete their data."""
        self.nats.stop()
        self.postgres.discard()


def start_test_servers(folder: Path) -> TestServers:
    """Start both servers with their data below ``folder``; the caller stops them."""
    servers = TestServers(
        postgres=EmbeddedPostgres(folder / "postgres", settings=THROWAWAY_SETTINGS),
        nats=EmbeddedNats(folder / "nats"),
    )
    try:
        servers.postgres.start()
        servers.nats.start()
    except BaseException:
        servers.stop()
        raise
    return servers
