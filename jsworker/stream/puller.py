"""The pull loop: asks JetStream for as many messages as there is room for, and starts anew after faults."""

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from jsworker.core.clock import jittered
from jsworker.core.errors import JsworkerError, StreamUnavailable
from jsworker.core.priorities import NORMAL
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import Delivery, Undecodable, consumer_of, read
from jsworker.stream.nats_client import Client, end_tasks

_SETTLE_SECONDS: Final = 1.0
_SHORT_SECONDS: Final = 1.0
_STOP_SECONDS: Final = 2.0
_PONG_SECONDS: Final = 2.0
_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0
_DENIED_SECONDS: Final = 60.0
"""After so long without a verdict that was refused, a sign of life means that verdicts are permitted."""
_LOST_SECONDS: Final = 60.0
"""Two requests that the server has forgotten within this time are reported, until it passes without one."""
_LOST: Final = (
    "JetStream took requests for messages and then fell silent: jobs start late, from the table; if it is "
    "imported from another account, the export of $JS.API.> needs response_type: stream"
)
_NO_INBOX: Final = 'permissions violation for subscription to "{}.>" (see JSWORKER_NATS_INBOX_PREFIX)'
_TURN_SECONDS: Final = 0.05
"""A lane that waits for its turn checks so often; a consumer silent for so long counts as dry."""
_FEW: Final = 10  # messages
MOST_REQUESTS: Final = 8  # the consumer's ``max_waiting`` is shared by the whole fleet
_SHORTEST_SECONDS: Final = 0.1
_LIMIT: Final = re.compile(r"Exceeded MaxRequest(?:Batch of (\d+)|Expires of ([\d.hms]+))")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(h|ms|m|s)")  # as Go writes it: 1m30s
_UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class _Inbox(NamedTuple):
    """The inbox of the messages; a new one is opened when the old one's requests are no longer reliable."""

    client: Client
    subject: str
    number: int


class _Limits(NamedTuple):
    """Of one request: messages, seconds that it waits, seconds between signs of life."""

    most: int
    expires: float
    idle_heartbeat: float


