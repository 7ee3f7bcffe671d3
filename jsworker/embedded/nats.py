"""The nats-server of the wheel, with JetStream."""

import json
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from jsworker.embedded.ports import LOOPBACK
from jsworker.embedded.server import EmbeddedServer
from jsworker.embedded.wheels import find_nats_server

_CONNECT_TIMEOUT = 1.0
_GREETING_LIMIT_BYTES = 32_768


class EmbeddedNats(EmbeddedServer):
    """A nats-server with JetStream on a loopback port.

    Args:
        data: its folder: store, log and configuration; made when missing.
        port: TCP port on 127.0.0.1; None takes a free one.
        sync_always: every message is on the disk before it is acknowledged; else NATS's own rhythm, every
            2 minutes: acknowledged messages survive a crash of the server, not of the machine.
        config: further lines of the server's configuration.
    """

    name = "nats-server"
    _stop_signals = ((signal.SIGTERM, 15.0),)

    def __init__(
        self, data: Path, *, port: int | None = None, sync_always: bool = False, config: str = ""
    ) -> None:
        super().__init__(data, port)
        self._sync_always = sync_always
        self._config = config
        self._server_name = ""

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{LOOPBACK}:{self.port}"

    def _locked_folder(self) -> Path:
        return self.data

    def _prepare(self, lock: IO[bytes]) -> None:  # noqa: ARG002 -- nothing is started here
        # A new name at every start tells our server from a stranger on the same port.
        self._server_name = f"embedded-{secrets.token_hex(4)}"
        self._config_file.write_text(self._configuration(), encoding="utf-8")

    def _command(self) -> Sequence[str | Path]:
        return [find_nats_server(), "--config", self._config_file]

    def _answers(self, pid: int) -> bool:  # noqa: ARG002 -- the name in the greeting says it all
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=_CONNECT_TIMEOUT) as connection:
                greeting = connection.makefile("rb").readline(_GREETING_LIMIT_BYTES)
        except OSError:
            return False
        return self._server_name.encode() in greeting

    @property
    def _config_file(self) -> Path:
        return self.data / "nats-server.conf"

    def _configuration(self) -> str:
        store = json.dumps(str(self.data / "store"), ensure_ascii=False)
        sync = "sync_interval: always" if self._sync_always else ""
        return (
            f"server_name: {self._server_name}\n"
            f'listen: "{LOOPBACK}:{self.port}"\n'
            f"jetstream {{\n  store_dir: {store}\n  {sync}\n}}\n"
            f"{self._config}\n"
        )
