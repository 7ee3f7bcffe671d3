"""What operators do with dead messages: send them again, or drop them."""

from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from jsworker.core.errors import InvalidName, StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.names import check_kind, shown
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import dead_messages as dead
from jsworker.ownership.transitions.audit import AuditEntry
from jsworker.ownership.transitions.dead_messages import KEPT_BYTES, DeadMessage
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.api import lane_at
from jsworker.stream.jetstream import Stream, ensured_stream

_CONNECT_SECONDS: Final = 3.0
_MOST_NAMED: Final = 100


class DeadMessageOutcome(NamedTuple):
    """What became of a dead message; ``refusal``: why it was left as it was, None: it was not."""

    id: int
    refusal: str | None = None


async def drop(database: Database, ids: Sequence[int], *, actor: str) -> list[DeadMessageOutcome]:
    """Take messages off the list; ``actor`` is who does it, for ``JobClient.audit``."""
    entry = _entry("dead_messages.drop", ids, actor)
    dropped = set(await dead.drop_dead(database, ids, entry=entry))
    await entry.end(database, matched=len(ids))
    return [DeadMessageOutcome(each) if each in dropped else _unknown(each) for each in ids]


async def replay(
    database: Database, settings: Settings, ids: Sequence[int], *, client_name: str, actor: str
) -> AsyncIterator[DeadMessageOutcome]:
    """Send messages to their subjects again, take each off the list then, and yield what became of each.

    Once NATS does not answer, all others stay on the list; of the first of them it may have the message.
    """
    if not ids:
        return
    entry = _entry("dead_messages.replay", ids, actor)
    async with ensured_stream(
        settings,
        await installation_id(database),
        events=Events(),
        client_name=client_name,
        seconds=_CONNECT_SECONDS,
    ) as stream:
        away: StreamUnavailable | None = None
        for message_id in ids:
            if away is not None:
                yield DeadMessageOutcome(message_id, f"message {message_id}: {away}")
                continue
            messages = await dead.read_dead(database, [message_id])
            if not messages:
                yield _unknown(message_id)
                continue
            try:
                yield await _replay_one(database, stream, messages[0], settings.subject_prefix, entry)
            except StreamUnavailable as error:
                away = error
                yield DeadMessageOutcome(message_id, f"message {message_id}: {error}")
    await entry.end(database, matched=len(ids))


async def _replay_one(
    database: Database, stream: Stream, message: DeadMessage, prefix: str, entry: AuditEntry
) -> DeadMessageOutcome:
    """Publish first, drop then: at worst it is sent twice, which harms no job."""
    name = f"message {message.id}"
    if message.truncated:
        why = f"{name} was longer than the {KEPT_BYTES} bytes that are kept of it"
        return DeadMessageOutcome(message.id, why)
    try:
        lane = lane_at(message.subject.removeprefix(f"{prefix}."))
        check_kind(lane[0] if lane is not None else message.subject)
        await stream.publish_raw(message.subject, message.data)
    except InvalidName:
        why = f"{name} came from subject {shown(message.subject)}, not {prefix}.KIND"
        return DeadMessageOutcome(message.id, why)
    except StreamRefused as error:
        return DeadMessageOutcome(message.id, f"{name}: {error}")
    await dead.drop_dead(database, [message.id], entry=entry)
    return DeadMessageOutcome(message.id)


def _unknown(message_id: int) -> DeadMessageOutcome:
    return DeadMessageOutcome(message_id, f"no dead message has id {message_id}")


def _entry(action: str, ids: Sequence[int], actor: str) -> AuditEntry:
    return AuditEntry(action, {"messages": list(ids[:_MOST_NAMED])}, actor=actor)
