"""(i) Behind PgBouncer in transaction mode, against a direct connection in the same rounds."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from benchmarks.figures import JSWORKER, Figure
from benchmarks.measures.load import backlog_rate, p50_and_p99, paced_latencies
from benchmarks.processes import SystemFailed
from benchmarks.runs import Rounds
from benchmarks.servers import Servers, running_servers
from jsworker.embedded.postgres import unprivileged_account
from jsworker.embedded.resources import LOOPBACK, free_port

LETTER: Final = "i"
TITLE: Final = "behind PgBouncer in transaction mode"

POOLED: Final = "jsworker behind PgBouncer"

_RATE = "no-op jobs"
_P50 = "start p50 at 200/s"
_P99 = "start p99 at 200/s"
_MISSING = "PgBouncer is not installed: apt-get install pgbouncer"
_PLACES = "/usr/sbin", "/usr/local/sbin"
_START_SECONDS = 10.0
_PER_SECOND = 200.0


def measure(
    rounds: int,
    show: Callable[[str], None],
    *,
    jobs: int = 20_000,
    latency_seconds: float = 10.0,
) -> list[Figure]:
    """Run the same jobs behind the pooler and without it.

    Args:
        rounds: of both, one after the other.
        show: called with what is going on.
        jobs: of the backlog that measures the rate.
        latency_seconds: how long the latency is measured at 200 jobs/s.

    Returns:
        The figures; if PgBouncer is not installed, one without values says how to install it.
    """
    taken = Rounds(LETTER, [JSWORKER, POOLED], rounds, show)
    with running_servers() as servers, ExitStack() as stack:
        direct = {system: servers.new_jsworker() for system in (JSWORKER, POOLED)}
        ways = dict(direct)
        with taken.failing(POOLED):
            port = stack.enter_context(running_pgbouncer(find_pgbouncer(), servers))
            url = through(port, direct[POOLED]["JSWORKER_DATABASE_URL"])
            ways[POOLED] = direct[POOLED] | {"JSWORKER_DATABASE_URL": url}
        for system in taken.systems("no-op jobs and start latency"):
            with taken.failing(system):
                way = _Way(ways[system], direct[system]["JSWORKER_DATABASE_URL"])
                taken.add(_RATE, system, "jobs/s", way.rate(jobs))
                p50, p99 = way.latency(latency_seconds)
                taken.add(_P50, system, "ms", p50, more_is_better=False)
                taken.add(_P99, system, "ms", p99, more_is_better=False)
    return taken.figures()


@dataclass(frozen=True, slots=True)
class _Way:
    """How jsworker reaches its database.

    Attributes:
        variables: of jsworker.
        listed_at: URL of the same database without a pooler.
    """

    variables: Mapping[str, str]
    listed_at: str

    def rate(self, jobs: int) -> float:
        return backlog_rate(self.variables, jobs, listed_at=self.listed_at)

    def latency(self, seconds: float) -> tuple[float, float]:
        return p50_and_p99(
            paced_latencies(self.variables, per_second=_PER_SECOND, seconds=seconds, listed_at=self.listed_at)
        )


def find_pgbouncer() -> str:
    """Return the path of the program.

    Raises:
        SystemFailed: it is not installed; says how to install it.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PLACES])
    program = shutil.which("pgbouncer", path=path)
    if program is None:
        raise SystemFailed(_MISSING)
    return program


@contextmanager
def running_pgbouncer(program: str, servers: Servers) -> Iterator[int]:
    """Run PgBouncer in front of PostgreSQL, in transaction mode and otherwise with its defaults.

    Yields:
        Its TCP port on 127.0.0.1.

    Raises:
        SystemFailed: it does not answer.
    """
    folder, port = servers.folder / "pgbouncer", free_port()
    account = unprivileged_account()  # as root it refuses to run
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "users.txt").write_text(f'"postgres" "{urlsplit(servers.postgres.url).password}"\n')
    configuration = folder / "pgbouncer.ini"
    configuration.write_text(_configuration(servers, port, folder))
    if account is not None:
        os.chown(folder, account.uid, account.gid)
    with (folder / "pgbouncer.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 -- the system's own program
            [program, *(["-u", pwd.getpwuid(account.uid).pw_name] if account else []), str(configuration)],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_it_answers(process, port, folder / "pgbouncer.log")
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_START_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def through(port: int, url: str) -> str:
    """Return the URL of the same database behind the pooler."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.username}@{LOOPBACK}:{port}").geturl()


def _configuration(servers: Servers, port: int, folder: Path) -> str:
    return f"""[databases]
* = host={LOOPBACK} port={servers.postgres.port}
[pgbouncer]
listen_addr = {LOOPBACK}
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder / "users.txt"}
pool_mode = transaction
"""


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    give_up_at = time.monotonic() + _START_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > give_up_at:
            lines = log.read_text(errors="replace").splitlines() or ["no word on stderr"]
            raise SystemFailed(f"PgBouncer does not start: {lines[-1]}")
        try:
            with socket.create_connection((LOOPBACK, port), timeout=1.0):
                return
        except OSError:
            time.sleep(0.05)
