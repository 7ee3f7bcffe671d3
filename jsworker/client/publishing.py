"""From the outbox to the stream: take what is due, publish it, mark what was acknowledged."""

from collections.abc import Sequence

from jsworker.ownership.database import Database
from jsworker.ownership.outbox import Outgoing, Sent, mark, take_outgoing
from jsworker.stream.jetstream import Stream
from jsworker.stream.publish import Published
from jsworker.stream.wire import WireMessage


def wire_message(job: Outgoing) -> WireMessage:
    """Return the message that names a job."""
    return WireMessage(
        job_id=job.id,
        kind=job.kind,
        dispatch=job.dispatch,
        cleared=job.cleared,
        clear_reason=job.clear_reason,
    )


async def publish_due(database: Database, stream: Stream, *, limit: int) -> int:
    """Publish up to ``limit`` jobs of the outbox and return how many were taken.

    What is not acknowledged stays in the outbox and is due again in five seconds.

    Raises:
        DatabaseUnavailable: PostgreSQL did not answer.
    """
    outgoing = await take_outgoing(database, limit=limit)
    if outgoing:
        answers = await stream.publish_many([wire_message(job) for job in outgoing])
        sent = _acknowledged(outgoing, answers)
        if sent:
            await mark(database, sent)
    return len(outgoing)


def _acknowledged(outgoing: Sequence[Outgoing], answers: Sequence[object]) -> list[Sent]:
    return [
        Sent(job.id, job.dispatch, answer.stream_seq, answer.stream_created)
        for job, answer in zip(outgoing, answers, strict=True)
        if isinstance(answer, Published)
    ]
