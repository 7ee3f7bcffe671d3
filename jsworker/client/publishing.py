"""From the outbox to the stream: take what is due, publish it, mark what was acknowledged."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from jsworker.core import fault_points, tracing
from jsworker.core.errors import MessageUnfit, PublishFailed, PublishRefused
from jsworker.core.tracing import TraceContext
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.publish import Outgoing, Sent, mark, take_outgoing
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import WireMessage
from jsworker.stream.publisher import Published

AT_ONCE: Final = 4
"""Batches under way: while one is taken, others are on their way to the stream, stored there and marked."""

MARK_SECONDS: Final = 0.5
"""So much later few messages are marked, or up to twice that: by then most of their jobs are claimed, and
need no mark. One that came at once would lock rows as their messages arrive, and no claim waits for a lock.
Far less than the five seconds after which a message without a mark is published again."""
_FEW: Final = 500
"""Of more messages most jobs will wait: they are marked at once, which keeps what is unmarked short."""

Take = Callable[[], Awaitable[list[Outgoing]]]
"""Takes a batch from the outbox; a short one was all."""


@dataclass(slots=True)
class Tally:
    """What came of publishing an outbox."""

    published: int = 0  # messages that the stream acknowledged
    stored: int = 0  # those among them that the stream did not have already
    failed: str | None = None  # why one of the others was not
    refused: str | None = None  # why the stream takes no messages now, as far as is known
    ended: bool = False  # a batch was short, not taken, or not acknowledged at all: begin no other


class OutboxPublisher:
    """Publishes the outbox batch by batch; while it is full, some are taken as others are sent and marked.

    A batch holds up to ``limit`` jobs: all that is due, or what ``take`` takes. ``at_once`` of them are
    under way while the outbox is full; fewer leave more of the process to others. ``refused_rows`` sets rows
    aside whose mark is refused. ``mark_later`` is given what was sent of a small batch, to be marked within
    seconds; None: all is marked at once. Every method raises ``DatabaseUnavailable`` without an answer of
    PostgreSQL.
    """

    def __init__(
        self,
        database: Database,
        stream: Stream,
        *,
        limit: int,
        take: Take | None = None,
        at_once: int = AT_ONCE,
        refused_rows: RefusedRows | None = None,
        mark_later: Callable[[Sent], None] | None = None,
    ) -> None:
        self._database = database
        self._stream = stream
        self._limit = limit
        self._at_once = at_once
        self._refused_rows = refused_rows
        self._mark_later = mark_later
        self._take = take or partial(take_outgoing, database, limit=limit)
        self._taking = asyncio.Lock()
        self._ending = False

    def end(self) -> None:
        """Begin no other batch; those under way are still sent, and marked at once or later."""
        self._ending = True

    async def publish(self, tally: Tally | None = None) -> Tally:
        """Publish until a batch is short or NATS is gone.

        What is not acknowledged stays in the outbox and is due again in five seconds. ``tally`` also
        counts what was published before an error.
        """
        tally = Tally() if tally is None else tally
        await self._publish_batch(tally)  # alone, for as a rule that was all
        lanes = [self._publish_on(tally) for _ in range(self._at_once)]
        for ended in await asyncio.gather(*lanes, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended
        return tally

    async def try_out(self, outgoing: Sequence[Outgoing], *, seconds: float) -> Tally:
        """Publish a few messages to learn whether the stream takes any; give up after ``seconds``."""
        tally = Tally()
        await self._send(outgoing, tally, seconds)
        return tally

    async def _publish_on(self, tally: Tally) -> None:
        try:
            while not tally.ended:
                await self._publish_batch(tally)
        finally:
            tally.ended = True

    async def _publish_batch(self, tally: Tally) -> None:
        # One after the other: PUBLISH locks rows that a twin has just taken, and their MARK would skip them.
        async with self._taking:
            wanted = self._stream.connected and not tally.ended and not self._ending
            outgoing = await self._take() if wanted else []
        if len(outgoing) < self._limit:
            tally.ended = True
        if outgoing:
            await self._send(outgoing, tally)

    async def _send(self, outgoing: Sequence[Outgoing], tally: Tally, seconds: float = 5.0) -> None:
        answers = await publish_traced(self._stream, outgoing, timeout=seconds)
        sent = [
            Sent(job.id, job.dispatch, answer.stream_seq, answer.stream_created)
            for job, answer in zip(outgoing, answers, strict=True)
            if isinstance(answer, Published)
        ]
        stored = sum(isinstance(each, Published) and not each.duplicate for each in answers)
        failed = [each for each in answers if isinstance(each, PublishFailed)]
        tally.published += len(sent)
        tally.stored += stored
        if failed:
            tally.failed = str(failed[0])
        # Beside messages that were stored a refusal is one message's own: a limit of its subject, perhaps.
        if not stored:
            # The stream said so, or acknowledged nothing at all. One message without an answer among others
            # says nothing about them: its subject may not be permitted.
            refused: list[PublishFailed] = [each for each in failed if isinstance(each, PublishRefused)]
            if not refused and not sent:
                refused = [each for each in failed if not isinstance(each, MessageUnfit)]
            if refused:
                tally.refused = tally.refused or str(refused[0])
        # Without a leader, say: what failed is due again before the last batch has failed, too.
        if tally.refused is not None or not sent:
            tally.ended = True
        if not sent:
            return
        await fault_points.reach("after_publish_before_mark")
        # Of a batch with one that failed, after a wait, the others are about to be due again.
        if self._mark_later is None or failed or len(sent) > _FEW:
            await mark(self._database, sent, self._refused_rows)
        else:
            for each in sent:
                self._mark_later(each)


async def publish_traced(
    stream: Stream,
    outgoing: Sequence[Outgoing],
    *,
    timeout: float = 5.0,  # noqa: ASYNC109 -- passed on
) -> Sequence[Published | PublishFailed]:
    """Publish messages with the contexts of their jobs, in spans where they are made."""
    messages = [
        WireMessage(job.id, job.kind, job.dispatch, job.cleared, job.clear_reason, job.priority)
        for job in outgoing
    ]
    if all(job.traceparent is None for job in outgoing):
        return await stream.publish_many(messages, timeout=timeout)
    contexts = [TraceContext(job.traceparent, job.tracestate) for job in outgoing]
    began_ns = time.time_ns()
    headers = [context.headers() for context in contexts]
    answers = await stream.publish_many(messages, headers=headers, timeout=timeout)
    if (spans := tracing.active()) is not None:
        for job, context, answer in zip(outgoing, contexts, answers, strict=True):
            subject, stored = stream.subject_of(job.kind, job.priority), isinstance(answer, Published)
            sent = partial(spans.sent, subject, job.id, context, began_ns=began_ns, stored=stored)
            tracing.attempt(sent)
    return answers
