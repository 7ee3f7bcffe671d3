"""A producer that is killed between its commit and its message."""

import asyncio
import signal

from tests.faults.battlefield import Battlefield
from tests.faults.producer import STRIKE_VARIABLE
from tests.faults.producing import start_producer

_PRODUCERS = 3
_JOBS = 20
_RATE = 20.0
_SECONDS = 120.0


async def producer_killed(field: Battlefield) -> None:
    """Kill producers after their commit and before their message: the outbox has to send it."""
    async with field.fault("producer_killed", "producer") as fault:
        for number in range(_PRODUCERS):
            name = f"dying-{len(field.faults)}-{number}"
            process = start_producer(
                field.folder,
                field.client_settings,
                name,
                rate=_RATE,
                seed=number,
                most=_JOBS,
                further={STRIKE_VARIABLE: "after_commit_before_publish"},
            )
            code = await asyncio.to_thread(process.wait, _SECONDS)
            fault.fired = code == -signal.SIGKILL
