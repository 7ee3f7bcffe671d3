"""Events of jobs for plain subscribers: JSON on core NATS, at most once, without waiting.

Subjects are ``<prefix>.events.<kind>.<what>``, three parts behind the prefix. The stream's have one part, or
two, of which the last is a priority.
"""

import json
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from jsworker.core.events import Event, EventName, Events
from jsworker.stream.connection import Connection

WORDS: Final[dict[EventName, str]] = {
    "job.completed": "completed",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
    "job.error": "retried",
    "job.progress": "progress",
}
"""The events that are sent, with the last part of their subjects, which are none of those that jobs have."""
_FIELDS: Final = ("job_id", "kind", "attempt", "fencing_token", "stalls", "seconds", "progress")
"""The fields that are sent: nothing that a job itself has written, neither errors nor stages."""
_MOST_PENDING_BYTES: Final = 2**20
"""Behind so much that waits to be sent events are dropped: answers to messages have eight times the room."""


def subject_of_event(prefix: str, kind: str, word: str) -> str:
    """Return the subject of an event."""
    return f"{prefix}.events.{kind}.{word}"


class EventSender:
    """Sends the events of a worker's jobs.

    Attributes:
        dropped: events that were not sent, because NATS was away or slow, or does not permit it.
    """

    def __init__(self, connection: Connection, events: Events, *, prefix: str, worker_id: str) -> None:
        """Send these events from now on."""
        self.dropped = 0
        self._connection = connection
        self._prefix = prefix
        self._worker_id = worker_id
        self._is_denied = False
        connection.restored_callbacks.append(self._try_again)
        connection.denied_callbacks.append(self._on_denied)
        for name, word in WORDS.items():
            events.on(name, partial(self._send, word))

    def _send(self, word: str, event: Event) -> None:
        fields = event.fields
        if word == "retried" and "seconds" not in fields:  # an error of a hook: no run has ended
            return
        if self._is_denied or not self._connection.connected:
            self.dropped += 1
            return
        client = self._connection.client
        if client.pending_bytes > _MOST_PENDING_BYTES:
            self.dropped += 1
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        body: dict[str, Any] = {"v": 1, "event": word, "at": at, "worker_id": self._worker_id}
        body |= {name: fields[name] for name in _FIELDS if fields.get(name) is not None}
        if "seconds" in body:
            body["seconds"] = round(body["seconds"], 3)
        client.post(subject_of_event(self._prefix, fields["kind"], word), json.dumps(body).encode())

    def _on_denied(self, reason: str) -> None:
        """Send nothing more on this connection: the server would log each event."""
        self._is_denied |= f'"{self._prefix}.events.' in reason

    def _try_again(self) -> None:
        self._is_denied = False
