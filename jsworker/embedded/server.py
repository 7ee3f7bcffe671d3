"""One server as a child process: start it and wait until it answers, end it cleanly or as a crash would."""

import os
import secrets
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, Self

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.child_processes import Account, start_with_parent
from jsworker.embedded.resources import (
    EXCLUSIVE,
    LOOPBACK,
    find_nats_server,
    free_port,
    open_log,
    wait_for_lock,
)

_START_DEADLINE = 30.0
_POLL_INTERVAL = 0.01
_LOG_LIMIT_BYTES = 10_000_000
_SHOWN_LINES = 10
_CONNECT_TIMEOUT = 1.0
_GREETING_LIMIT_BYTES = 32_768


class EmbeddedServer(ABC):
    """A server on a loopback port with its data in a folder.

    The server dies with the process that started it. It may be started again after ``stop`` or
    ``kill``, on the same port and data. Its log is kept over restarts.
    """

    name: ClassVar[str]
    _stop_signals: ClassVar[tuple[tuple[signal.Signals, float], ...]]
    """Signals that end the server, the gentlest first, with the seconds that each is given."""

    def __init__(self, data: Path, port: int | None) -> None:
        self.data = data.expanduser().resolve()
        self.log = self.data / "server.log"
        self._working_folder = self.data
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL for clients."""

    @property
    def running(self) -> bool:
        """Whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        if self._process is None or not self.running:
            raise ServersUnavailable(f"{self.name} in {self.data} is not running")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers; nothing happens when it runs already.

        Raises:
            ServersUnavailable: it cannot be started, or it ended or did not answer within 30 s; in these two
                cases the message has the end of its log.
        """
        if self.running:
            return
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            with self._only_server() as lock, open_log(self.log, limit=_LOG_LIMIT_BYTES) as log:
                self._prepare(lock)
                log_start = log.tell()
                death_signal = self._stop_signals[0][0]
                self._process = self._launch(self._command(), lock, stdout=log, death_signal=death_signal)
                lock.write(str(self._process.pid).encode())
            self._wait_until_it_answers(self._process, log_start)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServersUnavailable(f"{self.name} cannot be started in {self.data}: {error}") from error

    def stop(self) -> None:
        """Shut the server down cleanly and wait for its end; nothing happens when it does not run."""
        if self._process is None:
            return
        for stop_signal, seconds in self._stop_signals:
            self._process.send_signal(stop_signal)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return
        self.kill()

    def kill(self) -> None:
        """End the server at once, as a crash would; nothing happens when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @abstractmethod
    def _prepare(self, lock: IO[bytes]) -> None:
        """Prepare the data folder for a start; ``lock`` is held, and programs started for this inherit it."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """Return the server's command line."""

    @abstractmethod
    def _answers(self, pid: int) -> bool:
        """Return whether this server, rather than another one on its port, takes requests."""

    def _account(self) -> Account | None:
        """Return the operating system's user that the server runs as; None: this process's own."""
        return None

    @contextmanager
    def _only_server(self) -> Iterator[IO[bytes]]:
        # The server inherits the open file and with it the lock, which is released only when the last of
        # the server's processes has ended. A process id in a file could not show that.
        with (self.data / "server.lock").open("a+b") as lock:
            if not wait_for_lock(lock, EXCLUSIVE, seconds=_START_DEADLINE):
                lock.seek(0)
                raise ServersUnavailable(
                    f"{self.name} in {self.data} is already running as process {lock.read().decode()}"
                )
            lock.truncate(0)
            yield lock

    def _launch(
        self, command: Sequence[str | Path], lock: IO[bytes], *, death_signal: signal.Signals, **options: Any
    ) -> subprocess.Popen[bytes]:
        """Start a program that works on the data folder; it inherits the lock."""
        return start_with_parent(
            command,
            death_signal=death_signal,
            account=self._account(),
            # Without the user's own PGPORT, PGDATA or LC_ALL.
            env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
            pass_fds=[lock.fileno()],
            start_new_session=True,
            **{
                "cwd": self._working_folder,
                "stdin": subprocess.DEVNULL,
                "stderr": subprocess.STDOUT,
                **options,
            },
        )

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes], log_start: int) -> None:
        give_up_at = time.monotonic() + _START_DEADLINE
        failure = ""
        try:
            while not failure and not self._answers(process.pid):
                if process.poll() is not None:
                    failure = "ended while starting"
                elif time.monotonic() >= give_up_at:
                    failure = f"did not answer within {_START_DEADLINE:.0f} s"
                time.sleep(_POLL_INTERVAL)
        except BaseException:
            self.kill()
            raise
        if failure:
            self.kill()
            with self.log.open("rb") as log:
                log.seek(log_start)
                end = end_of(log.read())
            raise ServersUnavailable(
                f"{self.name} on {LOOPBACK}:{self.port} {failure}; the end of {self.log}:\n{end}"
            )


class EmbeddedNats(EmbeddedServer):
    """A nats-server with JetStream on a loopback port.

    It syncs to the disk at NATS's default interval of 2 minutes: acknowledged messages survive a crash of the
    server, but not of the machine.

    Args:
        data: folder of the store, the log and the configuration; created if missing.
        port: TCP port on 127.0.0.1; None takes a free one.
        config: further lines of the server's configuration.
    """

    name = "nats-server"
    _stop_signals = ((signal.SIGTERM, 15.0),)

    def __init__(self, data: Path, *, port: int | None = None, config: str = "") -> None:
        super().__init__(data, port)
        self._config = config
        self._config_file = self.data / "nats-server.conf"
        self._server_name = ""

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"nats://{LOOPBACK}:{self.port}"

    def _prepare(self, lock: IO[bytes]) -> None:  # noqa: ARG002 -- no program is started here
        # A new name at every start distinguishes this server from another one on the same port.
        self._server_name = f"embedded-{secrets.token_hex(4)}"
        self._config_file.write_text(self._config, encoding="utf-8")

    def _command(self) -> Sequence[str | Path]:
        place = ["--addr", LOOPBACK, "--port", str(self.port), "--name", self._server_name]
        store = ["--jetstream", "--store_dir", str(self.data / "store")]
        return [find_nats_server(), *place, *store, "--config", self._config_file]

    def _answers(self, pid: int) -> bool:  # noqa: ARG002 -- the name in the greeting is enough
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=_CONNECT_TIMEOUT) as connection:
                greeting = connection.makefile("rb").readline(_GREETING_LIMIT_BYTES)
        except OSError:
            return False
        return self._server_name.encode() in greeting


def end_of(output: bytes) -> str:
    """Return the last lines of a program's output."""
    return "\n".join(output.decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:])
