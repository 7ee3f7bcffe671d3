"""This worker's presence on NATS, proven by requests to itself: other workers must not think it has gone."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from jsworker.core.clock import boottime
from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.stream.liveness import REFUSED, WELL, Answer, Witness
from jsworker.worker.context import WorkerContext


class Presence:
    """Answers requests to this worker, checks that this works, and asks whether other workers are alive."""

    def __init__(self, context: WorkerContext, stacks: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Prepare; ``stacks`` answers requests for stacks."""
        self._stream = context.stream
        self._publishing = context.publishing
        self._health = context.health
        self._witness = Witness(context.stream.connection, context.worker_id, stacks)
        self._interval = context.settings.heartbeat_interval
        self._timeout = min(1.0, self._interval / 2)
        self._connected_since: float | None = None
        self._proven_at: float | None = None
        self._quorum_at: float | None = None
        """When the stream's leader last had a majority; None: not asked, for the database answered."""
        self._limit = self._interval + 2 * self._timeout
        self.answers = False
        """Whether a request to this worker was ever answered; only then its silence is evidence."""
        self._stream.connection.lost_callbacks.append(self._lose)

    def reachable(self) -> bool:
        """Return whether requests of other workers reach this one, as far as it knows.

        A worker that never answered counts as reachable, because nothing is concluded from its silence. On
        the NATS of another installation none of its fleet asks. Where JetStream is silent after a reconnect,
        it is not known whose NATS that is; it is taken for the own one, for killed owners are to be found.

        A server that is cut off from its cluster still lets a worker reach itself. That matters only to one
        that is cut off from the database, too, so only then the stream's leader is asked.
        """
        if not self.answers:
            return True
        if self._proven_at is None or not self._stream.connected or self._stream.topology.is_others:
            return False
        proven_at = self._proven_at
        if not self._health.up and self._quorum_at is not None:
            proven_at = min(proven_at, self._quorum_at)
        return boottime() - proven_at <= self._limit

    async def step(self) -> None:
        """Check that this worker answers requests; the answers say whether JetStream stores messages."""
        self._witness.says = REFUSED if self._publishing.refused else WELL
        if not self._stream.connected:
            self._connected_since = None
            return
        started = boottime()
        self._connected_since = self._connected_since or started
        if await self._witness.prove(self._timeout):
            self._proven_at = started
            self.answers = True
        if self._health.up:
            self._quorum_at = None
        else:
            self._quorum_at = max(await self._look_for_quorum(), self._quorum_at or -math.inf)
        # Pullers ask, too, but not while they have no room. The next proof waits for no silent JetStream.
        with suppress(StreamUnavailable, StreamRefused, TimeoutError):
            async with asyncio.timeout(self._timeout):
                await self._stream.topology.check_installation()

    async def is_with_quorum(self) -> bool:
        """Return whether silence of others proves anything; asks the stream's leader.

        A worker whose server is cut off from its cluster finds none of the others, alive as they are. At most
        one side of the cut has the quorum: owners on the other one stop their runs.
        """
        return boottime() - await self._look_for_quorum() <= self._limit

    async def _look_for_quorum(self) -> float:
        """Ask when the stream's leader last had a majority; minus infinity: no leader, or no answer."""
        asked_at = boottime()
        with suppress(StreamUnavailable, StreamRefused, TimeoutError):
            async with asyncio.timeout(self._timeout):
                return asked_at - await self._stream.quorum_age()
        return -math.inf

    async def ask(self, worker_id: str) -> Answer:
        """Ask whether another worker is alive; UNKNOWN while this worker has been connected for too short."""
        is_new = self._connected_since is None or boottime() - self._connected_since < 2 * self._interval
        if is_new or self._proven_at is None or not self.reachable():  # it does not even reach itself
            return Answer.UNKNOWN
        return await self.answered_by(worker_id)

    async def answered_by(self, worker_id: str) -> Answer:
        """Ask whether another worker is alive, for a use in which a missing answer proves nothing."""
        return await self._witness.ask(worker_id, self._timeout)

    def _lose(self) -> None:
        self._connected_since = self._proven_at = None
