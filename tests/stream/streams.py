"""Streams that tests can look into."""

from typing import Any
from uuid import UUID

from jsworker.core.errors import PublishFailed
from jsworker.core.events import Event, Events
from jsworker.core.settings import Settings
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import WireMessage
from jsworker.stream.publisher import Headers, Published

INSTALLATION = UUID("00000000-0000-4000-8000-000000000001")


class TestStream(Stream):
    """A stream that remembers what it told."""

    __test__ = False

    def __init__(self, settings: Settings, *, installation_id: UUID | None, **options: Any) -> None:
        self.told: list[Event] = []
        events = Events()
        events.on("*", self.told.append)
        super().__init__(
            settings, installation_id=installation_id, events=events, client_name="test", **options
        )

    async def publish(
        self, message: WireMessage, *, headers: Headers | None = None, **options: Any
    ) -> Published:
        [outcome] = await self.publish_many([message], headers=[headers], **options)
        if isinstance(outcome, PublishFailed):
            raise outcome
        return outcome

    def told_of(self, name: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.told if event.name == name]


def settings_for(url: str, **changes: Any) -> Settings:
    return Settings(**{"database_url": "postgresql://nobody@localhost/nothing", "nats_url": url} | changes)
