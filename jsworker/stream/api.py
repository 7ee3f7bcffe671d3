"""JetStream's requests about one stream, within a time limit, and its refusals as errors."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Final, TypeVar

import nats.errors
from nats.js import JetStreamManager
from nats.js.api import ConsumerConfig, RawStreamMsg, StreamInfo
from nats.js.api import ConsumerInfo as ConsumerInfo  # noqa: PLC0414 -- for rooms that import no nats
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.names import is_kind
from jsworker.core.priorities import NORMAL, PRIORITIES
from jsworker.core.settings import Settings
from jsworker.stream.connection import Connection
from jsworker.stream.message import consumer_of, is_literal, overlap, subject_of
from jsworker.stream.nats_client import reason_of

T = TypeVar("T")
Asked = TypeVar("Asked")

_SECONDS: Final = 5.0
_MOST_ASKED: Final = 500  # consumers, by the names that subjects have: publishers may invent any number
_ASKED_AT_ONCE: Final = 20
_LIST_SECONDS: Final = 10.0  # for all pages; a cluster that misses a server takes four seconds for each
_PAGE: Final = 256  # consumers that a server lists at once
MOST_CONSUMERS: Final = 20 * _PAGE
"""The most consumers that are listed."""
_NOT_ENABLED: Final = frozenset({10039, 10076})  # for this account, on this server
_NO_PEERS: Final = 10005  # too few servers for the copies; those that are away come back


class NotThere(StreamUnavailable):
    """The stream, the consumer or the message does not exist."""


class ApiRefused(StreamRefused):
    """JetStream refused a request, for the reason with the number ``code``; without it, the server did.

    The server refuses what the login is not permitted to do.
    """

    def __init__(self, what: str, reason: str, code: int | None = None) -> None:
        self.reason = reason
        self.code = code
        super().__init__(f"{what}: {reason}")


@contextmanager
def api_errors(what: str) -> Iterator[None]:
    """Turn errors about ``what`` into ``NotThere``, ``StreamUnavailable`` or ``StreamRefused``."""
    try:
        yield
    except StreamRefused as denied:
        raise ApiRefused(what, str(denied)) from denied
    except NotFoundError as error:
        raise NotThere(f"{what}: {reason_of(error)}") from error
    except APIError as error:
        # Only an answer counts: in a cluster, silence does not mean that JetStream is disabled.
        if error.err_code in _NOT_ENABLED:
            raise StreamRefused(f"{what}: JetStream is not enabled on this server or account") from error
        is_away = error.err_code == _NO_PEERS and "offline" in (error.description or "")
        if is_away or isinstance(error, ServiceUnavailableError):
            raise StreamUnavailable(f"{what}: {error.description or 'JetStream does not answer'}") from error
        raise ApiRefused(what, reason_of(error), error.err_code) from error
    except (StreamUnavailable, nats.errors.Error, OSError) as error:
        raise StreamUnavailable(f"{what}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError) as error:  # nats-py parses without checking
        raise StreamUnavailable(f"{what}: the answer is no JetStream answer") from error


@dataclass(frozen=True, slots=True)
class StreamState:
    """The stream's state; ``first_seq`` is one above ``last_seq`` when there is no message."""

    created: datetime
    first_seq: int
    last_seq: int
    messages: int


@dataclass
class ConsumerShape(ConsumerConfig):
    """A consumer's configuration, with settings that nats-py drops."""

    priority_policy: str | None = None
    priority_groups: list[str] | None = None
    max_batch: int | None = None
    max_expires: int | None = None  # nanoseconds
    max_bytes: int | None = None


def read_consumer(answer: dict[str, Any]) -> ConsumerInfo:
    """Return what JetStream says of a consumer, whose configuration is a ``ConsumerShape``."""
    config = dict(answer["config"])  # nats-py converts it in place
    info: ConsumerInfo = ConsumerInfo.from_response(answer)
    info.config = ConsumerShape.from_response(config)
    return info


