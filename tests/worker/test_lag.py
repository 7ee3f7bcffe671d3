"""How late the event loop is: seen while it stands still and for a while after."""

import asyncio
import time

from jsworker.worker.lifecycle import Loop
from jsworker.worker.watchdog import LAG_SECONDS, LoopLag


async def test_a_loop_that_stood_still_is_remembered() -> None:
    lag, deaths = LoopLag(), list[str]()
    loop = Loop("lag", lag.step, interval=LAG_SECONDS, died=lambda name, _: deaths.append(name))
    assert lag.seconds == 0
    loop.start()
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 -- the fault itself
    assert lag.seconds > 0.3
    await asyncio.sleep(2 * LAG_SECONDS)
    assert lag.seconds > 0.3
    await loop.stop()
    assert deaths == []
