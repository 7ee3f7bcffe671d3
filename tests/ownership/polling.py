"""Waiting for what another connection does: look again until it holds or a deadline passes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jsworker.core.errors import DatabaseUnavailable

T = TypeVar("T")

DEADLINE = 60.0


async def eventually(holds: Callable[[], bool], what: str) -> None:
    """Wait until ``holds`` is true; fail after ``DEADLINE`` seconds."""
    give_up_at = time.monotonic() + DEADLINE
    while not holds():
        if time.monotonic() >= give_up_at:
            raise AssertionError(f"not within {DEADLINE:g} s: {what}")
        await asyncio.sleep(0.005)


async def answered(call: Callable[[], Awaitable[T]]) -> T:
    """Ask again until the database answers: a busy machine may be slower than a test's short deadline."""
    give_up_at = time.monotonic() + DEADLINE
    while True:
        try:
            return await call()
        except DatabaseUnavailable:
            if time.monotonic() >= give_up_at:
                raise
