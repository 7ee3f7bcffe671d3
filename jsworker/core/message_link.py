"""Messages between two processes over a socket pair: one JSON object a line, strictly read and bounded."""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, SecretStr, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from jsworker.core.clock import boottime

MessageT = TypeVar("MessageT")

LONGEST_LINE: Final = 64 * 1024
"""Bytes; a longer line is skipped."""
SPARING_RATE: Final = 2**20
"""Bytes a second that are read from a process that may send anything."""
FULL_RATE: Final = 2**26

_READ_BYTES: Final = 65_536
_ROUND_SECONDS: Final = 0.25
"""Duration of a budget of bytes; once it is used up, nothing is read until the next budget begins."""
_INVALID_LINE_BYTES: Final = 4_096
"""Bytes of the budget that an invalid line costs, so that a flood of them does not occupy the reader."""


class Message(BaseModel):
    """A message from one process to the other; the field ``what`` tells the types of messages apart."""

    model_config = ConfigDict(frozen=True)


def line_of(message: Message) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(dict(message), default=_plain).encode() + b"\n"


class MessageLines(Generic[MessageT]):
    """Splits received bytes into messages that ``adapter`` accepts; None stands for an invalid line."""

    def __init__(self, adapter: TypeAdapter[MessageT], *, longest: int = LONGEST_LINE) -> None:
        self._adapter = adapter
        self._longest = longest
        self._partial = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> Iterator[MessageT | None]:
        """Take bytes and yield the messages that they complete."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._append(end)
            line, skipped = bytes(self._partial), self._skipping
            self._partial.clear()
            self._skipping = False
            yield None if skipped else self._read(line)
        self._append(rest)

    def _append(self, data: bytes) -> None:
        self._skipping = self._skipping or len(self._partial) + len(data) > self._longest
        if self._skipping:
            self._partial.clear()
        else:
            self._partial += data

    def _read(self, line: bytes) -> MessageT | None:
        try:
            return self._adapter.validate_python(json.loads(line))
        except (ValidationError, ValueError, RecursionError):
            return None


def _ignore(*_: object) -> None:
    """Do nothing."""


class MessageLink(Generic[MessageT]):
    """One end of a socket pair between a process and its child. Belongs to the event loop.

    It takes the socket over and, once ``open`` was called, reads at most ``rate`` bytes a second from it. For
    each line that is not a message it calls ``on_invalid``, without the line.
    """

    def __init__(
        self,
        end: socket.socket,
        adapter: TypeAdapter[MessageT],
        *,
        on_message: Callable[[MessageT], None],
        on_end: Callable[[], None] = _ignore,
        on_invalid: Callable[[], None] = _ignore,
        rate: int = FULL_RATE,
        longest_line: int = LONGEST_LINE,
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._lines = MessageLines(adapter, longest=longest_line)
        self._on_message: Callable[[MessageT], None] = on_message
        self._on_end = on_end
        self._on_invalid = on_invalid
        self._rate = rate
        self._budget = rate * _ROUND_SECONDS
        self._round_began_at = boottime()
        self._resume: asyncio.TimerHandle | None = None
        self._unsent = bytearray()
        self._waits_to_send = False
        self._flushed: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Begin to read, or go on after a pause."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self.hear)

    def close(self) -> None:
        """Neither read nor send any more; the other process sees the end."""
        self._unsent.clear()
        self.detach()
        self._socket.close()
        # The callbacks' owners would be kept alive by a cycle of references.
        self._on_message, self._on_end, self._on_invalid = _ignore, _ignore, _ignore

    def detach(self) -> None:
        """Neither read nor send on the event loop any more; ``send_blocking`` still works."""
        if self._socket.fileno() >= 0:
            self._stop_reading()
        self._end_sending()

    @property
    def unsent(self) -> int:
        """Bytes that the other process has not taken yet."""
        return len(self._unsent)

    def hear(self, *, to_the_end: bool = False) -> None:
        """Read what has arrived so far, within the budget.

        ``to_the_end``: the other process has ended; begin a new budget for what it sent last.
        """
        now = boottime()
        if to_the_end or now - self._round_began_at >= _ROUND_SECONDS:
            self._budget = self._rate * _ROUND_SECONDS
            self._round_began_at = now
        while self._budget > 0:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._stop_reading()
                self._on_end()
                return
            self._budget -= len(data)
            for message in self._lines.feed(data):
                if message is not None:
                    self._on_message(message)
                    continue
                self._budget -= _INVALID_LINE_BYTES
                self._on_invalid()
        self._stop_reading()
        self._resume = self._loop.call_later(_ROUND_SECONDS, self.open)

    def send(self, *messages: Message) -> None:
        """Send as much as the socket takes now and the rest as soon as it takes more, in whole lines."""
        for message in messages:
            self._unsent += line_of(message)
        self._send_on()

    async def flush(self) -> None:
        """Wait until everything is sent, or the other end is closed."""
        while self._unsent:
            self._flushed = self._loop.create_future()
            await self._flushed

    def send_blocking(self, message: Message, *, seconds: float) -> bool:
        """Send one last message outside of the event loop; return whether it was taken in time."""
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(bytes(self._unsent) + line_of(message))
        except OSError:
            return False
        return True

    def _stop_reading(self) -> None:
        self._loop.remove_reader(self._socket)
        if self._resume is not None:
            self._resume.cancel()

    def _send_on(self) -> None:
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the other process is dead, which reading finds
            self._unsent.clear()
        if not self._unsent:
            self._end_sending()
        elif not self._waits_to_send:
            self._waits_to_send = True
            self._loop.add_writer(self._socket, self._send_on)

    def _end_sending(self) -> None:
        if self._waits_to_send:
            self._waits_to_send = False
            self._loop.remove_writer(self._socket)
        if self._flushed is not None and not self._flushed.done():
            self._flushed.set_result(None)


def _plain(value: Any) -> Any:
    match value:
        case BaseModel():  # by its fields: the model's own JSON form would leave secrets out
            return dict(value)
        case SecretStr():
            return value.get_secret_value()
        case _:
            return to_jsonable_python(value)
