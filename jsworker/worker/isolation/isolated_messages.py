"""What owner and quarantined process tell each other: one JSON object a line."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from pydantic import SecretStr

from jsworker.core.settings import Settings
from jsworker.ownership.transitions.claim import ClaimedJob
from jsworker.worker.pipeline.outcomes import Completed, Failed, HandedBack, Interrupted, Lost, Outcome

_LENGTH_BYTES: Final = 8
_RECEIVED_BYTES: Final = 2**20
_OUTCOMES: Final = {each.__name__: each for each in (Completed, Failed, HandedBack, Interrupted, Lost)}


@dataclass(frozen=True, slots=True)
class Order:
    """All that the quarantined process needs to run a job for its owner.

    Attributes:
        origin: what makes the processor.
        path: the owner's ``sys.path``.
        worker_id: the owner, in whose name the process writes.
        settings: the owner's settings, secrets among them: they pass through the socket alone.
        claimed: the job.
    """

    origin: str
    path: list[str]
    worker_id: str
    settings: Settings
    claimed: ClaimedJob

    def frame(self) -> bytes:
        """Return the order with its length before it: what follows it is not to be read with it."""
        names = Settings.model_fields
        text = line(
            origin=self.origin,
            path=self.path,
            worker_id=self.worker_id,
            settings={name: _plain(getattr(self.settings, name)) for name in names},
            claimed={name: _plain(value) for name, value in self.claimed._asdict().items()},
        )
        return len(text).to_bytes(_LENGTH_BYTES, "big") + text

    @classmethod
    def read(cls, link: socket.socket) -> "Order":
        """Wait for the order, and leave unread what comes behind it.

        Raises:
            EOFError: the owner has gone.
        """
        length = int.from_bytes(_receive(link, _LENGTH_BYTES), "big")
        told = json.loads(_receive(link, length))
        claimed = told["claimed"] | {"id": UUID(told["claimed"]["id"])}
        if claimed["deadline"] is not None:
            claimed["deadline"] = datetime.fromisoformat(claimed["deadline"])
        return cls(
            origin=told["origin"],
            path=told["path"],
            worker_id=told["worker_id"],
            settings=Settings(**told["settings"]),
            claimed=ClaimedJob(**claimed),
        )


def line(**told: Any) -> bytes:
    """Return one message."""
    return json.dumps(told).encode() + b"\n"


def outcome_line(outcome: Outcome, *, completed: bool) -> bytes:
    """Return the last message: what the run ended in, and whether its own transaction has completed it."""
    values = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
    return line(outcome=type(outcome).__name__, values=values, completed=completed)


def read_outcome(told: Mapping[str, Any]) -> Outcome:
    """Return the outcome of the last message."""
    outcome: Outcome = _OUTCOMES[told["outcome"]](**told["values"])
    return outcome


def _receive(link: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        data = link.recv(min(size - len(received), _RECEIVED_BYTES))
        if not data:
            raise EOFError("the owner has gone")
        received += data
    return bytes(received)


def _plain(value: Any) -> Any:
    match value:
        case SecretStr():
            return value.get_secret_value()
        case UUID() | Path():
            return str(value)
        case datetime():
            return value.isoformat()
        case _:
            return value
