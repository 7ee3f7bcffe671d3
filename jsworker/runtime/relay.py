"""The relay tick: what is due enters the queue, what is queued is published. Every worker has one."""

from jsworker.client.publishing import publish_due
from jsworker.errors import DatabaseRefused, DatabaseUnavailable
from jsworker.ownership.database import Database
from jsworker.ownership.outbox import promote
from jsworker.runtime.health import DatabaseHealth
from jsworker.stream.jetstream import Stream

_BATCH = 1000


class Relay:
    """Promotes and publishes until a batch is short."""

    def __init__(self, *, database: Database, health: DatabaseHealth, stream: Stream) -> None:
        self._database = database
        self._health = health
        self._stream = stream

    async def step(self) -> None:
        """Promote what is due, then publish what the outbox holds."""
        if not self._health.up:
            return
        try:
            while await promote(self._database, limit=_BATCH) == _BATCH:
                continue
            while self._stream.connected:
                if len(await publish_due(self._database, self._stream, limit=_BATCH)) < _BATCH:
                    return
        except (DatabaseUnavailable, DatabaseRefused) as error:
            self._health.failed(error)
