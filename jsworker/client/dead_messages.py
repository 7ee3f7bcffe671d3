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
from jsworker.ownership.transitions.dead_messages import KEPT_BYTES
from jsworker.ownership.transitions.workers import installation_id
from jsworker.stream.api import lane_at
from jsworker.stream.jetstream import Stream, ensured_stream

_CONNECT_SECONDS: Final = 3.0
_MOST_NAMED: Final = 100
_UNKNOWN: Final = "no dead message has id {}"


class DeadMessageOutcome(NamedTuple):
    """What became of a dead message; ``refusal``: why it was left as it was, None: it was not."""

    id: int
    refusal: str | None = None


async def drop(database: Database, ids: Sequence[int], *, actor: str) -> list[DeadMessageOutcome]:
    """Take messages off the list; ``actor`` is who does it, for ``JobClient.audit``."""
    entry = _entry("dead_messages.drop", ids, actor)
    dropped = set(await dead.drop_dead(database, ids, entry=entry))
    await entry.end(database, matched=len(ids))
    return [DeadMessageOutcome(each, None if each in dropped else _UNKNOWN.format(each)) for each in ids]


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
            refusal = None
            if away is None:
                try:
                    refusal = await _replay_one(database, stream, message_id, settings.subject_prefix, entry)
                except StreamUnavailable as error:
                    away = error
            if away is not None:
                refusal = f"message {message_id}: {away}"
            yield DeadMessageOutcome(message_id, refusal)
    await entry.end(database, matched=len(ids))


async def _replay_one(
    database: Database, stream: Stream, message_id: int, prefix: str, entry: AuditEntry
) -> str | None:
    """Publish first, drop then: at worst it is sent twice, which harms no job. Return why it was refused."""
    messages = await dead.read_dead(database, [message_id])
    if not messages:
        return _UNKNOWN.format(message_id)
    message, name = messages[0], f"message {message_id}"
    if message.truncated:
        return f"{name} was longer than the {KEPT_BYTES} bytes that are kept of it"
    begin = f"{prefix}."
    lane = lane_at(message.subject.removeprefix(begin)) if message.subject.startswith(begin) else None
    try:
        check_kind("" if lane is None else lane[0])
        await stream.publish_raw(message.subject, message.data)
    except InvalidName:
        return f"{name} came from subject {shown(message.subject)}, not {prefix}.KIND"
    except StreamRefused as error:
        return f"{name}: {error}"
    await dead.drop_dead(database, [message_id], entry=entry)
    return None


def _entry(action: str, ids: Sequence[int], actor: str) -> AuditEntry:
    return AuditEntry(action, {"messages": list(ids[:_MOST_NAMED])}, actor=actor)
