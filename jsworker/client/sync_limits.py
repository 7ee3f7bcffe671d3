"""Limits, rates and pauses for code that waits."""

from datetime import datetime
from typing import Any

from jsworker.client.client_thread import ClientThread
from jsworker.client.enqueueing import Kind
from jsworker.core.limits import Limit, Rate
from jsworker.ownership.transitions.limits import Numbers


class SyncLimits:
    """The limits of an installation, as ``Limits``; the calls wait."""

    def __init__(self, thread: ClientThread) -> None:
        self._thread = thread

    def list(self, *, all_keys: bool = False) -> list[dict[str, Any]]:
        """See ``Limits.list``."""
        return self._thread.call(lambda client: client.limits.list(all_keys=all_keys))

    def set(
        self, kind: Kind, *numbers: Limit | Rate, key: str | None = None, actor: str | None = None
    ) -> None:
        """See ``Limits.set``."""
        self._thread.call(lambda client: client.limits.set(kind, *numbers, key=key, actor=actor))

    def numbers(self, kind: Kind, *, key: str | None = None) -> Numbers:
        """See ``Limits.numbers``."""
        return self._thread.call(lambda client: client.limits.numbers(kind, key=key))

    def reset(self, kind: Kind, *, key: str | None = None, actor: str | None = None) -> None:
        """See ``Limits.reset``."""
        self._thread.call(lambda client: client.limits.reset(kind, key=key, actor=actor))

    def pause(
        self,
        kind: Kind,
        key: str | None,
        *,
        until: datetime | None,
        reason: str | None,
        actor: str | None = None,
    ) -> datetime | None:
        """See ``JobClient.pause``."""
        return self._thread.call(
            lambda client: client.limits.pause(kind, key, until=until, reason=reason, actor=actor)
        )

    def resume(self, kind: Kind, key: str | None, *, actor: str | None = None) -> None:
        """See ``JobClient.resume``."""
        self._thread.call(lambda client: client.limits.resume(kind, key, actor=actor))
