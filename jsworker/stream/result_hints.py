"""Hints that jobs have ended, from workers to clients that wait for them, on core NATS.

A client tells all workers which jobs it waits for, and again every few seconds. A worker that ends one of
them sends a hint to that client, and none for a job that no client waits for. A hint that is lost, late
or forged costs time: the client reads the row. So nothing is confirmed here, and everything is bounded.
"""

import re
import secrets
from collections.abc import Callable, Sequence
from typing import Final
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.stream.connection import Connection
from jsworker.stream.nats_client import Client

AWAITED: Final = "jsworker.awaited."
"""Subject, with a client's token appended, of the job ids that the client waits for, each of 16 bytes."""
ENDED: Final = "jsworker.ended."
"""Subject, with the same token appended, of the id of a job whose end a worker has written."""
RENEW_SECONDS: Final = 5.0
FORGET_SECONDS: Final = 10.0
"""What a client has not said again for at least so long is forgotten; for twice as long at most."""

_ID_BYTES: Final = 16
_IDS: Final = 2000  # in one message: half of the 64 KB that servers may be set to take at most
_TOKEN: Final = re.compile(r"[0-9a-f]{16}")
_MOST_AWAITED: Final = 50_000  # some 10 MB
_MOST_CLIENTS: Final = 8  # for one job
_MOST_A_SECOND: Final = 2**22  # bytes, each message counted as ``_MESSAGE_BYTES`` more
_MESSAGE_BYTES: Final = 512
_MOST_STEPS_OF_REST: Final = 63


class HintSender:
    """A worker's side: knows which jobs are waited for, and hints at their ends.

    Anybody who may publish to ``AWAITED`` can name jobs at will. So a client's subject is made of its token
    here: a reply subject might be one of JetStream's, which workers may use and others may not. Behind too
    many messages the worker does not listen until the next ``step``, and longer after each flood.

    Attributes:
        somebody_waits: whether any job is waited for; without one there is nothing to ``tell``.
    """

    def __init__(self, connection: Connection, *, report: Callable[[str | None], None]) -> None:
        """Prepare; ``report`` is called with the reason of an overload, and with None when it is over."""
        self.somebody_waits = False
        self._connection = connection
        self._report = report
        self._recent: dict[bytes, tuple[str, ...]] = {}
        self._earlier: dict[bytes, tuple[str, ...]] = {}
        self._listening: tuple[Client, int] | None = None
        self._rest = self._last_rest = 0
        self._counted_from = 0.0
        self._counted = 0
        connection.lost_callbacks.append(self._forget)
        connection.restored_callbacks.append(self._on_restored)

    async def step(self) -> None:
        """Forget announcements that were not repeated, and listen; to be called every ``FORGET_SECONDS``."""
        self._earlier, self._recent = self._recent, {}
        self.somebody_waits = bool(self._earlier)
        self._counted = 0
        if self._listening is not None:  # since the last step, at least
            self._last_rest = 0
            self._report(None)
        elif self._rest:
            self._rest -= 1
        else:
            self._listen()

    def tell(self, job_id: UUID) -> None:
        """Send a hint at the end of a job to the clients that wait for it."""
        name = job_id.bytes
        clients = {*self._recent.pop(name, ()), *self._earlier.pop(name, ())}
        if clients and self._connection.connected:
            for token in clients:
                self._connection.client.post(ENDED + token, name)

    def _forget(self) -> None:
        self._listening = None  # the subscription is lost with the connection

    def _on_restored(self) -> None:
        if not self._last_rest:
            self._listen()

    def _listen(self) -> None:
        if self._connection.connected and self._listening is None:
            client = self._connection.client
            self._listening = client, client.open_inbox(f"{AWAITED}*", self._note)

    def _note(self, subject: str, _reply: bytes, content: bytes, _status: dict[str, str] | None) -> None:
        if self._is_too_much(len(content)):
            return
        token = subject.removeprefix(AWAITED)
        if len(content) % _ID_BYTES or len(content) > _IDS * _ID_BYTES or not _TOKEN.fullmatch(token):
            return
        recent = self._recent
        for start in range(0, len(content), _ID_BYTES):
            name = content[start : start + _ID_BYTES]
            clients = recent.get(name)
            if clients is None:
                if len(recent) >= _MOST_AWAITED:
                    return
                recent[name] = (token,)
            elif token not in clients and len(clients) < _MOST_CLIENTS:
                recent[name] = (*clients, token)
        self.somebody_waits = bool(recent or self._earlier)

    def _is_too_much(self, size: int) -> bool:
        """Count a message; after too many in a second, stop listening for one or more steps."""
        now = boottime()
        if now - self._counted_from >= 1:
            self._counted_from, self._counted = now, 0
        self._counted += size + _MESSAGE_BYTES
        if self._counted <= _MOST_A_SECOND:
            return False
        if self._listening is not None:
            client, number = self._listening
            client.leave_inbox(number)
        self._listening = None
        self._last_rest = min(2 * self._last_rest + 1, _MOST_STEPS_OF_REST)
        self._rest = self._last_rest - 1
        self._report(f"more than {_MOST_A_SECOND} bytes a second of clients that wait for results")
        return True


class HintReceiver:
    """A client's side: announces the jobs that it waits for, and receives hints.

    Attributes:
        take: called with the id of a job that may have ended.
    """

    def __init__(self, connection: Connection) -> None:
        self.take: Callable[[UUID], None] = lambda _: None
        self._connection = connection
        self._token = secrets.token_hex(8)
        self._listening: Client | None = None
        self._is_denied = False
        connection.lost_callbacks.append(self._forget)
        connection.denied_callbacks.append(self._on_denied)

    def announce(self, ids: Sequence[UUID]) -> None:
        """Announce that the client waits for these jobs; without a connection nothing is sent."""
        if not self._connection.connected:
            return
        client = self._connection.client
        if self._listening is not client:
            self._listening = client
            client.open_inbox(ENDED + self._token, self._on_hint)
        if not self._is_denied:
            for start in range(0, len(ids), _IDS):
                client.post(
                    AWAITED + self._token, b"".join(job_id.bytes for job_id in ids[start : start + _IDS])
                )

    def _forget(self) -> None:
        self._listening = None
        self._is_denied = False

    def _on_denied(self, reason: str) -> None:
        """Send no more announcements on this connection: the server would log each of them."""
        self._is_denied |= self._token in reason

    def _on_hint(self, _subject: str, _reply: bytes, content: bytes, _status: dict[str, str] | None) -> None:
        if len(content) == _ID_BYTES:
            self.take(UUID(bytes=content))
