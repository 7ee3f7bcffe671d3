"""nats-py's client, extended. Only this file uses private members of nats-py."""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.transport import TcpTransport
from nats.js.errors import APIError
from nats.protocol.parser import AWAITING_CONTROL_LINE, AWAITING_MSG_PAYLOAD, PERMISSIONS_ERR, Parser

from jsworker.core.own_sockets import own

_PING = b"PING\r\n"
_VERDICT = b"PUB $JS.ACK."
_CLOSE_SECONDS = 2.0
_BARRIER_SECONDS = 1
_CANCEL_AGAIN_SECONDS = 0.05

_ARRIVAL = re.compile(rb"(H)?MSG ([^ ]++) (\d++) (?:([^ \r\n]++) )?(?(1)(\d++) )(\d++)\r\n")
"""The line before a message: H if it has headers, subject, number of the inbox, reply subject if any, size of
the headers if any, whole size. A subject holds any byte but those at which the server splits."""

Take = Callable[[str, bytes, bytes, dict[str, str] | None], None]
"""Receives a message of an inbox: subject, reply subject, content, and the headers of a status."""


def verdict_about(reply: bytes, verdict: bytes) -> bytes:
    """Return the command that sends a verdict about a message."""
    return b"PUB %b %d\r\n%b\r\n" % (reply, len(verdict), verdict)


