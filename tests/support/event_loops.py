"""The event loops that workers may run on, for tests of what differs between them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

_SECONDS = 240.0
"""Less than pytest's own limit, whose signal uvloop takes for an error of one of its callbacks."""

RunOnLoop = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_on_loop(request: pytest.FixtureRequest) -> RunOnLoop:
    """Runs a coroutine to its end, once for each event loop."""

    async def in_time(coroutine: Coroutine[Any, Any, None]) -> None:
        async with asyncio.timeout(_SECONDS):
            await coroutine

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(in_time(coroutine))

    return run
