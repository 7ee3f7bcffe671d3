"""The connection: made within a time limit, watched, replaced when nats-py is stuck, closed in seconds."""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

import nats.errors

from jsworker.core.clock import jittered
from jsworker.core.errors import JsworkerError, StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings, variable_of
from jsworker.stream.login import Login, login_error, login_of, while_unavailable
from jsworker.stream.nats_client import Client, end_tasks, reason_of, verdict_about

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_REPLACE_SECONDS = 15.0  # after so long without a connection, nats-py's client is replaced
_PING_SECONDS = 10.0  # the third unanswered ping ends the connection
_RECONNECT_SECONDS = 0.5
_SUBSCRIBE_AGAIN_SECONDS = 10.0
_BLOCKED_SECONDS = 5.0
_PENDING_BYTES = 8 * 2**20
_MOST_COMPLAINTS = 100
_MOST_HELD: Final = 10_000
_ABANDON_SECONDS: Final = 2.0
_LEAST_ATTEMPT_SECONDS: Final = 0.2  # else the last attempt could only fail for lack of time
_CAUSE: Final = "connection lost"
_NO_CONNECTION: Final = "there is no connection to NATS"
_SUBSCRIPTION: Final = re.compile(r'violation for subscription to "([^"]*)"( \(sid)?')
"""Of a violation, in lower case: the subject, and whether it was permitted before: then a number follows."""