def reason_of(error: Exception) -> str:
    """Return an error of nats-py in the server's own words."""
    if isinstance(error, APIError):
        return error.description or f"JetStream answered {error.code}"
    words = str(error).removeprefix("nats: ")
    if words.startswith("'"):  # as the protocol quotes it
        words = words.strip("'")
    return words or type(error).__name__


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float = math.inf) -> None:
    """Cancel tasks that wait in nats-py until all have ended, or ``seconds`` have gone by.

    Once is not enough: nats-py swallows a cancellation that comes while it waits to send; and in Python 3.11
    its ``wait_for`` loses one that comes while what it awaits ends. The task would go on, and connect.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while (left := {task for task in tasks if not task.done()}) and (until := deadline - clock()) > 0:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=min(_CANCEL_AGAIN_SECONDS, until))


class _InboxParser(Parser):
    """nats-py's parser, extended: passes whole messages straight to inboxes.

    nats-py takes five times as long for each message, and splits subjects where the server does not: any
    producer could end the connection or write to other inboxes. So it never reads the line before a
    message; it gets the content of messages that are cut off or have a status, and all that is no message.
    """

    def __init__(self, client: "Client") -> None:
        super().__init__(client)
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        buffer = self.buf
        if self.state == AWAITING_CONTROL_LINE:
            data = bytes(buffer) + data
            buffer.clear()
        rest = 0
        while rest < len(data) and self.buf is buffer:  # nats-py replaces it when the connection is lost
            if self.state == AWAITING_CONTROL_LINE:
                rest = await self._pass(data, rest)
            if self.state == AWAITING_MSG_PAYLOAD:
                end = rest + self.needed + 2 - len(buffer)
            elif not (end := data.find(b"\n", rest) + 1):  # cut off
                buffer.extend(data[rest:])
                return
            await super().parse(data[rest:end])
            rest = end

    async def _pass(self, data: bytes, rest: int) -> int:
        """Pass messages on; return where the content or line begins that nats-py gets."""
        inboxes = self._client.inboxes
        while (line := _ARRIVAL.match(data, rest)) is not None:
            _, subject, number, reply, head, size = line.groups()
            take = inboxes.get(int(number))
            begin = line.end()
            end = begin + int(size)
            if take is None or (head and not reply) or len(data) < end + 2:
                self.msg_arg = {"subject": subject, "sid": int(number), "reply": reply or b""}
                self.header_needed, self.needed = int(head or 0), int(size)
                self.state = AWAITING_MSG_PAYLOAD
                return begin
            rest = end + 2
            try:
                content = data[begin + int(head or 0) : end]
                take(subject.decode("utf-8", "replace"), reply or b"", content, None)
            except Exception as error:  # noqa: BLE001 -- a fault of one message must not end all reading
                await self._client._error_cb(error)  # noqa: SLF001 -- see the first line of this file
        return rest


class Client(NatsClient):
    """One connection to NATS; ``require_tls``: never send a login or a message without TLS."""

    def __init__(self, *, require_tls: bool) -> None:
        super().__init__()
        self.inboxes: dict[int, Take] = {}
        self._inbox_subjects: dict[int, str] = {}
        self._require_tls = require_tls
        self._attempts: set[asyncio.Task[Any]] = set()
        self._ps = _InboxParser(self)
        own(self)

    def fileno(self) -> int:
        """Return the descriptor of the socket; -1 if there is none."""
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        if writer is None or writer.is_closing():
            return -1
        return int(writer.get_extra_info("socket").fileno())

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The INFO that the connected server has sent."""
        return self._server_info

    @property
    def is_dead(self) -> bool:
        """Whether nats-py closed itself, or its tasks ended without a word, as on uvloop's errors."""
        tasks = (self._reading_task, self._flusher_task) if self.is_connected else (self._reconnection_task,)
        return any(task is None or task.done() for task in tasks)

    @property
    def pending_bytes(self) -> int:
        """How much waits to be sent."""
        return self._pending_data_size

    def open_inbox(self, subject: str, take: Take) -> int:
        """Subscribe until the connection is lost; returns the inbox's number.

        Arrivals go straight to ``take``, which must not block. nats-py's own subscriptions come back by
        themselves after a reconnect, with requests that the server still remembers, and are slower.
        """
        self._sid += 1
        self.inboxes[self._sid] = take
        self._inbox_subjects[self._sid] = subject
        self._send(b"SUB %b  %d\r\n" % (subject.encode(), self._sid))
        return self._sid

    @property
    def request_inbox(self) -> str | None:
        """The subject to which the answers to all requests come; None before the first request."""
        return f"{self._resp_sub_prefix.decode()}*" if self._resp_sub_prefix else None

    def subscribe_again(self, subjects: Collection[str]) -> set[str]:
        """Subscribe again to those of these subjects, in lower case, that this client has; return those."""
        own = {sid: subscription._subject for sid, subscription in self._subs.items()}  # noqa: SLF001 -- see the first line
        found: set[str] = set()
        for sid, subject in (own | self._inbox_subjects).items():
            if subject.lower() in subjects:
                self._send(b"SUB %b  %d\r\n" % (subject.encode(), sid))
                found.add(subject.lower())
        return found

    async def close_inbox(self, number: int) -> None:
        """Unsubscribe, and take what is on its way: nats-py would let it wait for ``ack_wait``."""
        try:
            if self.is_connected and number in self.inboxes:
                self._send(b"UNSUB %d\r\n" % number)
            while self.is_connected and number in self.inboxes:
                with suppress(TimeoutError):  # a silent server: until it answers or nats-py gives it up
                    await self.flush(_BARRIER_SECONDS)
                    break
        finally:
            self._forget_inbox(number)

    def leave_inbox(self, number: int) -> None:
        """Unsubscribe at once; what is on its way is dropped."""
        if self._forget_inbox(number) and self.is_connected:
            self._send(b"UNSUB %d\r\n" % number)

    def _forget_inbox(self, number: int) -> bool:
        self._inbox_subjects.pop(number, None)
        return self.inboxes.pop(number, None) is not None

    def lose(self) -> None:
        """Forget the inboxes of a lost connection, and commands that wait to be sent, except verdicts.

        A request would be served to an inbox that is gone, and its messages would wait for ``ack_wait``.
        """
        self.inboxes.clear()
        self._inbox_subjects.clear()
        self._pending = [command for command in self._pending if command.startswith(_VERDICT)]
        self._pending_data_size = sum(map(len, self._pending))

    def take_verdicts(self) -> list[bytes]:
        """Return the verdicts that wait to be sent, which are not sent then."""
        taken = [command for command in self._pending if command.startswith(_VERDICT)]
        self._pending = [command for command in self._pending if not command.startswith(_VERDICT)]
        self._pending_data_size = sum(map(len, self._pending))
        return taken

    def send_verdicts(self, verdicts: Iterable[bytes]) -> None:
        """Send what ``take_verdicts`` or ``verdict_about`` has returned, like ``post``."""
        for each in verdicts:
            self._send_or_drop(each)

    def post(self, subject: str, content: bytes, reply: str = "", headers: bytes = b"") -> None:
        """Send without waiting or a guarantee; a message is dropped when the buffer of unsent bytes is full.

        ``subject`` and ``reply`` hold no white space, which is not checked; ``headers`` is a whole block.
        """
        line = f"{subject} {reply}".encode()
        size = len(content)
        if headers:
            sizes = (len(headers), len(headers) + size)
            self._send_or_drop(b"HPUB %b %d %d\r\n%b%b\r\n" % (line, *sizes, headers, content))
        else:
            self._send_or_drop(b"PUB %b %d\r\n%b\r\n" % (line, size, content))

    def answer(self, reply: bytes, verdict: bytes) -> None:
        """Send a verdict about a message, without waiting or a guarantee, like ``post``."""
        self._send_or_drop(verdict_about(reply, verdict))

    def _send_or_drop(self, command: bytes) -> None:
        if self._pending_data_size <= self._max_pending_size and not self.is_closed:
            self._send(command)

    def _send(self, command: bytes) -> None:
        self._pending.append(command)
        self._pending_data_size += len(command)
        queue = self._flush_queue
        if queue is not None and queue.empty() and self.is_connected:
            queue.put_nowait(asyncio.get_running_loop().create_future())

    async def flush(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109 -- nats-py's signature
        """Wait until the server has read all that was sent; nats-py's own may lose a cancellation."""
        answer = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(timeout):
            await self._send_ping(answer)
            await answer

    async def discard(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Close within seconds, whatever state the connection is in, and never raise.

        nats-py's ``close`` waits for ever for a frozen server to read, and leaves tasks when it fails.
        """
        try:
            await end_tasks(self._attempts, seconds)  # first: an attempt that goes on would connect again
            if self.is_connected:
                with suppress(TimeoutError):
                    await self.flush(seconds)
        finally:
            self._status = NatsClient.CLOSED
            reading = [subscription._wait_for_msgs_task for subscription in self._subs.values()]  # noqa: SLF001 -- see the first line
            own = (self._reconnection_task, self._reading_task, self._ping_interval_task, self._flusher_task)
            tasks = {task for task in (*self._attempts, *own, *reading) if task is not None}
            for task in tasks:
                task.cancel()
            self._abort()
        await end_tasks(tasks, seconds)

    def _abort(self) -> None:
        """Free the socket at once: a closed transport waits for ever for a frozen server to read."""
        writer: asyncio.StreamWriter | None = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    async def _connect_to_server(self, s: Any) -> None:
        self._abort()  # nats-py leaves the socket of a refused attempt to the garbage collector
        await super()._connect_to_server(s)
        transport = self._transport
        if isinstance(transport, TcpTransport):
            # Python 3.12's own, and 3.13's until 2025, watches a lost connection's socket again: connections
            # that get the same file descriptor then fail, github.com/python/cpython/issues/136234.
            write: Callable[[bytes], None] = partial(TcpTransport.write, transport)
            transport.writelines = lambda commands: write(b"".join(commands))  # type: ignore[method-assign]

    def _connect_command(self) -> bytes:
        """Let CONNECT leave in one write with the PING that nats-py sends next.

        A server that refuses the connection has closed it by then: a second write would fail, and the reason
        that the server sent would not be read.
        """
        command: bytes = super()._connect_command()
        transport = self._transport
        if not isinstance(transport, TcpTransport):
            return command
        write: Callable[[bytes], None] = partial(TcpTransport.write, transport)

        def write_both(ping: bytes) -> None:
            if ping:
                transport.write = write  # type: ignore[method-assign]
                write(command + ping)

        transport.write = write_both  # type: ignore[method-assign]  # until the PING, or the next login
        return b""

    async def _attempt_reconnect(self) -> None:
        if (attempt := asyncio.current_task()) is not None:  # nats-py may forget a running one
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
        await super()._attempt_reconnect()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self.inboxes.get(sid)
        try:
            if take is None:
                await super()._process_msg(sid, subject, reply, data, headers)
                return
            status = await self._process_headers(headers) if headers and not reply else None
        except (IndexError, ValueError):  # whose texts the sender could vary without end
            await self._error_cb(ValueError("a message was dropped, because its headers cannot be read"))
            return
        try:
            take(subject.decode("utf-8", "replace"), reply, data, status)
        except Exception as error:  # noqa: BLE001 -- a fault of one message must not end all reading
            await self._error_cb(error)

    async def _process_err(self, err_msg: str) -> None:
        """Tell the server's reason for closing the connection, too: nats-py keeps it to itself."""
        if PERMISSIONS_ERR not in err_msg:
            await self._error_cb(nats.errors.Error(err_msg.strip("'")))
        await super()._process_err(err_msg)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 -- nats-py's signature
        """Require TLS of the server before the login is sent: nats-py would go on in clear text."""
        if initial_connection and self._require_tls:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats.errors.SecureConnWantedError
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _flush_pending(self, force_flush: bool = False) -> Any:  # noqa: FBT001, FBT002 -- nats-py's signature
        """Connect again when sending fails, because nats-py's own task for reconnecting has ended."""
        try:
            return await super()._flush_pending(force_flush)
        except (OSError, RuntimeError, AttributeError) as error:  # the others come from uvloop
            await self._process_op_err(error)

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Queue the PING behind what is pending: nats-py sends it first, and ``flush`` promises nothing."""
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        if self.is_connected:
            await self._send_command(_PING)
            await self._flush_pending()

    async def _process_pong(self) -> None:
        """Survive the answer to a ``flush`` that gave up waiting: nats-py stops reading for good."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
