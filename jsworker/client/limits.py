"""Limits, rates and pauses for operators: list, set, reset, pause, resume."""

import builtins  # Python 3.14 reads annotations late: there, list is the method
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from jsworker.client.enqueueing import Kind, check_count, kind_name
from jsworker.client.terms import LONGEST_DELAY, instant_of
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import check_limit_key_of_row, printable, shown
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import RowRefused, operators_rights
from jsworker.ownership.transitions import admission, limits, schedules
from jsworker.ownership.transitions.audit import AuditEntry, os_user
from jsworker.ownership.transitions.limits import MOST_LISTED, Numbers

_REASON_CHARACTERS = 300


class Limits:
    """Sets and lists the limits of an installation; workers write those of their classes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(
        self, *, all_keys: bool = False, limit: int = MOST_LISTED, after: tuple[str, str] | None = None
    ) -> builtins.list[dict[str, Any]]:
        """Return limits by column name, with the jobs that run and are held, sorted by kind and key.

        The key of a kind itself is empty: its numbers hold for each key without numbers of its own. Keys
        of which nothing runs, is held, set or paused are left out, unless ``all_keys``. At most ``limit``,
        up to 10,000, are returned: with ``after``, a kind and a key, those that follow.
        """
        check_count("limit", limit, MOST_LISTED)
        place = ("", "") if after is None else after
        return await limits.list_limits(self._database, all_keys=all_keys, after=place, limit=limit)

    async def set(
        self, kind: Kind, *numbers: Limit | Rate, key: str | None = None, actor: str | None = None
    ) -> None:
        """Set the limit, the rate or both of a kind, or of one of its keys; they stay until ``reset``.

        A kind's numbers hold for each of its keys. What of the two is not given is not limited; of a key,
        it is as for its kind. ``actor`` is who does it, for ``JobClient.audit``; left out: the user of this
        process.

        Raises:
            InvalidName: the kind or the key is not allowed.
            TypeError, ValueError: none is given, two of a sort, or one with a key: what a job's key is, its
                class or its producer says.
        """
        if not numbers or len({type(each) for each in numbers}) != len(numbers):
            raise ValueError("give a Limit, a Rate, or one of each")
        found: dict[str, Any] = {"max_running": None}
        for each in numbers:
            if not isinstance(each, Limit | Rate):
                raise TypeError(f"{shown(each)} must be a Limit or a Rate")
            if each.key is not None:
                raise ValueError("the key of a job is its class's or its producer's word: leave key out")
            if isinstance(each, Limit):
                found["max_running"] = each.max_running
            else:
                found |= {"rate": each.number, "per": float(each.per)}
        with operators_rights("limits", "UPDATE on jsworker.limits"):
            entry = _entry("limits.set", kind, key, actor, **found)
            name = kind_name(kind)
            await limits.set_numbers(self._database, name, _key(key), Numbers(**found), entry=entry)
            await self._wake(kind, key)

    async def numbers(self, kind: Kind, *, key: str | None = None) -> Numbers:
        """Return the numbers that apply to a kind, or to one of its keys: its own, else those of the kind."""
        return await limits.numbers_of(self._database, kind_name(kind), _key(key))

    async def reset(self, kind: Kind, *, key: str | None = None, actor: str | None = None) -> None:
        """Remove the numbers set by operators; those of a class return with the next worker that starts.

        Raises TransitionRefused if no operator has set any.
        """
        with operators_rights("limits", "UPDATE on jsworker.limits"):
            entry = _entry("limits.reset", kind, key, actor)
            await limits.reset_numbers(self._database, kind_name(kind), _key(key), entry=entry)

    async def pause(
        self,
        kind: Kind,
        key: str | None,
        *,
        until: datetime | timedelta | None,
        reason: str | None,
        actor: str | None = None,
    ) -> datetime | None:
        """Pause; see ``JobClient.pause``."""
        seconds = None
        if until is not None:
            given = until if isinstance(until, timedelta) else instant_of("until", until)
            now = await schedules.database_now(self._database)
            length = given if isinstance(given, timedelta) else given - now
            seconds = length.total_seconds()
            if not 0 < seconds <= LONGEST_DELAY:
                said = given if isinstance(given, timedelta) else given.isoformat()
                raise ValueError(f"until={said} must lie ahead, at most ten years")
            until = now + length
        if not isinstance(reason, str | None):
            raise TypeError(f"reason={shown(reason)} must be text, not {type(reason).__name__}")
        line = None if reason is None else printable(reason, _REASON_CHARACTERS)
        ends = None if until is None else until.isoformat()
        entry = _entry("pause", kind, key, actor, until=ends, reason=line)
        with operators_rights("pause", "UPDATE on jsworker.limits"):
            return await limits.pause(
                self._database,
                kind_name(kind),
                _key(key),
                seconds=seconds,
                paused_by=entry.actor or os_user(),
                reason=line,
                entry=entry,
            )

    async def resume(self, kind: Kind, key: str | None, *, actor: str | None = None) -> int:
        """Resume; see ``JobClient.resume``."""
        with operators_rights("resume", "UPDATE on jsworker.limits"):
            entry = _entry("resume", kind, key, actor)
            pauses = await limits.resume(self._database, kind_name(kind), _key(key), entry=entry)
            await self._wake(kind, key)
        return pauses

    async def _wake(self, kind: Kind, key: str | None) -> None:
        """Wake held jobs of a key that may begin now; if ``key`` is None, leave this to the workers."""
        if key is None:
            return
        with suppress(RowRefused):  # workers wake the other jobs and set the refused rows aside
            await admission.wake(self._database, worker_id=None, kind=kind_name(kind), keys=[_key(key)])


def _key(key: str | None) -> str:
    return "" if key is None else check_limit_key_of_row(key)


def _entry(action: str, kind: Kind, key: str | None, actor: str | None, **how: Any) -> AuditEntry:
    """Return the entry of an action, without details that are None or empty."""
    given = {name: value for name, value in how.items() if value}
    target = {"kind": kind_name(kind), **({} if key is None else {"key": key}), **given}
    return AuditEntry(action, target, actor=os_user() if actor is None else actor)
