"""Real NATS servers on the configurations of the deployment files."""

import json
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jsworker.embedded.resources import find_nats_server
from tests.deployment.files import container
from tests.deployment.rendering import overlay

PINGS = (15.0, 2)
"""Seconds between the server's pings, and how many may stay unanswered: docs/guarantees.md counts on them."""


def pings(monitoring: str) -> tuple[float, int]:
    """Return what a server says of its own pings, as ``PINGS``."""
    varz = get_json(f"{monitoring}/varz")
    return varz["ping_interval"] / 1e9, varz["ping_max"]


def replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old} once in:\n{text}"
    return text.replace(old, new)


@contextmanager
def nats_server(
    config: Path, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[tuple[str, str]]:
    """Run a server on free ports; yield its URLs for clients and monitoring."""
    command = [str(find_nats_server()), "--config", str(config), "--ports_file_dir", str(folder)]
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as server:
        try:
            ports = read_when_there(folder / f"nats-server_{server.pid}.ports")
            yield ports["nats"][0], ports["monitoring"][0]
        finally:
            server.terminate()


def read_when_there(file: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        try:
            content: dict[str, Any] = json.loads(file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not yet, or half of it
            assert time.monotonic() < deadline, f"{file} is not there after 60 s"
            time.sleep(0.02)
        else:
            return content


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 -- the address of a server of this test
        return json.load(answer)


def greet(url: str, publish: str | None = None, **login: str) -> str:
    """Return the first answer of a NATS server to a login, or to a publication after it."""
    address = urlsplit(url)
    with (
        socket.create_connection((address.hostname, address.port), timeout=10) as connection,
        connection.makefile("rw", encoding="ascii", newline="\r\n") as stream,
    ):
        assert stream.readline().startswith("INFO ")
        stream.write(f"CONNECT {json.dumps({'verbose': False} | login)}\n")
        if publish:
            stream.write(f"PUB {publish} 0\n\n")
        stream.write("PING\n")
        stream.flush()
        return stream.readline().strip()


def expanded(variables: Mapping[str, str | None], secrets: Mapping[str, str]) -> dict[str, str]:
    """Variables as the kubelet sets them, in their order; for ``None`` it looks into a Secret."""
    done: dict[str, str] = {}
    for name, value in variables.items():
        done[name] = (
            secrets[name] if value is None else re.sub(r"\$\((\w+)\)", lambda found: done[found[1]], value)
        )
    return done


@contextmanager
def single_server(folder: Path, passwords: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Run the server of the overlay single; passwords by the names of the variables that hold them."""
    rendered = overlay("single")
    text = rendered["ConfigMap", "nats"]["data"]["nats.conf"]
    text = replaced(text, "port: 4222", "host: 127.0.0.1\nport: -1")
    text = replaced(text, "http: 8222", "http: 127.0.0.1:-1")
    config = folder / "nats.conf"
    config.write_text(replaced(text, "/data", json.dumps(str(folder / "data"))))
    for name, content in rendered["ConfigMap", "nats-permissions"]["data"].items():
        (folder / name).write_text(content)
    entries = container(rendered["StatefulSet", "nats"])["env"]
    given = {entry["name"]: entry.get("value") for entry in entries}
    with nats_server(config, folder, expanded(given, passwords)) as urls:
        yield urls