class Connection:
    """One connection to NATS that lasts until it is closed.

    It emits ``worker.degraded`` and ``worker.restored`` with ``what="nats"``, then calls the
    ``lost_callbacks`` or ``restored_callbacks``. A permissions violation is passed to the
    ``denied_callbacks``, as the server's text in lower case. Complaints of server or client are emitted
    as ``worker.degraded`` with ``what="nats client"``, each text once; subjects that differ only in what each
    message or inbox has of its own count as one. A right to subscribe that was given back is complained of
    again when it is lost again.
    """

    def __init__(self, settings: Settings, *, events: Events, name: str) -> None:
        self._settings = settings
        self._events = events
        self._name = name
        self._own_inbox = f'subscription to "{settings.nats_inbox_prefix.lower()}.'
        self._client: Client | None = None
        self._watch: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._cause = _CAUSE
        self._complaints: set[str] = set()
        own = re.escape(settings.nats_inbox_prefix.lower())
        self._varying = re.compile(rf'(?<="{own}\.)[^"]*|(?:\.\d+){{5}}[^"]*| \(sid "\d+"\)')
        self._failures: dict[asyncio.Future[str | None], str] = {}
        self._ended: set[str] = set()
        """Subjects, in lower case, of subscriptions that the server has ended for lack of permission."""
        self._refused: set[str] = set()  # of those, since they were last subscribed to
        self._subscribe_at = 0.0
        self._unanswerable: str | None = None
        """Why no request can be answered: the violation that ended the subscription to the answers."""
        self._held: deque[bytes] | None = None
        """Verdicts that wait until the stream is known to be the own one; None: none has to."""
        self.losses = 0
        """How often the connection was lost: what was learnt before may not hold after the next one."""
        self.lost_callbacks: list[Callable[[], None]] = []
        self.restored_callbacks: list[Callable[[], None]] = []
        self.denied_callbacks: list[Callable[[str], None]] = []

    @property
    def client(self) -> Client:
        """nats-py's client; raises StreamUnavailable when there is none yet, or no longer."""
        if self._client is None:
            raise StreamUnavailable(_NO_CONNECTION)
        return self._client

    @property
    def connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self._client is not None and self._client.is_connected and self._up.is_set()

    async def connect(self, seconds: float) -> None:
        """Connect within ``seconds``; raises as ``Stream.connect`` does."""
        if self._client is None:
            self._client = await self._open(seconds)
            self._up.set()
            self._watch = asyncio.create_task(self._keep_alive(), name="watch nats")

    async def close(self) -> None:
        """Close within seconds; never raises."""
        client, self._client = self._client, None
        self._up.set()  # let the callers of wait_connected go
        self._up.clear()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        if client is not None:
            self._abandon(client)
            await client.discard()

    async def wait_connected(self, seconds: float) -> bool:
        """Wait for at most ``seconds``; returns whether there is a connection.

        Raises StreamUnavailable when the connection was closed, or never made.
        """
        if self._client is None:
            raise StreamUnavailable(_NO_CONNECTION)
        if not self._up.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._up.wait()
        return self.connected

    def answer(self, reply: bytes, verdict: bytes) -> None:
        """Send a verdict about a message without waiting; a lost verdict costs a redelivery.

        After a loss of the connection it waits for ``send_verdicts``: the same address may lead to another
        NATS, about whose messages it would decide.
        """
        if self._held is not None:
            self._held.append(verdict_about(reply, verdict))
        elif self._client is not None:
            self._client.answer(reply, verdict)

    def send_verdicts(self) -> None:
        """Send the verdicts that wait, and from now on all others at once: the stream is the own one."""
        if self._held is not None and self._client is not None:
            held, self._held = self._held, None
            self._client.send_verdicts(held)

    async def answered(self, subject: str, asking: Coroutine[Any, Any, T]) -> T:
        """Await ``asking``, which sends to ``subject`` and waits for an answer, and return its result.

        Besides the errors of ``asking``, raises at once when no answer can come:
            StreamRefused: publishing there, or receiving answers, is not permitted; in the server's words.
            StreamUnavailable: the connection is lost.
        """
        if self._unanswerable is not None:
            asking.close()
            raise StreamRefused(self._unanswerable)
        failure: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._failures[failure] = f'"{subject.lower()}"'
        task = asyncio.create_task(asking, name=f"ask {subject}")
        # Reads an error that comes with the cancellation, else asyncio logs that it was never read.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            either: set[asyncio.Future[Any]] = {task, failure}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if (denial := failure.result()) is not None:
                raise StreamRefused(denial)
            raise StreamUnavailable("the connection to NATS was lost")
        finally:
            del self._failures[failure]
            task.cancel()

    async def _open(self, seconds: float) -> Client:
        """Return a connected client; an error that a later attempt cannot cure is raised at once."""
        login = login_of(self._settings)
        clock = asyncio.get_running_loop().time
        deadline = clock() + seconds
        login.options["connect_timeout"] = min(_CONNECT_SECONDS, seconds / (len(login.servers) + 1))
        known: StreamUnavailable | None = None
        async for attempt in while_unavailable(seconds):
            with attempt:
                try:
                    client = await self._attempt(login, max(deadline - clock(), _LEAST_ATTEMPT_SECONDS))
                except StreamUnavailable as error:
                    known = error
                    raise
                if client is None:  # the last attempt, cut short, tells less than the one before
                    raise known or StreamUnavailable(
                        f"NATS at {login.shown} did not answer within {seconds:.3g} s"
                    )
                return client
        raise AssertionError("unreachable: the last attempt raises")

    async def _attempt(self, login: Login, seconds: float) -> Client | None:
        """Return a connected client; None: no server has answered within ``seconds``."""
        client = Client(require_tls=login.require_tls)
        connecting = asyncio.create_task(self._connect(client, login), name="connect to nats")
        connected = False
        try:
            await asyncio.wait({connecting}, timeout=seconds)
            connected = connecting.done() and connecting.result()
        finally:
            if not connected:  # also closes one that connected as the caller was cancelled
                try:
                    await end_tasks({connecting}, _ABANDON_SECONDS)
                finally:
                    await client.discard(_ABANDON_SECONDS)
        return client if connected else None

    async def _connect(self, client: Client, login: Login) -> bool:
        """Try every server once; returns True, or raises the last server's fault."""
        failures = 0
        trying = True

        async def on_error(error: Exception) -> None:
            nonlocal failures
            if not trying:
                self._on_error(client, error)
                return
            failures += 1
            fault = login_error(error, login.shown)
            if isinstance(fault, StreamRefused) or failures >= len(login.servers):
                raise fault from error  # the way out of nats-py's endless loop

        async def on_lost() -> None:
            self._lose(client)

        async def on_restored() -> None:
            self._restore(client)

        options: dict[str, Any] = {
            "error_cb": on_error,
            "disconnected_cb": on_lost,
            "reconnected_cb": on_restored,
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": jittered(_RECONNECT_SECONDS, 0.5),
            "ping_interval": _PING_SECONDS,
            "max_outstanding_pings": 2,
            "pending_size": _PENDING_BYTES,
            "flush_timeout": _BLOCKED_SECONDS,
            "inbox_prefix": f"{self._settings.nats_inbox_prefix}.{secrets.token_hex(8)}",
        }
        try:
            await client.connect(login.servers, **login.options, **options)
        except (nats.errors.Error, OSError, RuntimeError) as error:  # the last from uvloop's transports
            raise login_error(error, login.shown) from error
        finally:
            trying = False
        if not client.is_connected:  # nats-py mistakes an end of file during the login for success
            raise StreamUnavailable(f"NATS at {login.shown} closed the connection during the login")
        return True

    async def _keep_alive(self) -> None:
        """Replace a client that cannot reconnect by itself.

        nats-py hangs for ever when it disconnects from a frozen server with bytes still to send, or from one
        whose certificate is wrong; and it closes itself for good on most errors that a server reports.
        """
        clock = asyncio.get_running_loop().time
        alive_at = clock()
        while True:
            await asyncio.sleep(_REPLACE_SECONDS / 15)
            if self.client.is_connected and not self.client.is_dead:
                alive_at = clock()
                if self._ended and alive_at >= self._subscribe_at:
                    await self._subscribe_again(self.client)
                continue
            self._lose(self.client)
            if not self.client.is_dead and clock() - alive_at < _REPLACE_SECONDS:
                continue
            await self.client.discard()
            try:
                self._client = await self._open(_REPLACE_SECONDS)
                self._restore(self._client)
            except JsworkerError as fault:
                self._complain_of_outage(str(fault))
            except Exception as error:  # noqa: BLE001 -- the watch must go on after any error
                self._complain_of_outage(f"{type(error).__name__}: {error}")

    async def _subscribe_again(self, client: Client) -> None:
        """Subscribe again to what the server has ended: the permission may have been given back.

        Without it, requests would get no answers, and other workers none of this one, until a reconnect.
        """
        self._subscribe_at = asyncio.get_running_loop().time() + _SUBSCRIBE_AGAIN_SECONDS
        tried, self._refused = set(self._ended), set()
        sent = client.subscribe_again(tried)
        try:
            await client.flush(_BLOCKED_SECONDS)  # behind it, every violation has been read
        except (TimeoutError, nats.errors.Error, OSError):
            return
        self._ended -= tried - self._refused
        permitted = [self._varying.sub("", f'"{subject}"') for subject in sent - self._refused]
        self._complaints = {key for key in self._complaints if not any(each in key for each in permitted)}
        if client is self._client and (client.request_inbox or "").lower() not in self._ended:
            self._unanswerable = None

    def _lose(self, client: Client) -> None:
        if client is self._client and self._up.is_set():
            self._up.clear()
            self._held = deque(self._held or (), _MOST_HELD)
            self._held.extend(client.take_verdicts())
            self._events.emit("worker.degraded", what="nats", reason=self._cause)
            self._abandon(client)

    def _abandon(self, client: Client) -> None:
        self._unanswerable = None
        self.losses += 1
        client.lose()
        for failure in self._failures:
            if not failure.done():
                failure.set_result(None)
        for callback in self.lost_callbacks:
            callback()

    def _restore(self, client: Client) -> None:
        if client is self._client:
            self._lose(client)
            self._cause = _CAUSE
            self._up.set()
            self._events.emit("worker.restored", what="nats")
            for callback in self.restored_callbacks:
                callback()

    def _on_error(self, client: Client, error: Exception) -> None:
        """Report an error, unless it only shows that a lost connection is still lost."""
        if client is not self._client:
            return
        text = reason_of(error)
        if "permissions violation" in text:
            if self._own_inbox in text:  # no request can be answered
                text = f"{text} (see {variable_of('nats_inbox_prefix')})"
            self._complain(text)
            self._note_subscription(client, text)
            for failure, quoted in self._failures.items():
                if (quoted in text or self._own_inbox in text) and not failure.done():
                    failure.set_result(text)
            for callback in self.denied_callbacks:
                callback(text)
        elif isinstance(error, nats.errors.UnexpectedEOF) and self._cause != _CAUSE:
            return  # it follows the server's reason for closing the connection
        elif isinstance(error, nats.errors.Error | OSError):
            self._cause = text
        else:
            self._complain(f"{type(error).__name__}: {text}")

    def _note_subscription(self, client: Client, text: str) -> None:
        """Note a subscription that the server has ended, or refused though requests depend on it."""
        if (violation := _SUBSCRIPTION.search(text)) is None:
            return
        subject, was_permitted = violation.groups()
        is_of_answers = subject == (client.request_inbox or "").lower()
        if is_of_answers:
            self._unanswerable = text
        if was_permitted or is_of_answers:
            self._ended.add(subject)
            self._subscribe_at = asyncio.get_running_loop().time() + _SUBSCRIBE_AGAIN_SECONDS
        self._refused |= {subject} & self._ended

    def _complain(self, text: str) -> None:
        key = self._varying.sub("", text)
        if key not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(key)
            self._events.emit("worker.degraded", what="nats client", reason=text)

    def _complain_of_outage(self, text: str) -> None:
        """Tell why there is still no connection: in each outage, whatever was complained of before."""
        if text != self._cause:
            self._cause = text
            self._events.emit("worker.degraded", what="nats client", reason=text)
