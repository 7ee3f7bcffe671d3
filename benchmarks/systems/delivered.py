"""Asks the NATS server how far a consumer has come, for systems that only acknowledge messages."""

from collections.abc import Mapping
from typing import Self

import nats

SERVER, STREAM, BATCH = "DELIVERED_NATS_URL", "DELIVERED_STREAM", "DELIVERED_BATCH"
DURABLE = "worker"


class Watch:
    """A connection that asks for the number of acknowledged messages."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._url, self._stream = variables[SERVER], variables[STREAM]

    async def __aenter__(self) -> Self:
        self._connection = await nats.connect(self._url)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._connection.close()

    async def acknowledged(self) -> int:
        """Return how many messages were delivered and acknowledged."""
        try:
            info = await self._connection.jetstream().consumer_info(self._stream, DURABLE)
        except nats.js.errors.NotFoundError:  # the worker has not made it yet
            return 0
        delivered = info.delivered.stream_seq if info.delivered else 0
        return delivered - (info.num_ack_pending or 0)


async def acknowledged(variables: Mapping[str, str]) -> int:
    """Return how many messages were delivered and acknowledged."""
    async with Watch(variables) as watch:
        return await watch.acknowledged()
