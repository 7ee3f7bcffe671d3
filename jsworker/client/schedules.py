"""Schedules for people without code: add, list, pause, resume, run now, remove; also those of classes."""

import builtins  # Python 3.14 reads annotations late: there, list is the method
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, TypeVar

from jsworker.client.client_publisher import ClientPublisher
from jsworker.client.enqueueing import (
    Kind,
    kind_name,
    limit_key_of,
    payload_text,
    priority_of,
    stored_payload,
)
from jsworker.client.results import JobHandle, ResultReader
from jsworker.core.contents import OF_SCHEDULE, Contents
from jsworker.core.errors import TransitionRefused
from jsworker.core.names import shown, storable
from jsworker.core.priorities import Priority
from jsworker.core.schedule_rules import Cron, Every, Schedule, check_schedule_name
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions import schedules
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.enqueue import Enqueued
from jsworker.ownership.transitions.schedules import NewSchedule

T = TypeVar("T")


class Schedules:
    """The schedules of an installation; any worker fires them.

    Calls with the name of no schedule raise TransitionRefused.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        publisher: ClientPublisher,
        read_result: ResultReader,
        contents: Contents,
    ) -> None:
        self._contents = contents
        self._read_result = read_result
        self._database = database
        self._settings = settings
        self._publisher = publisher

    async def list(self) -> builtins.list[dict[str, Any]]:
        """Return all schedules by column name, the next one due first.

        ``last_job`` is the job of the last instant, ``last_status`` its status; ``priority`` is ``high``,
        ``normal`` or ``low``; ``set_by`` is ``code`` for those of classes and ``operator`` for all others.
        """
        return await schedules.list_schedules(self._database)

    async def add(
        self,
        name: str,
        kind: Kind,
        schedule: Schedule,
        *,
        replace: bool = False,
        priority: Priority | None = None,
        limit_key: str | None = None,
        actor: str | None = None,
    ) -> datetime:
        """Add a schedule, and return when it is due next.

        Args:
            name: what it is called, 1 to 100 printable characters.
            kind: the kind of its jobs, or the processor, which checks the payload.
            schedule: a ``Cron`` or an ``Every``, with the payload.
            replace: take the place of a schedule of that name, and stay paused if it is; else it is refused.
            priority: of its jobs; left out: the processor's, or normal for a kind's name.
            limit_key: under which limits count its jobs; left out: what the ``limit`` of a processor says.
            actor: who does it, for ``JobClient.audit``; left out: the user of this process.

        Raises:
            TransitionRefused: a schedule of that name exists.
            InvalidName, InvalidPayload, InvalidJson: the name, the kind or the payload cannot be used.
            ValueError: the priority does not exist.
            TypeError: ``schedule`` is not a schedule.
        """
        if not isinstance(schedule, Cron | Every):
            raise TypeError(f"schedule={shown(schedule)} must be a Cron or an Every")
        text, most = payload_text(kind, schedule.payload), self._settings.max_payload_bytes
        lane, key = priority_of(kind, priority), limit_key_of(kind, text, limit_key)
        payload = stored_payload(text, kind_name(kind), OF_SCHEDULE, self._contents, most)
        first = schedule.after(await schedules.database_now(self._database))
        new = NewSchedule(check_schedule_name(name), kind_name(kind), payload, schedule, first, lane, key)
        with operators_rights("schedules", "UPDATE on jsworker.schedules"):
            entry = _entry("schedules.add", name, actor, kind=new.kind)
            return await schedules.add(self._database, new, replace=replace, entry=entry)

    async def pause(self, name: str, *, actor: str | None = None) -> None:
        """Pause a schedule until it is resumed, even if workers restart or its class changes."""
        await self._act("pause", schedules.pause, name, actor)

    async def resume(self, name: str, *, actor: str | None = None) -> datetime:
        """Resume a schedule, and return its next due time; due times during the pause are skipped."""
        return await self._act("resume", schedules.resume, name, actor)

    async def run_now(self, name: str, *, actor: str | None = None) -> JobHandle:
        """Enqueue a job of a schedule now, in addition to its due times."""
        job_id = await self._act("run_now", schedules.run_now, name, actor)
        self._publisher.publish_in_background()
        return JobHandle.of(Enqueued(job_id, created=True), self._read_result, "")

    async def remove(self, name: str, *, actor: str | None = None) -> None:
        """Remove a schedule; its jobs stay.

        One that a class has comes back with the next worker that has the class: pause it instead, or take it
        out of the class.
        """
        await self._act("remove", schedules.remove, name, actor)

    async def _act(self, action: str, act: Callable[..., Awaitable[T]], name: str, actor: str | None) -> T:
        with operators_rights("schedules", "UPDATE on jsworker.schedules"):
            return await act(self._database, _known(name), entry=_entry(f"schedules.{action}", name, actor))


def _known(name: str) -> str:
    """Return the name if PostgreSQL can store it; no schedule can have another one."""
    if not isinstance(name, str) or storable(name) != name:
        raise TransitionRefused(f"there is no schedule {shown(name)}")
    return str.__str__(name)


def _entry(action: str, name: str, actor: str | None, **how: str) -> AuditEntry:
    return AuditEntry(action, {"schedule": name, **how}, actor=os_user() if actor is None else actor)
