"""How late the event loop is: seen while it stands still and for a while after, and never after the end."""

import asyncio
import time

from jsworker.worker.watchdog import LoopLag


async def test_a_loop_that_stood_still_is_remembered() -> None:
    lag = LoopLag()
    assert lag.seconds == 0
    lag.start()
    time.sleep(0.6)  # noqa: ASYNC251 -- the fault itself
    assert lag.seconds > 0.3
    await asyncio.sleep(0)
    assert lag.seconds > 0.3
    await lag.stop()


async def test_what_is_not_watched_is_not_late() -> None:
    lag = LoopLag()
    lag.start()
    await lag.stop()
    time.sleep(0.4)  # noqa: ASYNC251 -- the fault itself
    assert lag.seconds == 0
