"""The rounds of a worker's loop, counted: how a test knows that a loop had its chance."""

import time

from jsworker.worker.lifecycle import Loop
from tests.support.polling import eventually


def count_rounds(loop: Loop) -> list[float]:
    """Note the end of each round of a running loop from the next one on."""
    ends: list[float] = []
    step = loop._step

    async def counted() -> None:
        await step()
        ends.append(time.monotonic())

    loop._step = counted
    return ends


async def rounds_pass(ends: list[float], count: int) -> None:
    """Wait until so many more rounds have ended."""
    wanted = len(ends) + count

    async def check() -> None:
        assert len(ends) >= wanted

    await eventually(check)
