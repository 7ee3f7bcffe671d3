"""Servers that run while a command needs them, shared by all commands that use the same data folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Literal, Self

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.resources import (
    EXCLUSIVE,
    SHARED,
    UNLOCKED,
    find_nats_server,
    find_postgres,
    open_log,
    try_lock,
    wait_for_lock,
    write_privately,
)
from jsworker.embedded.server import EmbeddedNats

_START_DEADLINE = 120.0
_STOP_DEADLINE = 30.0
_POLL_INTERVAL = 0.02
_LOG_LIMIT_BYTES = 1_000_000


class DataFolder:
    """The files by which commands and the guard of one data folder find each other.

    Only locks tell which of these processes are alive. Every command holds the lock ``commands`` shared; the
    guard ends when it gets that lock exclusively. A command holds ``start`` while it looks for a guard to
    join, or starts one. The guard holds ``guard`` while it lives; its standard error goes to ``guard_log``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.guard_log = path / "guard.log"

    def open_lock(self, name: Literal["commands", "start", "guard"]) -> IO[bytes]:
        """Open a lock file; closing it releases the lock."""
        return (self.path / f"{name}.lock").open("ab")

    def has_guard(self) -> bool:
        """Return whether a guard lives."""
        with self.open_lock("guard") as lock:
            return not try_lock(lock, SHARED)

    def read(self, what: Literal["urls", "ports"]) -> dict[str, Any]:
        """Return, by server name, the URLs of running servers or the ports of the last start, if known."""
        found: dict[str, Any] = {}
        with suppress(FileNotFoundError, ValueError):  # missing, or cut off by a crash of the machine
            found = json.loads((self.path / f"{what}.json").read_bytes())
        return found

    def write(self, what: Literal["urls", "ports"], values: dict[str, Any]) -> None:
        """Write what ``read`` returns; the URLs hold PostgreSQL's password."""
        write_privately(self.path / f"{what}.json", json.dumps(values))

    def delete_urls(self) -> None:
        """Delete the URLs that a guard has written: its servers are gone, or about to be stopped."""
        (self.path / "urls.json").unlink(missing_ok=True)


class EmbeddedServers:
    """A nats-server and a PostgreSQL that live while at least one command uses them.

    Used as a context manager. The first command on a data folder starts the servers, later ones join them,
    and they are stopped when the last one is gone, whatever ended it: return, Ctrl-C or SIGKILL. The data
    and, while they are free, the ports are kept for the next start. The start blocks, for about a second the
    first time. Without ``data``, the data folder is ``jsworker/dev`` in the user's cache folder;
    ServersUnavailable is raised if the user has none.
    ``postgres_settings`` are the settings of ``EmbeddedPostgres``, used if this command starts it.
    """

    def __init__(
        self, data: Path | None = None, *, postgres_settings: Mapping[str, str] | None = None
    ) -> None:
        try:
            self.data = (data or _cache_folder() / "jsworker" / "dev").expanduser().resolve()
        except RuntimeError as error:  # a user without a home folder
            reason = f"no data folder is known: {str(error).rstrip('.')}; name one: --data DIR"
            raise ServersUnavailable(reason) from None
        self._postgres_settings = dict(postgres_settings or {})
        self._folder = DataFolder(self.data)
        self._presence = ExitStack()
        self._urls: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Start the servers or join them; they answer when this returns.

        Raises:
            ServersUnavailable: a wheel is missing, the folder cannot be used, or a server did not start.
        """
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            with ExitStack() as presence:
                self._urls = self._find_or_start(presence.enter_context(self._folder.open_lock("commands")))
                self._presence = presence.pop_all()
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServersUnavailable(f"data folder {self.data} cannot be used: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        self._presence.close()
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
        """Return the settings with which jsworker uses these servers; they contain PostgreSQL's password."""
        return {"JSWORKER_DATABASE_URL": self.database_url, "JSWORKER_NATS_URL": self.nats_url}

    def are_kept(self) -> bool:
        """Return whether the process that keeps the servers running is alive; they end with it."""
        return self.data.exists() and self._folder.has_guard()

    def _find_or_start(self, presence: IO[bytes]) -> dict[str, str]:
        if not wait_for_lock(presence, SHARED, seconds=_STOP_DEADLINE):
            raise ServersUnavailable(
                f"the servers in {self.data} have been stopping for {_STOP_DEADLINE:.0f} s"
            )
        give_up_at = time.monotonic() + _START_DEADLINE
        with self._folder.open_lock("start") as start:
            in_turn = wait_for_lock(start, EXCLUSIVE, seconds=_START_DEADLINE)
            while in_turn and time.monotonic() < give_up_at:
                if not self._folder.has_guard():
                    # URLs in the file are those of a guard that has ended.
                    self._folder.delete_urls()
                    self._start_guard()
                elif urls := self._folder.read("urls"):
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
        guard = [sys.executable, "-P", "-m", "jsworker.embedded.guard"]
        with open_log(self._folder.guard_log, limit=_LOG_LIMIT_BYTES) as log:
            report = subprocess.run(  # noqa: S603 -- our own module
                [*guard, self.data, json.dumps(self._postgres_settings)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd="/",
                start_new_session=True,
                timeout=_START_DEADLINE,
                check=False,
            ).stdout
        if not report:
            log_file = self._folder.guard_log
            *_, last_line = ["", *log_file.read_text(errors="replace").splitlines()]
            raise ServersUnavailable(
                f"the servers' guard ended while starting: {log_file} ends with {last_line!r}"
            )
        if (error := json.loads(report)) is not None:
            raise ServersUnavailable(error)

    def _wait_for_the_end_if_last(self) -> None:
        if not self.data.exists():
            return
        give_up_at = time.monotonic() + _STOP_DEADLINE
        with self._folder.open_lock("commands") as commands:
            while time.monotonic() < give_up_at and self._folder.has_guard():
                if try_lock(commands, EXCLUSIVE):
                    try_lock(commands, UNLOCKED)  # no command is left, and the guard is about to notice
                elif try_lock(commands, SHARED):
                    return  # other commands use the servers
                time.sleep(_POLL_INTERVAL)


def _cache_folder() -> Path:
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return configured if configured.is_absolute() else Path("~/.cache").expanduser()