async def ask_each(
    ask: Callable[[Asked], Awaitable[T]], asked: Iterable[Asked], *, at_once: int = _ASKED_AT_ONCE
) -> dict[Asked, T]:
    """Ask one question about each, only so many at once, and return the answers."""
    free = asyncio.Semaphore(at_once)

    async def answer(each: Asked) -> tuple[Asked, T]:
        async with free:
            return each, await ask(each)

    return dict(await asyncio.gather(*map(answer, asked)))


class JetStreamApi:
    """JetStream's requests about the stream that the settings name.

    Every method raises:
        NotThere: the stream, consumer or message does not exist.
        StreamUnavailable: no answer within 5 s; worth another try.
        StreamRefused: JetStream refused the request, or the server does not permit it.
    """

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self.connection = connection
        self.name = settings.stream
        self.settings = settings
        self._may_not_list: int | None = None
        """How often the connection had been lost when it was refused to list consumers."""

    async def connect(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109 -- how long to try is the caller's business
        """Connect within ``timeout`` seconds; raises as ``Stream.connect`` does."""
        await self.connection.connect(timeout)

    async def close(self) -> None:
        """Close within seconds; never raises, and may be called again."""
        await self.connection.close()

    @property
    def connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self.connection.connected

    def subject_of(self, kind: str, priority: int = NORMAL) -> str:
        """Return the subject on which messages of a kind and priority are published."""
        return subject_of(self.settings.subject_prefix, kind, priority)

    @property
    def manager(self) -> JetStreamManager:
        """nats-py's requests, to be handed to ``ask``."""
        return self.connection.client.jsm(timeout=_SECONDS)

    async def ask(self, request: str, asking: Coroutine[Any, Any, T]) -> T:
        """Return the answer to a request of the ``manager``, whose subject is ``$JS.API.<request>``."""
        with api_errors(f"stream {self.name}"):
            return await self.connection.answered(f"$JS.API.{request}", asking)

    async def request(self, request: str, read: Callable[[dict[str, Any]], T], **content: Any) -> T:
        """Return what ``read`` makes of the answer to a request, where nats-py's reading drops something."""

        async def answer() -> T:
            data = json.dumps(content).encode() if content else b""
            reply = await self.connection.client.request(f"$JS.API.{request}", data, timeout=_SECONDS)
            answered = json.loads(reply.data)
            if "error" in answered:
                APIError.from_error(answered["error"])  # raises
            return read(answered)

        return await self.ask(request, answer())

    async def stream_info(self, **options: Any) -> StreamInfo:
        """Return the stream's configuration and state."""
        return await self.ask(f"STREAM.INFO.{self.name}", self.manager.stream_info(self.name, **options))

    async def consumer_state(self, name: str) -> ConsumerInfo:
        """Return a consumer's configuration and state."""
        return await self.request(f"CONSUMER.INFO.{self.name}.{name}", read_consumer)

    async def stream_with(self, subject: str) -> str | None:
        """Return the name of a stream whose subjects overlap with this one; None: none, or no answer."""
        try:
            return await self.ask("STREAM.NAMES", self.manager.find_stream_name_by_subject(subject))
        except (StreamRefused, StreamUnavailable):
            return None

    async def state(self) -> StreamState:
        """Return the stream's state."""
        info = await self.stream_info()
        state = info.state
        return StreamState(self.created(info), state.first_seq, state.last_seq, state.messages)

    def created(self, info: StreamInfo) -> datetime:
        """Return when the stream was created, which tells it from another one of the same name."""
        if info.created is None:
            raise StreamRefused(f"stream {self.name}: the server does not say when it was created")
        return info.created

    async def listed_consumers(self) -> dict[str, ConsumerInfo]:
        """Return consumers by name, page by page: one that is made or deleted meanwhile shifts the others."""
        found: dict[str, ConsumerInfo] = {}
        try:
            async with asyncio.timeout(_LIST_SECONDS):
                for offset in range(0, MOST_CONSUMERS, _PAGE):
                    page = await self.request(f"CONSUMER.LIST.{self.name}", _read_page, offset=offset)
                    if not page:  # a short page may lack consumers of one of the cluster's servers
                        break
                    found |= {info.name: info for info in page}
        except TimeoutError:
            raise StreamUnavailable(
                f"stream {self.name}: its consumers were not listed within {_LIST_SECONDS:g} s"
            ) from None
        return found

    async def unconsumed(self, kinds: Collection[str] = ()) -> dict[str, int]:
        """Return kinds (or any word of a publisher) whose messages no consumer takes, and their numbers.

        A priority other than normal follows behind a dot: ``KIND.high``. Where consumers may not be listed,
        those of 500 of these messages' subjects and of ``kinds`` are known; if there are others, none is
        returned. A refusal to list them is not asked for again on the same connection. Of more than 100,000
        subjects, the server's answer names some.
        """
        info = await self.stream_info(subjects_filter=self.subject_of(">"))
        counted = {
            subject.removeprefix(self.subject_of("")): messages
            for subject, messages in sorted((info.state.subjects or {}).items())
        }
        names = {place: _consumer_at(place) for place in counted if lane_at(place) is not None}
        found = await self._found(islice(filter(None, names.values()), _MOST_ASKED))
        without = [place for place, name in names.items() if name not in found]
        many = info.state.consumer_count
        if without and len(found) < many:  # others may take them
            own = [consumer_of(kind, priority) for kind in kinds for priority in range(len(PRIORITIES))]
            found |= await self._found(own)
        if without and len(found) < many and self._may_not_list != self.connection.losses:
            try:
                found |= await self.listed_consumers()
            except StreamRefused:  # each refusal is a line in the server's log
                self._may_not_list = self.connection.losses
        if len(found) < many:
            return {}
        filters = {subject for consumer in found.values() for subject in filters_of(consumer)}
        patterns = {each for each in filters if not is_literal(each)}
        subjects = {place: self.subject_of(place) for place in without}
        return {
            place: counted[place]
            for place, subject in subjects.items()
            if subject not in filters
            and not any(overlap(each, subject) for each in (patterns if is_literal(subject) else filters))
        }

    async def _found(self, names: Iterable[str]) -> dict[str, ConsumerInfo]:
        """Return those of these consumers that exist."""
        found: dict[str, ConsumerInfo] = {}

        async def ask(name: str) -> None:
            with suppress(NotThere):
                found[name] = await self.consumer_state(name)

        await ask_each(ask, names)
        return found

    async def remove(self, place: str, *, up_to: int) -> None:
        """Delete the messages of a kind, or of a kind and priority, up to this number; see ``unconsumed``."""
        purging = self.manager.purge_stream(self.name, seq=up_to + 1, subject=self.subject_of(place))
        await self.ask(f"STREAM.PURGE.{self.name}", purging)

    async def get(self, stream_seq: int) -> RawStreamMsg | None:
        """Return a stored message; None when there is none with this number."""
        if stream_seq < 1:
            return None
        try:
            getting = self.manager.get_msg(self.name, stream_seq)
            return await self.ask(f"STREAM.MSG.GET.{self.name}", getting)
        except NotThere:
            return None


def _read_page(answer: dict[str, Any]) -> list[ConsumerInfo]:
    return [read_consumer(each) for each in answer["consumers"]]


def filters_of(consumer: ConsumerInfo) -> list[str]:
    """Return the subjects, with wildcards, of the messages that a consumer takes."""
    return consumer.config.filter_subjects or [consumer.config.filter_subject or ">"]


def _consumer_at(place: str) -> str | None:
    """Return the name of the consumer that takes what is published at a place; None if none can."""
    if (lane := lane_at(place)) is None or not is_kind(lane[0]):
        return None
    return consumer_of(*lane)


def lane_at(place: str) -> tuple[str, int] | None:
    """Return kind and priority of messages that are published at ``KIND`` or ``KIND.high``; None: neither."""
    kind, dot, priority = place.partition(".")
    if not dot:
        return kind, NORMAL
    is_lane = priority in PRIORITIES and priority != PRIORITIES[NORMAL]
    return (kind, PRIORITIES.index(priority)) if is_lane else None
