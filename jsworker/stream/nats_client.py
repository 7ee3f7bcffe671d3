"""nats-py's client with what it lacks. Only this file reaches into nats-py's private parts."""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import nats.errors
from nats.aio.client import Client as NatsClient
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from nats.js.errors import APIError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from jsworker.core.errors import StreamUnavailable

_PING = b"PING\r\n"
_VERDICT = b"PUB $JS.ACK."
_CLOSE_SECONDS = 2.0
_BARRIER_SECONDS = 1
_CANCEL_AGAIN_SECONDS = 0.05

_LARGE_BYTES = 64 * 1024
_DELIVERY = re.compile(rb"HMSG (\S+) (\d+) (\S+) (\d+) (\d+)\r\n")
"""The line before a message with headers and a reply subject: as JetStream delivers what has a message id."""

Take = Callable[[str, bytes, bytes, dict[str, str] | None], None]
"""Takes what arrived in an inbox: subject, reply subject, content, and the headers of a status."""


class ConnectionBroken(StreamUnavailable, nats.errors.Error):
    """The connection to NATS is broken."""


def reason_of(error: Exception) -> str:
    """Return an error of nats-py in the server's own words."""
    if isinstance(error, APIError):
        return error.description or f"JetStream answered {error.code}"
    return str(error).removeprefix("nats: ") or type(error).__name__


async def end_tasks(tasks: Collection[asyncio.Task[Any]], seconds: float = math.inf) -> None:
    """Cancel tasks that wait in nats-py until all have ended, or ``seconds`` have gone by.

    Once is not enough: nats-py swallows a cancellation that comes while it waits to send; and in Python 3.11
    ``asyncio.wait_for``, which it waits with, loses one that comes while what it awaits ends. The task would
    go on, and connect.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    while (left := {task for task in tasks if not task.done()}) and (until := deadline - clock()) > 0:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=min(_CANCEL_AGAIN_SECONDS, until))


@contextmanager
def _broken_connection() -> Iterator[None]:
    """Turn what a dead connection makes nats-py raise into one error, which is nats-py's own as well."""
    try:
        yield
    except (nats.errors.Error, TimeoutError):
        raise
    except OSError as error:
        raise ConnectionBroken from error


class _Transport(TcpTransport):
    """nats-py's TCP transport, which fails with an OSError when it is closed.

    asyncio drops what is written to a closed transport, uvloop raises RuntimeError. nats-py takes that for
    the end of the event loop: its tasks end without a word, and the client stays connected for ever.
    """

    def __init__(self, opened: TcpTransport) -> None:
        vars(self).update(vars(opened))

    def write(self, payload: bytes) -> None:
        with _closed_transport():
            super().write(payload)  # type: ignore[no-untyped-call]

    def writelines(self, payload: list[bytes]) -> None:
        with _closed_transport():
            super().writelines(payload)  # type: ignore[no-untyped-call]

    async def drain(self) -> None:
        with _closed_transport():
            await super().drain()  # type: ignore[no-untyped-call]

    async def read(self, buffer_size: int) -> bytes:
        with _closed_transport():
            data: bytes = await super().read(buffer_size)
        return data

    async def connect_tls(self, *args: Any, **options: Any) -> None:
        with _closed_transport():
            await super().connect_tls(*args, **options)


