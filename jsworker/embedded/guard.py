"""The process that owns the servers of one data folder: it ends them when the last command is gone.

It runs in a session of its own, so that Ctrl-C in a terminal ends the commands only. A server that dies by
itself is started again on its port and data. When the guard itself is killed, the kernel ends the servers
(Linux); on other systems they live on, and the next start names the process that holds the data folder.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from jsworker.core.errors import ServersUnavailable
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.resources import EXCLUSIVE, free_port, is_free, try_lock, wait_for_lock
from jsworker.embedded.server import EmbeddedNats, EmbeddedServer
from jsworker.embedded.servers import DataFolder

_POLL_INTERVAL = 0.05
# A command that looks whether a guard lives holds the lock for a moment.
_GUARD_LOCK_DEADLINE = 2.0


class Guard:
    """Owns the servers of a data folder while any command is there."""

    def __init__(self, data: Path) -> None:
        self._folder = DataFolder(data)
        self._stopping = False

    def run(self) -> None:
        """Start the servers, publish their URLs, keep them until the last command is gone, stop them."""
        for stop_signal in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(stop_signal, self._on_stop_signal)
        with self._folder.open_lock("guard") as alive, self._folder.open_lock("commands") as commands:
            if not wait_for_lock(alive, EXCLUSIVE, seconds=_GUARD_LOCK_DEADLINE):
                _report(ready=False)  # another guard was faster; the command will find it
                return
            os.dup(alive.fileno())  # never closed: the lock ends with this process, not a moment before
            servers = self._servers()
            try:
                for server in servers:
                    server.start()
                self._folder.write("urls", {server.name: server.url for server in servers})
                _report(ready=True)
                # Once taken, the lock keeps newcomers waiting until the servers are down.
                while not self._stopping and not try_lock(commands, EXCLUSIVE):
                    self._restart_dead(servers)
                    time.sleep(_POLL_INTERVAL)
            finally:
                self._folder.delete_urls()
                for server in reversed(servers):
                    server.stop()

    def _servers(self) -> list[EmbeddedServer]:
        last_ports = self._folder.read("ports")
        ports: dict[str, int] = {}
        for name in (EmbeddedPostgres.name, EmbeddedNats.name):
            last = last_ports.get(name)
            ports[name] = last if last is not None and is_free(last) else free_port()
        self._folder.write("ports", ports)
        return [
            EmbeddedPostgres(self._folder.path / "postgres", port=ports[EmbeddedPostgres.name]),
            EmbeddedNats(self._folder.path / "nats", port=ports[EmbeddedNats.name]),
        ]

    def _restart_dead(self, servers: list[EmbeddedServer]) -> None:
        for server in servers:
            if not server.running:
                sys.stderr.write(f"{server.name} died; starting it again\n")
                server.start()

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- a signal handler's shape
        self._stopping = True


def main() -> None:
    """Run the guard of the data folder named by the only argument; stdout gets one report as JSON."""
    if os.fork():
        os._exit(0)  # the guard is no child of the command, which would have to wait for its end
    try:
        Guard(Path(sys.argv[1])).run()
    except (ServersUnavailable, OSError) as error:
        sys.stderr.write(f"{error}\n")
        _report(error=str(error))
        sys.exit(1)


def _report(**report: bool | str) -> None:
    """Report, once, to the command that started this process, and close the pipe to it."""
    text = json.dumps(report).encode()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.write(sys.stdout.fileno(), text)
    except BrokenPipeError:
        sys.stderr.write("the command that started the servers is gone\n")
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    main()
