"""How late the event loop is: seen while it stands still and for a while after."""

import asyncio
import time

from jsworker.ownership.database import Database
from jsworker.worker.lifecycle import Loop
from jsworker.worker.quiet_phases import QuietPhases
from jsworker.worker.watchdog import LAG_SECONDS, Watchdog
from tests.support.contexts import make_context


async def test_a_loop_that_stood_still_is_remembered(database: Database) -> None:
    context = make_context(database)
    watchdog = Watchdog(context, QuietPhases(context))
    loop = Loop("lag", watchdog.step, interval=LAG_SECONDS, died=context.died)
    assert watchdog.lag == 0
    loop.start()
    await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251 -- the fault itself
    assert watchdog.lag > 0.3
    await asyncio.sleep(2 * LAG_SECONDS)
    assert watchdog.lag > 0.3
    await loop.stop()