@contextmanager
def _cancellation_kept() -> Iterator[None]:
    """Raise a cancellation that ``asyncio.wait_for`` has lost: see ``end_tasks``."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("outside of a task")
    before = task.cancelling()
    try:
        yield
    except Exception as error:
        if task.cancelling() > before:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > before:
        raise asyncio.CancelledError


@contextmanager
def _closed_transport() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AttributeError) as error:
        raise ConnectionResetError(str(error)) from error


class _InboxParser(Parser):
    """nats-py's parser, before which an inbox takes its deliveries out of what was read, many at a time.

    nats-py takes five times as long for each. It goes on with whatever else the server sends.
    """

    def __init__(self, client: "Client") -> None:
        super().__init__(client)
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_CONTROL_LINE:
            data = bytes(self.buf) + data
            self.buf.clear()
            rest, is_cut_off = await self._client.take_deliveries(data)
            data = data[rest:]
            if is_cut_off:
                self.buf.extend(data)
                return
        await super().parse(data)


class Client(NatsClient):
    """One connection to NATS; ``require_tls``: never send a login or a message without TLS."""

    def __init__(self, *, require_tls: bool) -> None:
        super().__init__()
        self._require_tls = require_tls
        self._inboxes: dict[int, Take] = {}
        self._attempts: set[asyncio.Task[Any]] = set()
        self._ps = _InboxParser(self)

    @property
    def server_info(self) -> Mapping[str, Any]:
        """The INFO that the connected server has sent."""
        return self._server_info

    @property
    def offers_jetstream(self) -> bool:
        """Whether the connected server itself runs JetStream; another one of its cluster may."""
        return bool(self._server_info.get("jetstream"))

    async def open_inbox(self, subject: str, take: Take) -> int:
        """Subscribe until the connection is lost; returns the inbox's number.

        Arrivals go straight to ``take``, which must not block. nats-py's own subscriptions come back by
        themselves after a reconnect, and with them requests that the server still remembers; they also cost
        a queue and a task switch for each message.
        """
        self._sid += 1
        number = self._sid
        self._inboxes[number] = take
        with _broken_connection():
            await self._send_command(b"SUB %b  %d\r\n" % (subject.encode(), number))
            await self._flush_pending()
        return number

    async def close_inbox(self, number: int) -> None:
        """Unsubscribe, and take what is on its way before the inbox is forgotten.

        With nats-py's ``unsubscribe`` it would get lost, and wait for the consumer's ``ack_wait``.
        """
        try:
            if self.is_connected and number in self._inboxes:
                with _broken_connection():
                    await self._send_unsubscribe(number)
            while self.is_connected and number in self._inboxes:
                try:
                    await self.flush(_BARRIER_SECONDS)
                    break
                except nats.errors.TimeoutError:
                    continue  # a silent server: wait until it answers or nats-py gives the connection up
        except nats.errors.Error:  # the connection is broken: nothing is on its way
            pass
        finally:
            self._inboxes.pop(number, None)

    async def take_deliveries(self, data: bytes) -> tuple[int, bool]:
        """Give whole deliveries at the begin of ``data`` to their inboxes.

        Returns:
            Where the rest begins, and whether it is a delivery that is cut off.
        """
        rest = 0
        while (line := _DELIVERY.match(data, rest)) is not None:
            subject, number, reply, head, size = line.groups()
            take = self._inboxes.get(int(number))
            begin = line.end()
            end = begin + int(size)
            if take is None or end - begin > _LARGE_BYTES:
                break
            if len(data) < end + 2:
                return rest, True
            rest = end + 2
            try:
                take(subject.decode(), reply, data[begin + int(head) : end], None)
            except Exception as error:  # noqa: BLE001 -- a fault of one message must not end all reading
                await self._error_cb(error)
        return rest, False

    async def publish(self, *args: Any, **options: Any) -> None:
        """Publish as nats-py does."""
        with _broken_connection():
            await super().publish(*args, **options)

    async def request(self, *args: Any, **options: Any) -> Msg:
        """Ask as nats-py does."""
        with _broken_connection(), _cancellation_kept():
            return await super().request(*args, **options)

    async def flush(self, *args: Any, **options: Any) -> None:
        """Wait for the server's confirmation as nats-py does."""
        with _broken_connection(), _cancellation_kept():
            await super().flush(*args, **options)

    def lose(self) -> None:
        """Forget what dies with a connection: inboxes, and what waits to be sent.

        Only verdicts still mean something to the next connection. A request would be served to an inbox that
        is closed, and its messages would be lost until the consumer's ``ack_wait``.
        """
        self._inboxes.clear()
        self._pending = [command for command in self._pending if command.startswith(_VERDICT)]
        self._pending_data_size = sum(map(len, self._pending))

    def post(self, subject: str, content: bytes, reply: str = "", headers: bytes = b"") -> None:
        """Send without waiting and without a promise; what a stuck connection cannot hold is dropped.

        ``subject`` and ``reply`` must be one line without spaces, which is not checked; ``headers`` a
        whole block, as the protocol has it.
        """
        line = f"{subject} {reply}".encode()
        size = len(content)
        if headers:
            sizes = (len(headers), len(headers) + size)
            command = b"HPUB %b %d %d\r\n%b%b\r\n" % (line, *sizes, headers, content)
        else:
            command = b"PUB %b %d\r\n%b\r\n" % (line, size, content)
        self._enqueue(command)

    def answer(self, reply: bytes, verdict: bytes) -> None:
        """Send a verdict about a message, likewise."""
        self._enqueue(b"PUB %b %d\r\n%b\r\n" % (reply, len(verdict), verdict))

    def _enqueue(self, command: bytes) -> None:
        if self._pending_data_size > self._max_pending_size or self.is_closed:
            return
        self._pending.append(command)
        self._pending_data_size += len(command)
        queue = self._flush_queue
        if queue is not None and queue.empty() and self.is_connected:
            queue.put_nowait(asyncio.get_running_loop().create_future())

    async def discard(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Close within seconds, whatever state the connection is in, and never raise."""
        closing: asyncio.Task[None] | None = None
        try:
            await end_tasks(self._attempts, seconds)  # first: nats-py forgets one that goes on
            closing = asyncio.create_task(self.close(), name="close nats")
            done, _ = await asyncio.wait({closing}, timeout=seconds)
            if not done:
                self._abort()
                await end_tasks({closing}, seconds)
        finally:
            closing = closing or asyncio.create_task(self.close(), name="close nats")
            self._abort()
            self._end_readers()
        if closing.done() and not closing.cancelled():
            closing.exception()  # a connection that breaks while it is closed is closed

    def _end_readers(self) -> None:
        """End the tasks of subscriptions: nats-py leaves them when it fails on its way out."""
        for subscription in self._subs.values():
            task = subscription._wait_for_msgs_task  # noqa: SLF001 -- see the first line of this file
            if task is not None:
                task.cancel()

    def _abort(self) -> None:
        """Free the socket at once: a closed transport waits for ever for a frozen server to read."""
        for stream in ("_io_writer", "_bare_io_writer"):
            writer: asyncio.StreamWriter | None = getattr(self._transport, stream, None)
            if writer is not None:
                writer.transport.abort()

    async def _connect_to_server(self, s: Any) -> None:
        await super()._connect_to_server(s)
        if type(self._transport) is TcpTransport:
            self._transport = _Transport(self._transport)

    async def _attempt_reconnect(self) -> None:
        if (attempt := asyncio.current_task()) is not None:
            self._attempts.add(attempt)
            attempt.add_done_callback(self._attempts.discard)
        await super()._attempt_reconnect()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self._inboxes.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            status = await self._process_headers(headers) if headers and not reply else None
            try:
                take(subject.decode(), reply, data, status)
            except Exception as error:  # noqa: BLE001 -- a fault of one message must not end all reading
                await self._error_cb(error)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 -- nats-py's signature
        """Look at the server's greeting before the login is sent: nats-py goes on in clear text."""
        if initial_connection and self._require_tls:
            if not (info.get("tls_required") or info.get("tls_available")):
                raise nats.errors.SecureConnWantedError
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _flush_pending(self, force_flush: bool = False) -> Any:  # noqa: FBT001, FBT002 -- nats-py's signature
        """Connect again when nats-py, whose own task for it has ended, meets a dead connection here."""
        try:
            return await super()._flush_pending(force_flush)
        except OSError as error:
            await self._process_op_err(error)
            raise

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        """Queue the PING behind what is pending: nats-py sends it first, and ``flush`` promises nothing."""
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        if self.is_connected:
            with suppress(OSError):  # else the task that pings would end; it is connected again by now
                await self._send_command(_PING)
                await self._flush_pending()

    async def _process_pong(self) -> None:
        """Survive the answer to a ``flush`` that gave up waiting: nats-py stops reading for good."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
