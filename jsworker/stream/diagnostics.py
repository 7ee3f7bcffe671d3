"""Reading the state of NATS for a diagnosis: server, stream and consumers. Nothing is written."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final
from uuid import uuid4

from nats.js.api import ConsumerInfo

from jsworker.core.errors import StreamRefused
from jsworker.core.events import Events
from jsworker.core.names import is_loopback
from jsworker.core.settings import Settings
from jsworker.stream.api import JetStreamApi, NotThere, ask_each, filters_of
from jsworker.stream.connection import Connection
from jsworker.stream.liveness import REFUSED, SUBJECT, Answer, ask
from jsworker.stream.message import overlap
from jsworker.stream.topology import (
    INSTALLATION,
    Difference,
    consumer_config,
    consumer_differences,
    lane_subjects,
    prefix_of,
    stream_config,
    stream_differences,
)

_ANSWER_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class NatsServer:
    """The answering server's description of itself; ``local``: the connection does not leave this machine."""

    place: str
    name: str | None
    version: tuple[int, int, int]
    encrypted: bool | None
    local: bool
    offers_jetstream: bool


@dataclass(frozen=True, slots=True)
class StreamReport:
    """The stream as it is; ``overlapping`` is another one, which has subjects of its priorities.

    ``created``: when it was made; ``behind``: servers whose copy of the stream is away, or lacks messages.
    ``denies_purge``: messages that no consumer takes cannot be removed from it, and the server takes no other
    value for this.
    """

    installation: str | None
    differences: tuple[Difference, ...]
    replicas: int
    clustered: bool
    messages: int
    bytes: int
    overlapping: str | None = None
    behind: tuple[str, ...] = ()
    created: datetime | None = None
    denies_purge: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerReport:
    """A consumer as it is; ``pending`` messages were never delivered, ``requests`` wait for messages.

    ``takes``: subjects, with wildcards, of messages that workers of other kinds expect; empty: it takes none.
    ``apart``: it takes no messages of jobs, of any prefix: unless its name is a kind, it is another
    application's.
    """

    name: str
    differences: tuple[Difference, ...]
    ack_wait: float
    pending: int
    unanswered: int
    requests: int
    paused: bool
    takes: tuple[str, ...] = ()
    apart: bool = False


class Inspector(JetStreamApi):
    """Reads server, stream and consumers; raises as ``JetStreamApi`` does."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(Connection(settings, events=Events(), name="jsworker doctor"), settings)

    async def server(self) -> NatsServer:
        """Return the answering server's description of itself."""
        client = self.connection.client
        url = client.connected_url
        host, port = (url.hostname or "", url.port or 4222) if url else ("", 4222)
        info = client.server_info
        version = client.connected_server_version
        return NatsServer(
            place=f"{host}:{port}",
            name=info.get("server_name"),
            version=(version.major, version.minor, version.patch),
            encrypted=bool(info.get("tls_required")),
            local=is_loopback(host),
            offers_jetstream=bool(info.get("jetstream")),
        )

    async def stream(self) -> StreamReport | None:
        """Return the stream as it is; None: there is none of this name."""
        try:
            info = await self.stream_info()
        except NotThere:
            return None
        differences = stream_differences(info.config, stream_config(self.settings, None))
        overlapping = None
        if self.subject_of("*") in (info.config.subjects or ()):
            others = [each for each in differences if each.setting != "subjects"]
            if others != differences and (overlapping := await self._other_with_lanes()) is not None:
                differences = others  # no worker can add the subjects that are missing
        return StreamReport(
            installation=(info.config.metadata or {}).get(INSTALLATION),
            differences=tuple(differences),
            replicas=info.config.num_replicas or 1,
            clustered=bool(info.cluster and info.cluster.name),
            messages=info.state.messages,
            bytes=info.state.bytes,
            overlapping=overlapping,
            behind=tuple(
                sorted(
                    each.name or "one without a name"
                    for each in (info.cluster and info.cluster.replicas) or ()
                    if each.offline or not each.current
                )
            ),
            created=info.created,
            denies_purge=bool(info.config.deny_purge),
        )

    async def _other_with_lanes(self) -> str | None:
        found = await self.stream_with(lane_subjects(self.settings)[0])
        return found if found != self.name else None

    async def unconsumed_subjects(self) -> dict[str, int]:
        """Return subjects whose messages no consumer takes, and how many they are, as ``unconsumed`` does."""
        return {self.subject_of(kind): messages for kind, messages in (await self.unconsumed()).items()}

    async def refused(self, workers: Sequence[str]) -> list[str]:
        """Return those workers that answer, and say that JetStream stores none of their messages."""

        async def is_refused(worker_id: str) -> bool:
            return (await ask(self.connection, SUBJECT + worker_id, _ANSWER_SECONDS)).content == REFUSED

        found = await ask_each(is_refused, workers)
        return [worker_id for worker_id, refused in found.items() if refused]

    async def answered_for_unknown_worker(self) -> bool:
        """Return whether something answers a question to a worker that has never lived."""
        reply = await ask(self.connection, f"{SUBJECT}unknown-{uuid4().hex}", _ANSWER_SECONDS)
        return reply.answer is Answer.ALIVE

    async def consumers(self, kinds: Sequence[str]) -> list[ConsumerReport]:
        """Return the stream's consumers, at least those of these kinds.

        Where they may not be listed there are no others; from ``MOST_CONSUMERS`` on some may be missing.
        """
        try:
            found = await self.listed_consumers()
        except StreamRefused:
            found = {}
        for kind in kinds:
            if kind not in found:
                with suppress(NotThere):
                    found[kind] = await self.consumer_state(kind)
        return [self._report(info) for info in found.values()]

    def _report(self, info: ConsumerInfo) -> ConsumerReport:
        wanted = consumer_config(self.settings, info.name, self.settings.ack_wait)
        filters = filters_of(info)
        is_own = wanted.filter_subject in filters
        takes = () if is_own else tuple(each for each in filters if overlap(each, self.subject_of(">")))
        return ConsumerReport(
            name=info.name,
            differences=tuple(consumer_differences(info.config, wanted)),
            ack_wait=info.config.ack_wait or 0.0,
            pending=info.num_pending or 0,
            unanswered=info.num_ack_pending or 0,
            requests=info.num_waiting or 0,
            paused=bool(info.paused),
            takes=takes,
            apart=not takes and all(prefix_of(each, info.name) is None for each in filters),
        )
