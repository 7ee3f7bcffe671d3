"""Loops end when they are told to."""

import asyncio

from jsworker.worker.lifecycle import Loop


async def test_a_round_that_loses_its_cancellation_is_the_last_one() -> None:
    """As ``wait_for`` does in Python 3.11 when what it awaits ends at the same moment."""
    rounds: list[int] = []
    deaths: list[str] = []

    async def step() -> None:
        rounds.append(len(rounds))
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if len(rounds) > 1:
                raise

    loop = Loop("test", step, interval=0.0, died=lambda name, _: deaths.append(name))
    loop.start()
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await loop.stop()
    assert (rounds, deaths) == ([0], [])
