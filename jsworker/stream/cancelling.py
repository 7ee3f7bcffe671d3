"""Tasks that wait in nats-py are cancelled until they have ended: once is not enough."""

import asyncio
import math
from collections.abc import Collection
from typing import Any, Final

_AGAIN_SECONDS: Final = 0.05


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float = math.inf) -> None:
    """Cancel tasks again and again until all have ended, or ``seconds`` have gone by.

    nats-py swallows a cancellation that comes while it waits to send; and in Python 3.11
    ``asyncio.wait_for``, which it waits with, loses one that comes while what it awaits ends. What was to end
    would go on, and connect.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while (left := {task for task in tasks if not task.done()}) and (until := deadline - clock()) > 0:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=min(_AGAIN_SECONDS, until))
