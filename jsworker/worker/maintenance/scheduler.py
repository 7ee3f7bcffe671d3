"""Schedules: any worker fires those that are due, also of kinds of others; each instant at most once."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jsworker.client.enqueueing import limit_key_of, payload_text, stored_payload
from jsworker.core.clock import boottime
from jsworker.core.contents import OF_SCHEDULE, Contents, key_of_content
from jsworker.core.errors import ContentRefused, DatabaseRefused, DatabaseTimeout, KeyMissing, SettingsError
from jsworker.core.schedule_rules import Schedule, due, named_schedules
from jsworker.ownership.transitions import schedules
from jsworker.ownership.transitions.schedules import NewSchedule, StoredSchedule
from jsworker.worker.context import WorkerContext
from jsworker.worker.pipeline.kinds import Kind

_SPREAD_SECONDS: Final = 0.2
"""Workers look within so long after an instant: the first one fires it, the others find it done."""
_MOST_AT_ONCE: Final = 50
"""The most instants of one schedule in a step, so that those of a long outage delay no other schedule."""
_ASIDE_SECONDS: Final = 5.0
_LONGEST_ASIDE_SECONDS: Final = 60.0
"""A schedule that cannot be fired is tried again after so long, at first and at most: often enough before its
instant counts as missed."""

_LOCKED_SECONDS: Final = 1.0
"""Among very many that are due, one whose row is locked is left aside for so long."""


async def write_schedules(context: WorkerContext) -> None:
    """Write the schedules of this worker's classes into the table, at its start.

    Raises:
        SettingsError: a schedule, its payload or its name cannot be used.
        DatabaseUnavailable, DatabaseRefused: they were not written, or not all.
    """
    new: dict[str, NewSchedule] = {}
    now = await schedules.database_now(context.database)
    stored = await _stored(context)
    for kind in context.kinds.values():
        try:
            found = _schedules_of(kind, now, context, stored)
        except (ValueError, TypeError) as error:
            of = f"of kind {kind.name} ({type(kind.processor).__qualname__})"
            raise SettingsError(f"schedule {of}: {error}") from None
        for twin in new.keys() & found.keys():
            raise SettingsError(
                f"schedule {twin!r} of kind {kind.name}: kind {new[twin].kind} has one of that name"
            )
        new |= found
    try:
        taken = await schedules.write_code(
            context.database, kinds=list(context.kinds), new=list(new.values())
        )
    except DatabaseRefused as error:  # the installation is older and has not granted the rights yet
        if new:
            raise
        context.complaints.report("schedules", str(error))
        return
    for name, other in taken.items():
        context.complaints.report(
            f"schedule {name}",
            f"kind {other} has one of that name, so kind {new[name].kind} goes without: rename it, or "
            "`jsworker schedules remove` the other and start this worker again",
        )


async def _stored(context: WorkerContext) -> dict[str, Any]:
    """Return the payloads of schedules by their names, as they are stored, if they are encoded."""
    if context.contents.codec is None:
        return {}
    return {row["name"]: row["payload"] for row in await schedules.list_schedules(context.database)}


def _schedules_of(
    kind: Kind, now: datetime, context: WorkerContext, stored: Mapping[str, Any]
) -> dict[str, NewSchedule]:
    processor, contents = type(kind.processor), context.contents

    def new(name: str, each: Schedule) -> NewSchedule:
        text = payload_text(processor, each.payload)
        key = limit_key_of(processor, text)
        payload = stored_payload(text, kind.name, OF_SCHEDULE, contents, context.settings.max_payload_bytes)
        if (before := stored.get(name)) is not None and _is_same(before, payload, text, kind.name, contents):
            payload = json.dumps(before)  # encoded again, an equal payload would look changed
        return NewSchedule(name, kind.name, payload, each, each.after(now), kind.priority, key)

    found = named_schedules(kind.name, kind.processor.schedule)
    return {name: new(name, each) for name, each in found.items()}


def _is_same(before: Any, payload: str, text: str, kind: str, contents: Contents) -> bool:
    """Return whether a stored payload holds this text, encoded with the present key."""
    if key_of_content(before) != key_of_content(json.loads(payload)):
        return False
    try:
        return bool(contents.decode_value(before, "payload", kind, OF_SCHEDULE) == json.loads(text))
    except (KeyMissing, ContentRefused):
        return False


class Scheduler:
    """Fires schedules that are due. Another worker, or the next look, finds those that one misses."""

    def __init__(self, context: WorkerContext, *, wake: Callable[[], None]) -> None:
        """Prepare; ``wake`` begins a step."""
        self._context = context
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._aside: dict[str, float] = {}
        self._pauses: dict[str, float] = {}
        """For how long each schedule was set aside last; those that were fired since are missing."""
        self._crowd: dict[str, datetime] = {}
        """The due instants of the last look that found as many schedules as one may read."""

    async def step(self) -> None:
        """Fire the schedules that are due, and begin the next step when the next one is due."""
        if not self._context.health.up:
            return
        self._aside = {name: until for name, until in self._aside.items() if boottime() < until}
        read_at = boottime()
        nexts: list[datetime] = []
        found = await schedules.upcoming(self._context.database, besides=list(self._aside))
        for schedule in found:
            now = schedule.now
            if schedule.next_at > now:
                nexts.append(schedule.next_at)
                break
            nexts += await self._fire(schedule)
        else:
            if len(found) == schedules.MOST_READ:  # more may be due
                self._leave_locked(found)
                self._wake()
                return
        waits = [(each - now).total_seconds() - (boottime() - read_at) for each in nexts]
        waits += [until - boottime() for until in self._aside.values()]
        if waits:
            self._wake_in(min(waits))

    def _leave_locked(self, found: Sequence[StoredSchedule]) -> None:
        """Leave those aside that have not moved since the last such look: others may be due behind them."""
        before, self._crowd = self._crowd, {each.name: each.next_at for each in found}
        for name, next_at in self._crowd.items():
            if before.get(name) == next_at:
                self._aside.setdefault(name, boottime() + _LOCKED_SECONDS)

    def close(self) -> None:
        """Cancel the timer of the next step."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_in(self, seconds: float) -> None:
        self.close()
        spread = random.uniform(0, _SPREAD_SECONDS)  # noqa: S311 -- spreads load, hides nothing
        self._timer = asyncio.get_running_loop().call_later(max(seconds, 0) + spread, self._wake)

    async def _fire(self, schedule: StoredSchedule) -> list[datetime]:
        """Fire a schedule's instants, and return when it is due next, if that is known."""
        try:
            found = due(schedule.read(), schedule.next_at, schedule.now)
        except ValueError as error:  # from a newer version, or in a time zone that this system does not know
            return self._set_aside(schedule, str(error))
        seen = schedule.next_at
        instants: list[datetime | None] = [*found.run] or [None]
        steps = list(zip(instants, [*found.run[1:], found.then], strict=True))[:_MOST_AT_ONCE]
        for instant, then in steps:
            try:
                fired = await schedules.fire(
                    self._context.database, schedule, seen=seen, instant=instant, then=then
                )
            except DatabaseTimeout as error:  # for example: a trigger waits
                await self._context.database.ping()
                # A short wait is nothing to repair.
                return self._set_aside(schedule, str(error), is_reported=schedule.name in self._pauses)
            except DatabaseRefused as error:
                if error.sqlstate is None:  # the login was refused
                    raise
                return self._set_aside(schedule, str(error))
            if fired is None:  # another worker was faster
                break
            self._pauses.pop(schedule.name, None)
            if seen == schedule.next_at and found.missed:
                late = (schedule.now - seen).total_seconds()
                self._skip(schedule, seen, f"it was missed by {late:.0f} s: {schedule.missed}", found.missed)
            self._report(schedule, instant, fired)
            seen = then
        return [steps[-1][1]]

    def _report(self, schedule: StoredSchedule, instant: datetime | None, fired: schedules.Fired) -> None:
        if instant is None:  # only moved on; what was missed is reported
            return
        if fired.job_id is None:
            held_up, had_it = (
                "the job of the last one still lives",
                "it had its job before the clock went back",
            )
            self._skip(schedule, instant, held_up if fired.held_up else had_it)
            return
        facts = {"schedule": schedule.name, "kind": schedule.kind, "job_id": str(fired.job_id)}
        late = round(max(0.0, (schedule.now - instant).total_seconds()), 3)
        self._context.events.emit("schedule.fired", **facts, scheduled_for=instant, seconds_late=late)
        self._context.requeued.notify()

    def _skip(self, schedule: StoredSchedule, first: datetime, reason: str, instants: int = 1) -> None:
        facts = {"schedule": schedule.name, "kind": schedule.kind, "instants": instants}
        self._context.events.emit("schedule.skipped", **facts, scheduled_for=first, reason=reason)

    def _set_aside(
        self, schedule: StoredSchedule, reason: str, *, is_reported: bool = True
    ) -> list[datetime]:
        pause = min(2 * self._pauses.get(schedule.name, _ASIDE_SECONDS / 2), _LONGEST_ASIDE_SECONDS)
        self._pauses[schedule.name] = pause
        self._aside[schedule.name] = boottime() + pause
        if is_reported:
            self._context.events.emit(
                "schedule.refused", schedule=schedule.name, kind=schedule.kind, reason=reason
            )
        return []
