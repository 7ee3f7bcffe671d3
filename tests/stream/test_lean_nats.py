"""A worker process starts without aiohttp, and a job that needs it for a websocket of its own finds it."""

import asyncio
import subprocess
import sys

from jsworker.embedded.resources import free_port
from tests.stream.conftest import StartServer

# It stops where a worker process has imported all that it needs.
_START = """
import gc, sys, types
from jsworker.supervisor import child_main
child_main.start_as_child = lambda start: None
child_main.ChildStart = types.SimpleNamespace(read=lambda arguments: (None, []))
gc.freeze = lambda: sys.exit(" ".join({"aiohttp", "multidict"} & sys.modules.keys()) or 0)
child_main.main()
"""
_OVER_A_WEBSOCKET = """
import asyncio, sys
from jsworker.stream import lean_nats
import nats
assert "aiohttp" not in sys.modules

async def connect(url):
    connection = await nats.connect(url, connect_timeout=30, ws_connection_headers={"X-Test": ["1"]})
    await connection.flush()
    await connection.close()

asyncio.run(connect(sys.argv[1]))
import aiohttp
print(len(aiohttp.__version__) > 0)
"""


def test_a_worker_does_not_load_it() -> None:
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_job_that_connects_over_a_websocket_does(start_server: StartServer) -> None:
    port = free_port()
    await start_server(f'websocket {{ host: "127.0.0.1", port: {port}, no_tls: true }}')
    script = [sys.executable, "-c", _OVER_A_WEBSOCKET, f"ws://127.0.0.1:{port}"]
    done = await asyncio.to_thread(subprocess.run, script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