class Credit:
    """Counts the messages that were requested and have not arrived: the prefetch credit at the server.

    The sum is exact. A delivery does not say which request it serves, so the number of open requests is an
    estimate (oldest first); it only limits their number, and detects a request that the server has forgotten.
    """

    __slots__ = ("_requests", "total")

    def __init__(self) -> None:
        self.total = 0
        self._requests: dict[int, tuple[int, float]] = {}

    def ask(self, request: int, batch: int, deadline: float) -> None:
        """Note a request for ``batch`` messages, which the server ends at ``deadline``."""
        self._forget_served()
        self._requests[request] = (batch, deadline)
        self.total += batch

    def received(self) -> None:
        """Note a delivery."""
        if self.total:
            self.total -= 1

    def ended(self, request: int, owed: int) -> None:
        """Note that a request ended before it was served."""
        self._requests.pop(request, None)
        self.total = max(0, self.total - owed)

    def wanted(self, room: int, waiting: int = 0) -> int:
        """Return how many messages to ask for now; few large requests rather than many small ones.

        While messages are ``waiting`` for a slot, one more gains nothing, and its claim costs a transaction;
        a few more gain nothing either while many wait, and each request costs the server.
        """
        missing = room - self.total
        enough = max(1, min(waiting, _FEW), waiting // 4, room // 4 if self.total else 0)
        if missing < enough:
            return 0
        self._forget_served()
        return missing if len(self._requests) < MOST_REQUESTS else 0

    def overdue(self, now: float) -> bool:
        """Return whether a request should have ended by now: the server never took it."""
        self._forget_served()
        return any(deadline < now for _, deadline in self._requests.values())

    def _forget_served(self) -> None:
        owed = sum(batch for batch, _ in self._requests.values())
        for request, (batch, _) in list(self._requests.items()):
            if owed - batch < self.total:
                break
            owed -= batch
            del self._requests[request]


class Puller:
    """Pulls the messages of one kind; ``stream`` is connected and ensured.

    It never asks for more than there is ``room`` for, nor for a few while more are ``waiting`` for a slot.
    When the room shrinks, messages on their way are still delivered, and requests that stay too large for
    a second are cancelled. ``deliver`` and ``undecodable`` must not block. A request waits at the server for
    ``expires`` seconds, which sends a sign of life every ``idle_heartbeat`` seconds, at most half of that.
    Where the server or the consumer allows fewer messages in a request, or a shorter wait, it asks for
    that until the next connection.

    With a ``priority`` other than normal a missing consumer is created. ``gives_way`` returns for how many
    seconds other lanes may ask first, ``awaits_turn`` whether there is room that is left to other lanes.
    ``died`` is called with an unexpected error that ends the loop.
    """

    def __init__(
        self,
        stream: Stream,
        kind: str,
        *,
        deliver: Callable[[Delivery], None],
        undecodable: Callable[[Undecodable], None],
        room: Callable[[], int],
        waiting: Callable[[], int] = lambda: 0,
        expires: float = 30.0,
        idle_heartbeat: float = 5.0,
        priority: int = NORMAL,
        gives_way: Callable[[], float] = lambda: 0.0,
        awaits_turn: Callable[[], bool] = lambda: False,
        died: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._stream = stream
        self.kind = kind
        self.priority = priority
        self.name = consumer_of(kind, priority)
        self._gives_way = gives_way
        self._awaits_turn = awaits_turn
        self._died = died
        self._moved_at = 0.0
        self._deliver = deliver
        self._undecodable = undecodable
        self._room = room
        self._waiting = waiting
        self._idle_heartbeat = idle_heartbeat
        self._limits = self._no_limits = _Limits(sys.maxsize, expires, idle_heartbeat)
        self._request_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream.name}.{self.name}"
        self._answer = stream.connection.answer

        self._inbox: _Inbox | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._credit = Credit()
        self._request = 0
        self._heard_at = 0.0
        self._short_since: float | None = None
        self._failures = 0
        self._paused_until = 0.0
        self._gone = priority != NORMAL
        self._reasons: list[str] = []
        self._denied_at = -math.inf
        self._lost_at = -math.inf

        self._stopping = False
        self._signal = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_pulling(self) -> bool:
        """Whether messages are requested as soon as there is room."""
        return self._stream.is_own and not (self._gone or self._reasons) and self._task is not None

    @property
    def reason(self) -> str:
        """Why the consumer does not work, as reported last; empty if it works or this is not known."""
        return self._reasons[-1] if self._reasons else ""

    def begin(self) -> None:
        """Begin to pull; the event loop runs."""
        if self._task is None and not self._stopping:
            self._stream.connection.lost_callbacks.append(self._on_disconnect)
            self._stream.connection.restored_callbacks.append(self._on_reconnect)
            self._stream.connection.denied_callbacks.append(self._on_denied)
            self._task = asyncio.create_task(self._run(), name=f"pull {self.name}")
            self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """Stop pulling, hand back messages that still arrive, and raise an error that ended the loop."""
        self._stopping = True
        task, self._task = self._task, None
        if task is None:
            return
        await end_tasks({task})
        self._leave()
        await self._settle(_STOP_SECONDS)
        await end_tasks(self._closing, _STOP_SECONDS)
        await self._stream.flush(_STOP_SECONDS)
        if not task.cancelled():
            task.result()

    async def join(self) -> None:
        """Wait until the pull loop has ended, and raise the error that ended it, unless it was stopped."""
        task = self._task
        if task is not None:
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    def wake(self) -> None:
        """Make the loop check the room again; cheap, because several calls cause one check."""
        self._signal.set()

    @property
    def is_dry(self) -> bool:
        """Whether requests are open and nothing has arrived for so long that the consumer is empty."""
        return bool(self._credit.total) and time.monotonic() - self._moved_at > _TURN_SECONDS

    async def _run(self) -> None:
        while not self._stopping:
            self._signal.clear()
            seconds = await self._step()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._signal.wait()

    async def _step(self) -> float:
        """Do the work that is due; return the seconds until the next step."""
        if not self._stream.connected:
            self._leave()
            return self._idle_heartbeat
        if self._pause_left() > 0 or not await self._is_ready():
            return self._pause_left()
        now, room = time.monotonic(), self._room()
        if is_silent := self._is_silent(now):
            is_silent = await self._is_lost(now)
        if is_silent or self._is_short_of_room(now, room):
            self._leave()
        if self._credit.wanted(room, self._waiting()):
            if seconds := self._gives_way():
                await asyncio.sleep(seconds)
            if wanted := self._credit.wanted(self._room(), self._waiting()):
                await self._ask(wanted)
        if self._awaits_turn():
            return _TURN_SECONDS
        return _SHORT_SECONDS if self._short_since else self._idle_heartbeat

    def _is_silent(self, now: float) -> bool:
        if not self._credit.total:
            return False
        return now - self._heard_at > 2 * self._idle_heartbeat or self._credit.overdue(now)

    async def _is_lost(self, now: float) -> bool:
        """Return whether requests are lost; once may be an accident, a second time is reported."""
        if await self._stream.flush(_PONG_SECONDS):  # else all of it is silent: the connection will tell
            await asyncio.sleep(min(self._idle_heartbeat, _SETTLE_SECONDS))  # heartbeats follow the PONG
            if not self._is_silent(time.monotonic()):  # it was only late, or the connection is a new one
                return False
            if now - self._lost_at < _LOST_SECONDS:
                self._degrade(_LOST)
            self._lost_at = now
        return True

    def _is_short_of_room(self, now: float, room: int) -> bool:
        if self._credit.total <= max(room, 0):
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        return self._short_since is not None and now - self._short_since >= _SHORT_SECONDS

    async def _ask(self, batch: int) -> None:
        if self._inbox is None or self._inbox.client is not self._stream.connection.client:
            self._leave()
            await self._settle(_SETTLE_SECONDS)
            if not self._stream.is_own:  # the connection was lost meanwhile
                return
            client = self._stream.connection.client
            subject = f"{client.new_inbox()}."
            number = client.open_inbox(f"{subject}*", partial(self._take, subject))
            self._inbox = _Inbox(client, subject, number)
        most, expires, idle_heartbeat = self._limits
        if batch > most:
            batch = most
            self._signal.set()  # the rest in further requests
        now = time.monotonic()
        if not self._credit.total:
            self._heard_at = now
        self._moved_at = now
        self._request += 1
        self._credit.ask(self._request, batch, now + expires + 2 * self._idle_heartbeat)
        limits = (batch, round(expires * 1e9), round(idle_heartbeat * 1e9))
        request = b'{"batch":%d,"expires":%d,"idle_heartbeat":%d}' % limits
        self._inbox.client.post(self._request_subject, request, f"{self._inbox.subject}{self._request}")

    def _leave(self) -> None:
        """Give up the inbox with all its requests; messages still on their way are accepted."""
        inbox, self._inbox = self._inbox, None
        self._credit = Credit()
        self._short_since = None
        if inbox is not None:
            closing = asyncio.create_task(inbox.client.close_inbox(inbox.number), name="close inbox")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _settle(self, seconds: float) -> None:
        """Wait until the server sends nothing more to inboxes that were given up."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=seconds)

    async def _is_ready(self) -> bool:
        """Make a consumer that is gone anew; return whether it is there, in no other installation's stream.

        Another's messages would be taken for bad ones: their jobs are not in this database.
        """
        if self._stream.is_own and not self._gone:
            return True
        self._leave()
        try:
            if self._gone:
                await self._stream.ensure([self.name], timeout=0.0)
            else:
                await self._stream.topology.check_installation()
        except JsworkerError as fault:
            # A cluster may elect its leaders; a lost connection reports itself.
            is_lasting = self._failures and self._stream.connected
            if is_lasting or not isinstance(fault, StreamUnavailable):
                self._degrade(str(fault))
            self._begin_pause()
            return False
        self._gone = False
        return True

    def _take(
        self, inbox: str, subject: str, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> None:
        is_current = self._inbox is not None and self._inbox.subject == inbox
        if not reply:
            if is_current:
                self._on_status(subject[len(inbox) :], headers or {})
            return
        arrival = read(subject, reply, data, kind=self.kind, send=self._answer)
        if arrival is None:
            self._stream.events.emit("message.refused", kind=self.kind, reason="not delivered by JetStream")
            return
        if is_current:
            self._credit.received()
            self._sign_of_life()
            self._moved_at = self._heard_at
        if self._stopping:
            arrival.nak()
        elif isinstance(arrival, Delivery):
            self._deliver(arrival)
        else:
            self._undecodable(arrival)
        self._signal.set()

    def _on_status(self, request: str, headers: dict[str, str]) -> None:
        status = headers.get("Status", "")
        owed = headers.get("Nats-Pending-Messages", "")
        if not request.isdigit():
            return
        if owed.isdigit():  # a request that ended in order
            self._lost_at = -math.inf
        if status in {"100", "408"}:
            self._sign_of_life()
        if status == "100":
            return
        if owed.isdigit():  # the request expired, or the server stops or lost its leadership
            self._credit.ended(int(request), int(owed))
        elif status == "408":  # from a server that does not tell the number of missing messages
            self._leave()
        elif self._learn_limit(headers.get("Description", "")):
            self._leave()
            self._signal.set()
            return
        else:
            text = headers.get("Description", "").partition("\n")[0]
            self._gone = self._gone or status == "503" or text == "Consumer Deleted"
            if status != "503" or self._failures > 1:  # a server that stops answers so for each consumer
                self._degrade(f"JetStream answered {status} {text}".rstrip())
            self._leave()
        if status != "408":
            self._begin_pause()
        self._signal.set()

    def _learn_limit(self, description: str) -> bool:
        """Note the limit of requests that a refusal tells; return whether it is a new one."""
        if (limit := _LIMIT.match(description)) is None:
            return False
        batch, wait = limit.groups()
        before = self._limits
        if batch:
            self._limits = before._replace(most=min(before.most, max(1, int(batch))))
        else:
            told_seconds = sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(wait))
            seconds = min(before.expires, max(_SHORTEST_SECONDS, told_seconds))
            idle_heartbeat = min(before.idle_heartbeat, seconds / 2)
            self._limits = before._replace(expires=seconds, idle_heartbeat=idle_heartbeat)
        return self._limits != before

    def _sign_of_life(self) -> None:
        self._heard_at = time.monotonic()
        self._failures = 0
        is_trusted = (
            self._heard_at - self._denied_at > _DENIED_SECONDS
            and self._heard_at - self._lost_at > _LOST_SECONDS
        )
        if self._reasons and is_trusted:
            self._reasons.clear()
            self._stream.events.emit("worker.restored", what=f"consumer {self.name}")

    def _degrade(self, reason: str) -> None:
        """Tell a reason, each once until the consumer works again: two may take turns."""
        if reason not in self._reasons:
            self._reasons.append(reason)
            self._stream.events.emit("worker.degraded", what=f"consumer {self.name}", reason=reason)

    def _pause_left(self) -> float:
        return self._paused_until - time.monotonic()

    def _begin_pause(self) -> None:
        """Pause after a failure, longer after each further one; a failure during a pause is the same one."""
        if self._pause_left() <= 0:
            pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** min(self._failures, 10))
            self._paused_until = time.monotonic() + jittered(pause, 0.2)
            self._failures += 1

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._degrade(f"{type(error).__name__}: {error}")
            self._died(error)

    def _on_denied(self, text: str) -> None:
        """Name a right that requests or verdicts lack; without the first jobs come late, from the table."""
        lacks_inbox = self._inbox is not None and f'to "{self._inbox.subject.lower()}*"' in text
        before, consumer, _ = text.partition(f".{self._stream.name}.{self.name}.".lower())
        if lacks_inbox or f'"{self._request_subject.lower()}"' in text:
            prefix = self._stream.settings.nats_inbox_prefix
            self._degrade(_NO_INBOX.format(prefix) if lacks_inbox else text)
            self._leave()
            self._begin_pause()
            self._signal.set()
        elif consumer and '"$js.ack' in before:
            self._denied_at = time.monotonic()
            self._degrade(f'{before}{consumer}>"')  # each message has a subject of its own

    def _on_disconnect(self) -> None:
        self._leave()
        self._signal.set()

    def _on_reconnect(self) -> None:
        self._failures = 0
        self._paused_until = 0.0
        self._limits = self._no_limits
        self._denied_at = self._lost_at = -math.inf
        self._signal.set()
