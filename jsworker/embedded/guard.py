"""The process that owns the servers of one data folder and stops them when the last command has ended.

It runs in a session of its own, so that Ctrl-C in a terminal ends the commands only. A server that dies by
itself is started again on its port and data. When the guard itself is killed, the servers end too.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from jsworker.core.errors import ServersUnavailable
from jsworker.core.exit_codes import discard_stdout
from jsworker.embedded.postgres import EmbeddedPostgres
from jsworker.embedded.resources import EXCLUSIVE, is_free, try_lock, wait_for_lock
from jsworker.embedded.server import EmbeddedNats, EmbeddedServer
from jsworker.embedded.servers import DataFolder

_POLL_INTERVAL = 0.05
# A command that checks for a running guard holds the guard's lock for a moment (``has_guard``).
_GUARD_LOCK_DEADLINE = 2.0


def main() -> None:
    """Run the guard of a data folder with PostgreSQL's settings, in JSON; write one JSON report to stdout."""
    if os.fork():
        os._exit(0)  # the guard must not be a child of the command, which would have to wait for it
    try:
        _guard(DataFolder(Path(sys.argv[1])), json.loads(sys.argv[2]))
    except (ServersUnavailable, OSError) as error:
        sys.stderr.write(f"{error}\n")
        _report(str(error))
        sys.exit(1)


def _guard(folder: DataFolder, postgres_settings: dict[str, str]) -> None:
    """Start the servers, publish their URLs, keep them until the last command is gone, stop them."""
    stop_signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: stop_signals.append(received))
    with folder.open_lock("guard") as alive, folder.open_lock("commands") as commands:
        if not wait_for_lock(alive, EXCLUSIVE, seconds=_GUARD_LOCK_DEADLINE):
            _report(None)  # another guard was faster; the command will find it
            return
        os.dup(alive.fileno())  # never closed, so the lock is held until this process ends
        servers = _servers_of(folder, postgres_settings)
        try:
            for server in servers:
                server.start()
            folder.write("urls", {server.name: server.url for server in servers})
            _report(None)
            # Once the guard has this lock, new commands wait until the servers are stopped.
            while not stop_signals and not try_lock(commands, EXCLUSIVE):
                for server in servers:
                    if not server.running:
                        sys.stderr.write(f"{server.name} died; starting it again\n")
                        server.start()
                time.sleep(_POLL_INTERVAL)
        finally:
            folder.delete_urls()
            for server in reversed(servers):
                server.stop()


def _servers_of(folder: DataFolder, postgres_settings: dict[str, str]) -> list[EmbeddedServer]:
    free = {name: port for name, port in folder.read("ports").items() if is_free(port)}
    servers: list[EmbeddedServer] = [
        EmbeddedPostgres(
            folder.path / "postgres", port=free.get(EmbeddedPostgres.name), settings=postgres_settings
        ),
        EmbeddedNats(folder.path / "nats", port=free.get(EmbeddedNats.name)),
    ]
    folder.write("ports", {server.name: server.port for server in servers})
    return servers


def _report(error: str | None) -> None:
    """Report, once, to the command that started this process, and close the pipe to it."""
    try:
        os.write(sys.stdout.fileno(), json.dumps(error).encode())
    except BrokenPipeError:
        sys.stderr.write("the command that started the servers is gone\n")
    discard_stdout()


if __name__ == "__main__":
    main()
