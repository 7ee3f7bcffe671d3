"""The servers of a benchmark: PostgreSQL 18 and nats-server on free ports, with default durability."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.sql import SQL, Identifier

from jsworker.embedded import EmbeddedNats, EmbeddedPostgres
from jsworker.ownership.upgrading import upgrade_database


@dataclass(frozen=True, slots=True)
class Servers:
    """Both servers, running.

    Attributes:
        folder: their data, deleted afterwards.
    """

    postgres: EmbeddedPostgres
    nats: EmbeddedNats
    folder: Path

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"bench_{secrets.token_hex(4)}"
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            connection.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
        return self.postgres.database_url(name)

    def new_jsworker(self) -> dict[str, str]:
        """Return jsworker's variables for a new, migrated database and a new stream."""
        url = self.new_database()
        upgrade_database(url)
        name = f"bench-{secrets.token_hex(4)}"
        return {
            "JSWORKER_DATABASE_URL": url,
            "JSWORKER_NATS_URL": self.nats.url,
            "JSWORKER_STREAM": name,
            "JSWORKER_SUBJECT_PREFIX": name,
        }


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Run both in a folder that is deleted afterwards. fsync is on, and no setting is changed for speed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # PostgreSQL started by root runs as another user
        with (
            EmbeddedPostgres(Path(folder) / "postgres") as postgres,
            EmbeddedNats(Path(folder) / "nats") as nats,
        ):
            yield Servers(postgres, nats, Path(folder))
            postgres.stop()
            nats.stop()


def environment_with(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables of jsworker, with ``variables`` added."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JSWORKER_")}
    return inherited | variables
