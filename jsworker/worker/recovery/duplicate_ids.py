"""An explicitly set worker id belongs to one live worker: the second one is refused, after a crash not."""

import asyncio

from jsworker.core.errors import SettingsError
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import workers
from jsworker.ownership.transitions.workers import EarlierLife, WorkerRow
from jsworker.stream.liveness import Answer
from jsworker.worker.presence import Presence
from jsworker.worker.recovery.evidence import death_of

_MISSED_HEARTBEATS = 4
"""So many of its own intervals without a sign of life, and a namesake counts as gone. One is left out
on purpose now and then (``Heartbeat``); two may be missed beside it."""
_LOOKS_PER_INTERVAL = 4


async def refuse_live_duplicate(
    database: Database, *, worker: WorkerRow, name: str, presence: Presence
) -> None:
    """Wait until no other live worker has this name.

    A namesake that crashed without evidence of its death is waited out, not crash-looped against: names
    decide nothing about jobs, their ids end at random.

    Args:
        database: where workers register; this one has.
        worker: this worker.
        name: the id that was set, without its random end.
        presence: asks namesakes whether they are there.

    Raises:
        SettingsError: another worker with this name is alive.
        DatabaseUnavailable: nobody can tell.
    """
    first_seen: dict[str, EarlierLife] = {}
    while True:
        others = [
            life
            for life in await workers.duplicates(database, worker=worker, name=name)
            if life.started_before and death_of(life, worker) is None and not _is_silent(life)
        ]
        if not others:
            return
        for life in others:
            before = first_seen.setdefault(life.id, life)
            beats = life.last_seen_at > before.last_seen_at
            if beats or await presence.answered_by(life.id) is Answer.ALIVE:
                raise SettingsError(
                    f"JSWORKER_WORKER_ID={name} must be another one: worker {life.id} has it and is alive, "
                    f"pid {life.pid} on host {life.hostname}"
                )
        await workers.seen(database, worker, state="running")  # or the next namesake takes this one for gone
        await asyncio.sleep(min(life.heartbeat_interval for life in others) / _LOOKS_PER_INTERVAL)


def _is_silent(life: EarlierLife) -> bool:
    return life.seconds_silent > _MISSED_HEARTBEATS * life.heartbeat_interval
