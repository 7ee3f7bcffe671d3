"""A call of a client with the environment's settings, for commands that need no more than one call."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jsworker.cli.output import database_clock
from jsworker.client.job_client import JobClient
from jsworker.ownership.refusals import readers_right

T = TypeVar("T")


def ask_client(call: Callable[[JobClient], Awaitable[T]]) -> T:
    """Call a client and return the result."""

    async def with_client() -> T:
        with readers_right():  # the client names the rights of what acts
            async with JobClient.from_env() as client:
                await database_clock.ask(client.database)
                return await call(client)

    return asyncio.run(with_client())
