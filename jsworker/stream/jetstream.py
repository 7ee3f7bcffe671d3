"""The door to JetStream: connect, ensure that stream and consumers are right, publish, and look."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from uuid import UUID

from jsworker.core.errors import PublishFailed, StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.api import ConsumerState, JetStreamApi, StoredMessage, StreamState
from jsworker.stream.connection import Connection
from jsworker.stream.faults import NotThere, api_faults
from jsworker.stream.liveness import Answer, Witness
from jsworker.stream.login import redact
from jsworker.stream.publisher import Headers, Published, Publisher
from jsworker.stream.topology import Topology
from jsworker.stream.wire import WireMessage, subject_of

__all__ = [
    "Answer",
    "ConsumerState",
    "Published",
    "StoredMessage",
    "Stream",
    "StreamState",
    "Witness",
    "redact",
]

Callback = Callable[[], None]


class Stream:
    """One connection to NATS and one stream on it.

    Args:
        settings: servers, login, and what the stream is like.
        installation_id: id of the database that the stream belongs to; None for one who only publishes.
        events: told ``worker.degraded``, ``worker.restored`` and ``stream.changed``.
        client_name: the connection's name in the server's listings.
        patience: seconds without a connection after which the client is built anew.
        ping_interval: seconds between pings; the third one unanswered ends the connection.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        installation_id: UUID | None,
        events: Events,
        client_name: str,
        patience: float = 15.0,
        ping_interval: float = 10.0,
    ) -> None:
        self.name = settings.stream
        self._prefix = settings.subject_prefix
        self.events = events
        self.connection = Connection(
            settings, events=events, name=client_name, patience=patience, ping_interval=ping_interval
        )
        self._highest = 0
        self._servers = redact(settings.nats_url)
        self._ack_waits: dict[str, float] = {}
        self._api = JetStreamApi(self.connection, settings.stream)
        self._topology = Topology(self._api, settings, installation_id=installation_id, events=events)
        self._publisher = Publisher(self.connection, stream=settings.stream, prefix=settings.subject_prefix)

    async def connect(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109 -- how long to try is the caller's business
        """Connect and look whether JetStream answers.

        Args:
            timeout: seconds to try while nobody answers; a refusal is told at once.

        Raises:
            SettingsError: a URL, a credentials file or a certificate cannot be used.
            StreamUnavailable: nobody answered in time.
            StreamRefused: login or TLS was refused, or JetStream is disabled.
        """
        await self.connection.connect(timeout)
        try:
            await self._check_jetstream()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close within seconds; never raises, and may be called again."""
        await self.connection.close()

    @property
    def connected(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self.connection.connected

    def subject_of(self, kind: str) -> str:
        """Return the subject on which messages of a kind travel."""
        return subject_of(self._prefix, kind)

    async def flush(self, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 -- as above
        """Tell whether the server confirmed within ``timeout`` seconds that it read all that was sent."""
        return await self.connection.flush(timeout)

    def on_disconnect(self, callback: Callback) -> Callback:
        """Call when the connection is lost; returns what ends that."""
        return self.connection.on_lost(callback)

    def on_reconnect(self, callback: Callback) -> Callback:
        """Call when there is a connection again; returns what ends that."""
        return self.connection.on_restored(callback)

    def witness(
        self, worker_id: str, tell_stacks: Callable[[bytes], Awaitable[bytes]] | None = None
    ) -> Witness:
        """Return what answers for a worker on this connection, and asks after others; see ``Witness``."""
        witness = Witness(self.connection, worker_id=worker_id, tell_stacks=tell_stacks)
        self.connection.on_lost(witness.forget)
        return witness

    async def ensure(
        self,
        kinds: Sequence[str],
        ack_waits: Mapping[str, float] | None = None,
        *,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> None:
        """Make the stream and a consumer for each kind, or bring them into shape.

        Args:
            kinds: those that are pulled; none for one who only publishes.
            ack_waits: seconds by kind; the settings' own for others.
            timeout: seconds to try while nobody answers.

        Raises:
            StreamRefused: something is not as it must be and cannot be changed; the line says what.
            StreamUnavailable: nobody answered.
        """
        self._ack_waits.update(ack_waits or {})
        self._publisher.stream_created = await self._topology.ensure(kinds, self._ack_waits, timeout)

    async def keep_in_shape(self, kinds: Sequence[str]) -> None:
        """Put right what somebody has changed since ``ensure``, and raise as it does.

        An ack_wait that is longer than asked for is left alone: a worker with other settings may need it.
        """
        self._publisher.stream_created = await self._topology.ensure(
            kinds, self._ack_waits, 0.0, shortens=False
        )

    async def restore(self, kind: str) -> None:
        """Make the stream and one kind's consumer again after they have gone. Raises as ``ensure`` does."""
        await self.ensure([kind], timeout=0.0)

    async def publish(
        self,
        message: WireMessage,
        *,
        headers: Headers | None = None,
        timeout: float = 5.0,  # noqa: ASYNC109
    ) -> Published:
        """Publish a message and wait until the stream has stored it.

        Args:
            message: what to publish; once more with the same dispatch is no second message.
            headers: further headers.
            timeout: seconds to try.

        Raises:
            PublishFailed: it was not acknowledged; it may be stored or not.
        """
        [outcome] = await self.publish_many([message], headers=[headers], timeout=timeout)
        if isinstance(outcome, PublishFailed):
            raise outcome
        return outcome

    async def publish_many(
        self,
        messages: Sequence[WireMessage],
        *,
        headers: Sequence[Headers | None] | None = None,
        timeout: float = 5.0,  # noqa: ASYNC109
    ) -> list[Published | PublishFailed]:
        """Publish messages, many at a time; outcomes come in the order of the messages.

        Args:
            messages: what to publish.
            headers: further headers for each message.
            timeout: give up on the rest after so many seconds without any acknowledgement.
        """
        highest = self._highest
        outcomes = await self._publisher.publish(messages, headers, timeout)
        if self._is_another_stream(outcomes, highest):
            return await self._with_its_date(outcomes)
        return outcomes

    async def publish_raw(self, subject: str, data: bytes) -> int:
        """Publish bytes as they are, without a message id, and return their number in the stream.

        Raises:
            StreamUnavailable: nobody acknowledged; they may be stored or not.
            StreamRefused: the stream does not take them.
        """
        with api_faults(f"stream {self.name}"):
            acknowledged = await self.connection.client.jetstream().publish(subject, data, stream=self.name)
        return acknowledged.seq

    async def state(self) -> StreamState:
        """Return what the stream holds.

        Raises:
            StreamUnavailable: nobody answered, or there is no such stream.
            StreamRefused: the server does not permit it.
        """
        state = await self._api.stream_state()
        self._publisher.stream_created = state.created
        return state

    async def consumer_state(self, kind: str) -> ConsumerState:
        """Return how far a kind's consumer is. Raises as ``state`` does."""
        return await self._api.consumer_state(kind)

    async def unconsumed(self) -> dict[str, int]:
        """Return kinds that no consumer takes messages of, and how many. Raises as ``state`` does."""
        return await self._api.unconsumed(self._prefix)

    async def remove(self, kind: str, *, up_to: int) -> None:
        """Delete a kind's messages up to this number. Raises as ``state`` does."""
        await self._api.purge(self.subject_of(kind), before=up_to + 1)

    async def get(self, stream_seq: int) -> StoredMessage | None:
        """Return a stored message, None when there is none with this number. Raises as ``state`` does."""
        return await self._api.message(stream_seq)

    def _is_another_stream(self, outcomes: Sequence[Published | PublishFailed], highest: int) -> bool:
        """Tell whether numbers went backwards: somebody has made the stream anew under this connection.

        Args:
            outcomes: what has just been published.
            highest: the highest number that was known before.
        """
        numbers = [each.stream_seq for each in outcomes if isinstance(each, Published) and not each.duplicate]
        if not numbers:
            return False
        backwards = min(numbers) <= highest
        self._highest = max(numbers) if backwards else max(self._highest, *numbers)
        return backwards

    async def _with_its_date(
        self, outcomes: Sequence[Published | PublishFailed]
    ) -> list[Published | PublishFailed]:
        """Return outcomes of a new stream with its own date, without which they would be taken for lost."""
        try:
            created = (await self.state()).created
        except (StreamUnavailable, StreamRefused):
            return list(outcomes)
        return [
            each._replace(stream_created=created) if isinstance(each, Published) else each
            for each in outcomes
        ]

    async def _check_jetstream(self) -> None:
        """Ask for the stream, which a worker must be permitted anyway; that it does not exist is fine."""
        try:
            await self._api.stream_info()
        except NotThere:
            return
        except StreamUnavailable as fault:
            if not self.connection.client.offers_jetstream:
                raise StreamRefused(f"NATS at {self._servers} has JetStream disabled") from fault
