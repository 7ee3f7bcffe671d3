"""A listener that keeps every event, for tests that ask what was told and in which order."""

from typing import Any
from uuid import UUID

from jsworker.core.events import Event
from tests.support.polling import eventually


class Recorder:
    """Keeps events in the order in which they were told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def names(self, job_id: UUID | None = None) -> list[str]:
        """Return the names of all events, or of those about one job."""
        return [
            event.name for event in self.events if job_id is None or event.fields.get("job_id") == str(job_id)
        ]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the events of one name."""
        return [event.fields for event in self.events if event.name == name]

    async def told(self, name: str, *, times: int = 1, seconds: float = 60.0) -> list[dict[str, Any]]:
        """Wait until an event was told ``times`` times and return the fields of all of its name."""

        async def often_enough() -> list[dict[str, Any]]:
            found = self.of(name)
            assert len(found) >= times, f"{name} told {len(found)} times; all events: {self.names()}"
            return found

        return await eventually(often_enough, seconds=seconds)
