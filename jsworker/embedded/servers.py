"""The servers as a command sees them: there while it runs, shared with other commands on the same data."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.folder import DataFolder, open_log
from jsworker.embedded.locks import EXCLUSIVE, SHARED, try_lock, unlock, wait_for_lock
from jsworker.embedded.nats import EmbeddedNats
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.wheels import find_nats_server, find_postgres

_START_DEADLINE = 120.0
_STOP_DEADLINE = 30.0
_POLL_INTERVAL = 0.02
_LOG_LIMIT_BYTES = 1_000_000


class EmbeddedServers:
    """A nats-server and a PostgreSQL that live while at least one command uses them.

    Used as a context manager. The first command on a data folder starts the servers, later ones join them,
    and they are stopped when the last one is gone, whatever ended it: return, Ctrl-C or SIGKILL. The data
    and, while they are free, the ports are kept for the next start. The start blocks, for about a second the
    first time.

    Args:
        data: the data folder; None takes ``jsworker/dev`` in the user's cache folder.

    Attributes:
        data: the data folder.
    """

    def __init__(self, data: Path | None = None) -> None:
        self.data = (data or default_data_folder()).expanduser().resolve()
        self._folder = DataFolder(self.data)
        self._presence: IO[bytes] | None = None
        self._urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the servers or join them; they answer when this returns.

        Raises:
            ServersUnavailable: a wheel is missing, the folder cannot be used, or a server did not start.
        """
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            self._presence = self._announce()
            self._urls = self._find_or_start()
        except (OSError, subprocess.TimeoutExpired) as error:
            self._leave()
            raise ServersUnavailable(f"data folder {self.data} cannot be used: {error}") from error
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        self._wait_for_the_end_if_last()

    @property
    def database_url(self) -> str:
        """The URL of the database ``postgres``, with its password."""
        return self._urls[EmbeddedPostgres.name]

    @property
    def nats_url(self) -> str:
        """The URL of the NATS server."""
        return self._urls[EmbeddedNats.name]

    def environment(self) -> dict[str, str]:
        """Return the settings that lead jsworker to these servers; PostgreSQL's password is among them."""
        return {"JSWORKER_DATABASE_URL": self.database_url, "JSWORKER_NATS_URL": self.nats_url}

    def _announce(self) -> IO[bytes]:
        presence = self._folder.open_lock("commands")
        if not wait_for_lock(presence, SHARED, seconds=_STOP_DEADLINE):
            presence.close()
            raise ServersUnavailable(
                f"the servers in {self.data} have been stopping for {_STOP_DEADLINE:.0f} s"
            )
        return presence

    def _leave(self) -> None:
        if self._presence is not None:
            self._presence.close()
            self._presence = None

    def _find_or_start(self) -> dict[str, str]:
        give_up_at = time.monotonic() + _START_DEADLINE
        with self._folder.open_lock("start") as start:
            in_turn = wait_for_lock(start, EXCLUSIVE, seconds=_START_DEADLINE)
            while in_turn and time.monotonic() < give_up_at:
                if not self._folder.has_guard():
                    # What it holds was told by a guard that is gone.
                    self._folder.delete_urls()
                    self._start_guard()
                elif urls := self._folder.read_urls():
                    return urls
                else:
                    time.sleep(_POLL_INTERVAL)
        raise ServersUnavailable(
            f"the servers in {self.data} did not start within {_START_DEADLINE:.0f} s: "
            f"see {self._folder.guard_log}"
        )

    def _start_guard(self) -> None:
        find_postgres()
        find_nats_server()
        with open_log(self._folder.guard_log, limit=_LOG_LIMIT_BYTES) as log:
            report = subprocess.run(  # noqa: S603 -- our own module
                [sys.executable, "-P", "-m", "jsworker.embedded.guard", self.data],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
                timeout=_START_DEADLINE,
                check=False,
            ).stdout
        if not report:
            raise ServersUnavailable(
                f"the servers' guard ended while starting: {self._folder.guard_log} ends with "
                f"{self._folder.last_words()!r}"
            )
        if error := json.loads(report).get("error"):
            raise ServersUnavailable(error)

    def _wait_for_the_end_if_last(self) -> None:
        if not self.data.exists():
            return
        give_up_at = time.monotonic() + _STOP_DEADLINE
        with self._folder.open_lock("commands") as commands:
            while time.monotonic() < give_up_at and self._folder.has_guard():
                if try_lock(commands, EXCLUSIVE):
                    unlock(commands)  # nobody is there, and the guard is about to notice
                elif try_lock(commands, SHARED):
                    return  # others are there
                time.sleep(_POLL_INTERVAL)


def default_data_folder() -> Path:
    """Return ``jsworker/dev`` in the user's cache folder: $XDG_CACHE_HOME, else ~/.cache."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = configured if configured.is_absolute() else Path("~/.cache").expanduser()
    return cache / "jsworker" / "dev"
