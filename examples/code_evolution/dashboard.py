"""Serves jsworker's dashboard in a thread during the demo, if its extra is installed."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from jsworker import JobClient, Settings

_PORT = 8100
_CLOSING_SECONDS = 3.0


@contextmanager
def open_dashboard(settings: Settings, console: Console) -> Iterator[None]:
    """Serve the dashboard for the length of a block, and print where."""
    try:
        import uvicorn  # noqa: PLC0415 -- an extra

        from jsworker.dashboard import dashboard  # noqa: PLC0415
    except ImportError:
        yield
        return
    listening = _listen()
    config = {"lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 1}
    loaded = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with JobClient(settings) as client:
            servers.append(uvicorn.Server(uvicorn.Config(dashboard(client), **config)))  # type: ignore[arg-type]
            loaded.set()
            await servers[0].serve(sockets=[listening])

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="dashboard", daemon=True)
    thread.start()
    console.print(
        f"Dashboard, while it runs: http://127.0.0.1:{listening.getsockname()[1]}/", highlight=False
    )
    console.print()
    try:
        yield
    finally:
        if loaded.wait(_CLOSING_SECONDS):
            servers[0].should_exit = True
            thread.join(_CLOSING_SECONDS)


def _listen() -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", _PORT))
    except OSError:
        return socket.create_server(("127.0.0.1", 0))
