"""Waiting for what must become true, with a deadline: the only waiting that tests do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def eventually(check: Callable[[], Awaitable[T]], *, seconds: float = 60.0) -> T:
    """Call ``check`` until it raises no AssertionError, and return what it returns."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            return await check()
        except AssertionError:
            if loop.time() > deadline:
                raise
        await asyncio.sleep(0.01)
