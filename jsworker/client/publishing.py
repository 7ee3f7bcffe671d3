"""Publishes the outbox: takes due jobs, sends their messages to the stream, marks acknowledged ones."""

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
"""The batches under way: while one is taken from the outbox, others are sent, stored and marked."""

MARK_SECONDS: Final = 0.5
"""A small batch is marked this much later, or up to twice that: by then most of its jobs are claimed and need
no mark. An immediate mark would lock rows while their messages arrive, and a claim does not wait for a lock.
The delay is far less than the five seconds after which a message without a mark is published again."""
_FEW: Final = 500
"""If a batch is larger, most of its jobs will wait: it is marked at once, so that few rows are unmarked."""

Take = Callable[[], Awaitable[list[Outgoing]]]
"""Takes a batch from the outbox; if it is shorter than the limit, it is the last one."""


@dataclass(slots=True)
class Tally:
    """The result of publishing an outbox."""

    published: int = 0  # messages that the stream acknowledged
    stored: int = 0  # acknowledged messages that the stream did not have already
    failed: str | None = None  # why a message was not acknowledged
    refused: str | None = None  # why the stream takes no messages now, as far as is known
    silent: bool = False  # it is taken to refuse them because it did not answer, not because it said so
    ended: bool = False  # a batch was short, not taken, refused, or acknowledged for none: begin no other


class OutboxPublisher:
    """Publishes the outbox batch by batch; while more is due, some batches are taken as others are sent.

    ``take`` takes a batch, by default up to ``limit`` due jobs; a batch of fewer than ``limit`` is the last.
    Up to ``at_once`` batches are under way; a smaller number leaves more CPU time to the rest of the process.
    ``refused_rows`` sets aside rows whose mark is refused. ``mark_later`` is called with each sent message of
    a small batch, to be marked within seconds; None: all are marked at once. Every method raises
    ``DatabaseUnavailable`` if PostgreSQL does not answer.
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
        """Begin no other batch; the batches under way are still sent, and marked at once or later."""
        self._ending = True

    async def publish(self, tally: Tally | None = None) -> Tally:
        """Publish until a batch is short, NATS is not connected, or the stream takes no messages.

        A message that is not acknowledged stays in the outbox and is due again in five seconds. If an error
        is raised, ``tally`` counts what was published before it.
        """
        tally = Tally() if tally is None else tally
        await self._publish_batch(tally)  # alone, because usually it is the only one
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
        # One take at a time: a second PUBLISH would lock rows that the first has just taken, and their MARK
        # would skip them.
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
        # If others were stored, a refusal concerns one message alone: for example a limit of its subject.
        if not stored:
            # The stream takes no messages if it says so, or acknowledges none. A single message without an
            # answer tells nothing about the others: its subject may not be permitted.
            refused: list[PublishFailed] = [each for each in failed if isinstance(each, PublishRefused)]
            if not refused and not sent:
                refused = [each for each in failed if not isinstance(each, MessageUnfit)]
            if refused and tally.refused is None:
                tally.refused = str(refused[0])
                tally.silent = not isinstance(refused[0], PublishRefused)
        # Without a leader, for example, failed messages are due again before the last batch has failed.
        if tally.refused is not None or not sent:
            tally.ended = True
        if not sent:
            return
        await fault_points.reach("after_publish_before_mark")
        # After a failure, which took a wait, the other messages of the batch are about to be due again.
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
    """Publish messages with the trace contexts of their jobs, in spans if tracing is active."""
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
