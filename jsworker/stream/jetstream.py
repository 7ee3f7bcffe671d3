"""One stream of JetStream: connect, ensure that stream and consumers are right, publish, and ask."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Final
from uuid import UUID

from nats.js.api import ClusterInfo

from jsworker.core.clock import boottime
from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.api import JetStreamApi, NotThere, StreamState, api_errors
from jsworker.stream.connection import Connection
from jsworker.stream.message import WireMessage
from jsworker.stream.publisher import Headers, Published, Publisher, PublishOutcome
from jsworker.stream.topology import EnsuredConsumer, Topology

_KNOWN_SECONDS: Final = 60.0


class Stream(JetStreamApi):
    """One connection to NATS and one stream on it; see ``Connection`` and ``Topology`` for what it emits.

    ``installation_id`` is None if the stream is only published to.
    """

    def __init__(
        self, settings: Settings, *, installation_id: UUID | None, events: Events, client_name: str
    ) -> None:
        super().__init__(Connection(settings, events=events, name=client_name), settings)
        self.events = events
        self._ack_waits: dict[str, float] = {}
        self.topology = Topology(self, installation_id=installation_id, events=events)
        self.publisher = Publisher(self.connection, settings, self.topology)
        self._highest_seq = 0
        self._learnt_at = 0.0

    async def connect(self, timeout: float = 10.0) -> None:  # noqa: ASYNC109 -- how long to try is the caller's business
        """Connect and check that JetStream answers; try for ``timeout`` seconds, but raise a refusal at once.

        Raises:
            SettingsError: a URL, a credentials file or a certificate cannot be used.
            StreamUnavailable: no server answered in time.
            StreamRefused: login or TLS was refused, or JetStream is disabled.
        """
        await super().connect(timeout)
        client = self.connection.client
        try:
            await self.stream_info()  # a worker needs this permission anyway; the stream need not exist
        except NotThere:
            return
        except StreamUnavailable as silent:
            # If JetStream is offered but silent, a cluster may be electing leaders: ``ensure`` waits for it.
            if not client.server_info.get("jetstream"):
                await self.close()
                servers = self.settings.redacted_nats_url()
                raise StreamRefused(f"NATS at {servers} has JetStream disabled") from silent
        except BaseException:
            await self.close()
            raise

    async def flush(self, timeout: float = 5.0) -> bool:  # noqa: ASYNC109 -- as above
        """Return whether the server confirmed within ``timeout`` seconds that it read all that was sent."""
        if not self.connected:
            return False
        with suppress(TimeoutError):
            await self.connection.client.flush(timeout)
            return True
        return False

    async def ensure(
        self,
        kinds: Sequence[str],
        ack_waits: Mapping[str, float] | None = None,
        *,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> None:
        """Create the stream and a consumer for each kind, or change them; see ``Topology.ensure``."""
        self._ack_waits.update(ack_waits or {})
        self._learn(await self.topology.ensure(kinds, self._ack_waits, timeout))

    @property
    def is_own(self) -> bool:
        """Whether the server can be reached, and the stream there is known not to be another installation's.

        That is found out once after each loss of the connection, by ``ensure``, ``publish_many`` or
        ``Topology.check_installation``.
        """
        return self.connected and self.topology.is_own

    async def quorum_age(self) -> float:
        """Return how many seconds ago the stream's leader last heard from a majority of the stream's servers.

        Infinity: there is no leader. 0, without a request, on a server that is in no cluster, for it cannot
        be cut off from one. Raises as ``stream_info`` does, also if no leader can be reached.
        """
        if not self.connected:
            raise StreamUnavailable("not connected to NATS")
        if not self.connection.client.server_info.get("cluster"):
            return 0.0
        return quorum_age((await self.stream_info()).cluster)

    @property
    def lacks_lanes_because(self) -> str | None:
        """Why the stream was refused the subjects of the priorities; None: it has them."""
        return None if self.topology.has_lanes else self.topology.lanes_refused

    async def keep_consumer_in_shape(self, name: str) -> EnsuredConsumer:
        """Revert changes that others have made to a consumer since ``ensure``; raises as ``ensure`` does.

        An ack_wait that is longer than asked for is left alone: a worker with other settings may need it. So
        is a pause, which is somebody's intention.
        """
        return await self.topology.ensure_consumer(name, self._ack_waits, shortens=False)

    async def publish_many(
        self,
        messages: Sequence[WireMessage],
        *,
        headers: Sequence[Headers | None] | None = None,
        timeout: float = 5.0,  # noqa: ASYNC109
    ) -> list[PublishOutcome]:
        """Publish messages, many at a time; outcomes come in the order of the messages.

        A message published again with the same dispatch within the duplicate window is not stored twice.
        After ``timeout`` seconds without any acknowledgement the rest is given up.
        """
        highest = self._highest_seq
        outcomes = await self.publisher.publish(messages, headers, timeout)
        new = [each.stream_seq for each in outcomes if isinstance(each, Published) and not each.duplicate]
        if not new:
            return outcomes
        is_known = boottime() - self._learnt_at < _KNOWN_SECONDS
        if min(new) > highest and is_known:
            self._highest_seq = max(self._highest_seq, *new)
            return outcomes
        # The stream was deleted and created anew during this connection, or may have been, and others have
        # published to it since: with the old stream's date, these messages would be taken for lost.
        self._highest_seq = max(new)
        self._learnt_at = boottime()  # also without an answer: no publisher waits for one again and again
        try:
            created = (await self.state()).created
        except (StreamUnavailable, StreamRefused):
            return outcomes
        return [
            each._replace(stream_created=created) if isinstance(each, Published) else each
            for each in outcomes
        ]

    async def publish_raw(self, subject: str, data: bytes) -> None:
        """Publish bytes as they are, without a message id; StreamUnavailable: they may be stored or not."""
        publishing = self.connection.client.jetstream().publish(subject, data, stream=self.name)
        with api_errors(f"stream {self.name}"):
            await self.connection.answered(subject, publishing)

    async def state(self) -> StreamState:
        """Return the stream's state."""
        state = await super().state()
        self._learn(state.created)
        return state

    def _learn(self, created: datetime) -> None:
        self.publisher.stream_created = created
        self._learnt_at = boottime()


def quorum_age(cluster: ClusterInfo | None) -> float:
    """Return how many seconds ago a stream's leader, by its own word, last heard from a majority.

    A leader that is cut off from the others goes on as such for a while. Of a server that it has not heard
    since it was elected it says 0.
    """
    if cluster is None or not cluster.leader:
        return math.inf
    others = cluster.replicas or ()
    silences = sorted(each.active / 1e9 if each.active else math.inf for each in others)
    others_needed = (len(silences) + 1) // 2
    return silences[others_needed - 1] if others_needed else 0.0


@asynccontextmanager
async def ensured_stream(
    settings: Settings,
    installation_id: UUID,
    kinds: Sequence[str] = (),
    *,
    events: Events,
    client_name: str,
    seconds: float = 10.0,
) -> AsyncIterator[Stream]:
    """Connect within ``seconds``, ensure stream and consumers as ``Stream.ensure`` does, close at the end."""
    stream = Stream(settings, installation_id=installation_id, events=events, client_name=client_name)
    await stream.connect(seconds)
    try:
        await stream.ensure(kinds)
        yield stream
    finally:
        await stream.close()
