"""The event loops that workers may run on, for tests of what differs between them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

RunOnLoop = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_on_loop(request: pytest.FixtureRequest) -> RunOnLoop:
    """Runs a coroutine to its end, once for each event loop."""

    def run(coroutine: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(coroutine)

    return run
