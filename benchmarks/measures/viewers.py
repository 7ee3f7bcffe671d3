"""Viewers of live pages, all in one process: ``python -m benchmarks.measures.viewers FILE COUNT URL…``.

They stay until SIGTERM, and connect again a second after a stream has ended, as browsers do. FILE is
made when each of them has received an event.
"""

import asyncio
import sys
from pathlib import Path
from urllib.parse import urlsplit

_AGAIN_SECONDS = 1.0
_READ_BYTES = 1 << 20


async def _look(url: str, seen: asyncio.Event) -> None:
    parts = urlsplit(url)
    request = (
        f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nAccept: text/event-stream\r\n"
        "Connection: close\r\n\r\n"
    )
    while True:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request.encode())
        if b" 200 " not in (status := await reader.readline()):
            raise SystemExit(f"{url}: {status.decode(errors='replace').strip()}")
        while received := await reader.read(_READ_BYTES):
            if b"data: " in received:
                seen.set()
        writer.close()
        await asyncio.sleep(_AGAIN_SECONDS)


async def _look_all(file: Path, count: int, urls: list[str]) -> None:
    seen = [asyncio.Event() for _ in range(count)]
    async with asyncio.TaskGroup() as viewers:
        for place, each in enumerate(seen):
            viewers.create_task(_look(urls[place % len(urls)], each))
        for each in seen:
            await each.wait()
        file.touch()  # noqa: ASYNC240 -- once


if __name__ == "__main__":
    asyncio.run(_look_all(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
