"""From the outbox to the stream: take what is due, publish it, mark what was acknowledged."""

from collections.abc import Sequence

from jsworker import fault_points
from jsworker.errors import PublishFailed
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


async def publish_due(
    database: Database, stream: Stream, *, limit: int
) -> Sequence[Published | PublishFailed]:
    """Publish up to ``limit`` jobs of the outbox and return an answer for each.

    What is not acknowledged stays in the outbox and is due again in five seconds.

    Raises:
        DatabaseUnavailable: PostgreSQL did not answer.
    """
    outgoing = await take_outgoing(database, limit=limit)
    if not outgoing:
        return []
    answers = await stream.publish_many([wire_message(job) for job in outgoing])
    if sent := _acknowledged(outgoing, answers):
        await fault_points.reach("after_publish_before_mark")
        await mark(database, sent)
    return answers


def _acknowledged(outgoing: Sequence[Outgoing], answers: Sequence[object]) -> list[Sent]:
    return [
        Sent(job.id, job.dispatch, answer.stream_seq, answer.stream_created)
        for job, answer in zip(outgoing, answers, strict=True)
        if isinstance(answer, Published)
    ]
