"""Waiting for what must become true, with a deadline: the only waiting that tests do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

# What takes long is looked at less often: most checks ask a server, which has work to do meanwhile.
_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.05


async def eventually(check: Callable[[], Awaitable[T]], *, seconds: float = 60.0) -> T:
    """Call ``check`` until it raises no AssertionError, and return what it returns."""
    loop = asyncio.get_running_loop()

    deadline = loop.time() + seconds
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return await check()
        except AssertionError:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 1.2, _LONGEST_PAUSE_SECONDS)
