"""The HTTP server: what it answers, and that nobody can keep others from being answered."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from jsworker.telemetry.http import HttpServer, PortUnavailable, Response
from tests.support.listening import has_ipv6
from tests.support.polling import eventually

HOST = "127.0.0.1"


@pytest.fixture
def seconds() -> float:
    """How long a connection may last: longer than any takes on a busy machine."""
    return 60.0


@pytest.fixture
async def port(seconds: float) -> AsyncIterator[int]:
    server = HttpServer(
        {"/well": lambda accept: Response(200, f"accepts {accept}\n".encode())}, seconds=seconds
    )
    yield await server.open(HOST, 0)
    await server.close()


async def say(port: int, request: bytes, *, host: str = HOST) -> str:
    """Send bytes and return everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        async with asyncio.timeout(10):
            return (await reader.read()).decode()
    finally:
        writer.close()


def get(path: str, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: probes\r\n{headers}\r\n".encode()


async def test_a_path_answers_and_the_connection_ends(port: int) -> None:
    answer = await say(port, get("/well", headers="Accept: text/plain\r\n"))
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert body == "accepts text/plain\n"
    assert "connection: close" in head.lower()
    assert "cache-control: no-store" in head.lower()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_every_address_of_ipv6_is_every_address_of_ipv4_too() -> None:
    server = HttpServer({"/well": lambda _: Response(200, b"")})
    port = await server.open("::", 0)
    for host in ("127.0.0.1", "::1"):
        assert (await say(port, get("/well"), host=host)).startswith("HTTP/1.1 200 ")
    with pytest.raises(
        PortUnavailable, match="on JSWORKER_HTTP_HOST=:: cannot be listened to: Address already in use"
    ):
        await HttpServer({}).open("::", port)
    await server.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_server_that_cannot_start_leaves_the_port_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[socket.socket] = []

    async def start_server(*_: object, sock: socket.socket, limit: int) -> None:
        asked.append(sock)
        raise OSError(errno.ENOSPC, f"no watch for {limit}")

    monkeypatch.setattr(asyncio, "start_server", start_server)
    with pytest.raises(PortUnavailable, match="No space left on device"):
        await HttpServer({}).open("::", 0)
    assert [sock.fileno() for sock in asked] == [-1]


async def test_a_query_is_not_part_of_the_path(port: int) -> None:
    assert (await say(port, get("/well?verbose=1"))).startswith("HTTP/1.1 200 ")


async def test_head_has_no_body(port: int) -> None:
    head, _, body = (await say(port, get("/well", "HEAD"))).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")
    assert "content-length: 9" in head.lower()
    assert body == ""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get("/nowhere"), 404),
        (get("/well", "POST", "Content-Length: 3\r\n") + b"abc", 405),
        (get("/well", "DELETE"), 405),
        (b"what?\r\n\r\n", 400),
        (b"GET /well HTTP/1.1\r\n\r\n", 400),  # no Host
        (get("/well", headers=f"X: {'x' * 40_000}\r\n"), 431),
        (b"\x16\x03\x01\x02\x00\x01\x00" + b"\x00" * 64 + b"\r\n\r\n", 400),  # TLS
    ],
    ids=["path", "body", "method", "nonsense", "no host", "long head", "tls"],
)
async def test_what_is_wrong_is_told(port: int, request_: bytes, status: int) -> None:
    assert (await say(port, request_)).startswith(f"HTTP/1.1 {status} ")


async def test_a_path_tells_which_there_are(port: int) -> None:
    assert (await say(port, get("/"))).endswith("there are: /well\n")


@pytest.mark.parametrize("seconds", [0.4])
async def test_a_client_that_says_nothing_is_left_after_a_while(port: int) -> None:
    began = asyncio.get_running_loop().time()
    assert await say(port, b"GET /well HT") == ""
    assert asyncio.get_running_loop().time() - began < 30.0


async def test_crowds_of_silent_clients_keep_nobody_waiting(port: int) -> None:
    async with AsyncExitStack() as crowd:
        for _ in range(300):
            _, writer = await asyncio.open_connection(HOST, port)
            crowd.callback(writer.close)
            writer.write(b"GET /")
        assert (await say(port, get("/well"))).startswith("HTTP/1.1 200 ")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_bursts_leave_no_connection_behind(port: int) -> None:
    def burst() -> None:
        crowd = [socket.create_connection((HOST, port)) for _ in range(95)]
        for each in crowd:
            each.close()

    before = open_files()
    for _ in range(3):
        burst()  # not awaited: all of them arrive in one round of the event loop
        assert (await say(port, get("/well"))).startswith("HTTP/1.1 200 ")

    async def gone() -> None:
        assert open_files() <= before + 2

    await eventually(gone)


async def test_a_mistake_behind_one_path_is_told_and_the_others_still_answer() -> None:
    def broken(_accept: str) -> Response:
        raise RuntimeError("secret")

    server = HttpServer({"/broken": broken, "/well": lambda _: Response(200, b"")})
    port = await server.open(HOST, 0)
    try:
        answer = await say(port, get("/broken"))
        assert answer.startswith("HTTP/1.1 500 ")
        assert "secret" not in answer
        assert (await say(port, get("/well"))).startswith("HTTP/1.1 200 ")
    finally:
        await server.close()


async def test_a_client_that_reads_nothing_harms_nobody() -> None:
    server = HttpServer({"/much": lambda _: Response(200, b"x" * 20_000_000)}, seconds=60.0)
    port = await server.open(HOST, 0)
    _, writer = await asyncio.open_connection(HOST, port, limit=1)
    try:
        writer.write(get("/much"))
        assert (await say(port, get("/nowhere"))).startswith("HTTP/1.1 404 ")
    finally:
        writer.close()
        await server.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_port_that_is_taken_is_one_clear_line() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable) as error:
            await HttpServer({}).open(HOST, port)
    line = str(error.value)
    assert f"JSWORKER_HTTP_PORT={port} on JSWORKER_HTTP_HOST={HOST} cannot be listened to: " in line
    assert "\n" not in line


async def test_an_address_that_is_nobodys_is_one_clear_line() -> None:
    with pytest.raises(PortUnavailable, match=r"JSWORKER_HTTP_HOST=no\.such\.host\.invalid cannot be"):
        await HttpServer({}).open("no.such.host.invalid", 0)
