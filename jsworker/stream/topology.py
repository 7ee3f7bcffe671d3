"""Creates the stream and its consumers; changes or refuses those that do not fit the protocol."""

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, Final, NamedTuple
from uuid import UUID

from nats.js.api import (
    AckPolicy,
    Base,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    DiscardPolicy,
    ReplayPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.priorities import HIGH, LOW, NORMAL
from jsworker.core.settings import Settings
from jsworker.stream.api import ApiRefused, ConsumerShape, JetStreamApi, NotThere, read_consumer
from jsworker.stream.login import while_unavailable
from jsworker.stream.message import LIMIT_BYTES, lane_of, overlap, subject_of

INSTALLATION: Final = "jsworker.installation"
"""Key in the stream's metadata: the id of the database that the stream belongs to."""

_SEPARATE: Final = "give this installation its own JSWORKER_STREAM and JSWORKER_SUBJECT_PREFIX"
_UNLIMITED: Final = -1
_MAX_WAITING: Final = 4096
_LEAST_WAITING: Final = 512

# The stream refuses messages that are too large or for which it has no room, keeps each message until it is
# acknowledged, and deletes none by age, number or size. Differences that the server cannot change are
# refused, others are changed.
_STREAM_FIXED: Final[dict[str, Any]] = {
    "retention": RetentionPolicy.WORK_QUEUE,
    "storage": StorageType.FILE,
    "mirror": None,
    "sealed": False,
    "persist_mode": None,
}
_STREAM_CHANGEABLE: Final[dict[str, Any]] = {
    "discard": DiscardPolicy.NEW,
    "discard_new_per_subject": False,
    "max_age": 0.0,
    "max_bytes": _UNLIMITED,
    "max_msgs": _UNLIMITED,
    "max_msgs_per_subject": _UNLIMITED,
    "max_msg_size": LIMIT_BYTES,
    "duplicate_window": 120.0,
    "no_ack": False,
    "subject_transform": None,
    "consumer_limits": None,  # a new consumer would take them over
}
_CONSUMER_FIXED: Final[dict[str, Any]] = {
    "deliver_policy": DeliverPolicy.ALL,
    "ack_policy": AckPolicy.EXPLICIT,
    "replay_policy": ReplayPolicy.INSTANT,
    "deliver_subject": None,
    "mem_storage": None,
}
_CONSUMER_CHANGEABLE: Final[dict[str, Any]] = {
    "filter_subjects": None,
    "backoff": None,  # a back-off would override ack_wait
    "max_deliver": _UNLIMITED,  # a message that reached a limit would never be delivered again
    "max_ack_pending": _UNLIMITED,
    "headers_only": None,
    "inactive_threshold": None,
    "rate_limit_bps": None,
    "priority_policy": None,  # requests that name no group are refused
    "priority_groups": None,
}
_PATIENCE_SECONDS: Final = (1.0, 2.0)  # then as long as for any request: a slow server must be able to answer
_SUBJECTS_OVERLAP: Final = 10065
_NAME_IN_USE: Final = 10058


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs from what the protocol needs."""

    setting: str
    actual: Any
    wanted: Any
    changeable: bool

    def __str__(self) -> str:
        return f"{self.setting}={shown(self.actual)}, must be {shown(self.wanted)}"


def shown(value: Any) -> str:
    """Return a setting as JetStream's own tools show it."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"[{', '.join(f'{name} {shown(each)}' for name, each in value.items())}]"
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def lane_subjects(settings: Settings) -> list[str]:
    """Return the subjects of high and low priority, for all kinds."""
    return [subject_of(settings.subject_prefix, "*", priority) for priority in (HIGH, LOW)]


def stream_config(settings: Settings, installation_id: UUID | None) -> StreamConfig:
    """Return the configuration of the stream that these settings ask for."""
    return StreamConfig(
        name=settings.stream,
        subjects=[subject_of(settings.subject_prefix, "*"), *lane_subjects(settings)],
        num_replicas=settings.stream_replicas,
        metadata={INSTALLATION: str(installation_id)} if installation_id else None,
        **_STREAM_FIXED,
        **_STREAM_CHANGEABLE,
    )


def consumer_config(settings: Settings, name: str, ack_wait: float) -> ConsumerConfig:
    """Return the configuration of a consumer of a kind, or of one priority of it; ``ack_wait`` in seconds."""
    return ConsumerShape(
        name=name,
        durable_name=name,
        filter_subject=subject_of(settings.subject_prefix, *lane_of(name)),
        ack_wait=ack_wait,
        max_waiting=_MAX_WAITING,
        **_CONSUMER_FIXED,
        **_CONSUMER_CHANGEABLE,
    )


def prefix_of(subject: Any, name: str) -> str | None:
    """Return the prefix of the subject that a consumer takes; None if it is none of its kind and priority."""
    behind = subject_of("", *lane_of(name))
    taken = str(subject)
    return taken.removesuffix(behind) if taken.endswith(behind) else None


def stream_differences(actual: StreamConfig, wanted: StreamConfig) -> list[Difference]:
    """Return the differences of a stream; more replicas or subjects than asked for are no difference."""
    found = _differences(actual, wanted, _STREAM_FIXED, _STREAM_CHANGEABLE)
    had, needed = actual.subjects or [], wanted.subjects or []
    if missing := [subject for subject in needed if subject not in had]:
        # JetStream refuses subjects of one stream that overlap: those of another prefix are kept.
        kept = [each for each in had if each in needed or not any(overlap(each, other) for other in missing)]
        found.append(Difference("subjects", actual.subjects, [*kept, *missing], changeable=True))
    if (actual.num_replicas or 1) < (wanted.num_replicas or 1):
        found.append(Difference("num_replicas", actual.num_replicas, wanted.num_replicas, changeable=True))
    return found


def consumer_differences(actual: ConsumerConfig, wanted: ConsumerConfig) -> list[Difference]:
    """Return the differences of a consumer."""
    changeable = ("filter_subject", "ack_wait", *_CONSUMER_CHANGEABLE)
    found = _differences(actual, wanted, _CONSUMER_FIXED, changeable)
    if (actual.max_waiting or _LEAST_WAITING) < _LEAST_WAITING:
        found.append(Difference("max_waiting", actual.max_waiting, wanted.max_waiting, changeable=False))
    return found


def _differences(
    actual: Any, wanted: Any, fixed: Collection[str], changeable: Collection[str]
) -> list[Difference]:
    compared = (
        Difference(name, _plain(getattr(actual, name)), getattr(wanted, name), changeable=name in changeable)
        for name in (*fixed, *changeable)
    )
    return [each for each in compared if not _same(each.actual, each.wanted)]


def _plain(value: Any) -> Any:
    """Return the settings that are set of one that has several; any other value as it is."""
    if not isinstance(value, Base):
        return value
    return {name: setting for name, setting in vars(value).items() if setting is not None}


def _same(has: Any, wants: Any) -> bool:
    if isinstance(has, float) and isinstance(wants, float):
        return math.isclose(has, wants, abs_tol=1e-6)  # nats-py cuts nanoseconds off
    return bool((has or None) == (wants or None))  # the server omits zero, false and empty settings


class EnsuredConsumer(NamedTuple):
    """What was found when a consumer was ensured.

    Attributes:
        had_prefix: the prefix of the subject that it had instead of its own; None if it had its own, or one
            that is of no prefix.
    """

    is_paused: bool
    had_prefix: str | None = None


class Topology:
    """Ensures that the stream and the consumers exist and fit; any number of workers may do so at once.

    Without an ``installation_id`` the stream's owner is neither claimed nor checked. Every change is emitted
    as ``stream.changed``. The stream of an older version gets the subjects of the priorities; ``has_lanes``
    is False if it cannot: this login may not change it, or another stream has these subjects, as
    ``lanes_refused`` says; this object does not ask for them again.
    """

    def __init__(self, api: JetStreamApi, *, installation_id: UUID | None, events: Events) -> None:
        self._api = api
        self._settings = api.settings
        self._installation_id = installation_id
        self._events = events
        self._stream = f"stream {api.name}"
        self._lanes = lane_subjects(api.settings)
        self.lanes_refused: str | None = None
        self.has_lanes = False
        self._checking: asyncio.Task[None] | None = None
        if installation_id is None:  # no check comes for which verdicts would wait
            api.connection.restored_callbacks.append(api.connection.send_verdicts)
        self._checked: int | None = None
        """How often the connection had been lost when the stream was found not to be another's."""
        self._refused: int | None = None
        """The same for when it was found to be another's."""

    @property
    def is_others(self) -> bool:
        """Whether the stream was found to be another installation's since the connection was made."""
        return self._refused == self._api.connection.losses

    @property
    def is_own(self) -> bool:
        """Whether the stream was found not to be another installation's since the connection was made."""
        return self._installation_id is None or self._checked == self._api.connection.losses

    async def check_installation(self) -> None:
        """Refuse another installation's stream; asks once after each loss of the connection, or refusal.

        The same address may lead to another NATS then. A stream that does not exist is no other
        installation's. Callers share one question, which goes on when one of them is cancelled, and ends with
        the connection. Raises StreamRefused or StreamUnavailable.
        """
        while not self.is_own:
            if self._checking is None or self._checking.done():
                self._checking = asyncio.create_task(self._check(), name="check installation")
                # Read also if all who waited have given up.
                self._checking.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await asyncio.shield(self._checking)

    async def _check(self) -> None:
        while not self.is_own:  # a connection may be lost again as the answer comes
            losses = self._api.connection.losses
            with suppress(NotThere):
                self._refuse_others((await self._ask_again()).config)
            self._note_own(losses)

    def _note_own(self, losses: int) -> None:
        self._checked, self._refused = losses, None
        if self.is_own:
            self._api.connection.send_verdicts()

    async def _ask_again(self) -> StreamInfo:
        """Return what JetStream says of the stream, asked again soon if it is silent.

        A cluster that elects the stream's leader may never answer a request. All who pull or publish wait.
        """
        for seconds in _PATIENCE_SECONDS:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    return await self._api.stream_info()
        return await self._api.stream_info()

    async def ensure(self, kinds: Iterable[str], ack_waits: Mapping[str, float], seconds: float) -> datetime:
        """Create or change the stream and the consumers, and return when the stream was created.

        Args:
            kinds: the names of the consumers: kinds, or names of one priority of a kind, by ``consumer_of``.
            ack_waits: seconds by name; for other names, the ``ack_wait`` of the settings.
            seconds: how long to try without an answer, for example while a cluster elects its leaders.

        Raises StreamUnavailable, or StreamRefused: the message names what cannot be changed.
        """
        async for attempt in while_unavailable(seconds):
            with attempt:
                losses = self._api.connection.losses
                info = await self._ensure_stream()
                self._note_own(losses)
                self.has_lanes = set(self._lanes) <= set(info.config.subjects or ())
                for kind in kinds:
                    await self.ensure_consumer(kind, ack_waits)
        return self._api.created(info)

    async def _ensure_stream(self) -> StreamInfo:
        wanted = stream_config(self._settings, self._installation_id)
        try:
            info = await self._api.stream_info()
        except NotThere:
            info = await self._create_stream(wanted)
        differences = self._check_stream(info.config, wanted)
        if not differences:
            return info
        try:
            info = await self._update_stream(info.config, wanted, differences)
        except ApiRefused as refused:
            asked = f"cannot be changed: {_list(differences)}"
            if self.lanes_refused is None and self._lacks_lanes_alone(info.config):
                await self._do_without_lanes(wanted, refused, asked)
                return await self._ensure_stream()
            raise await self._stream_refusal(wanted, refused, asked) from refused
        left = self._check_stream(info.config, wanted)
        was_unmarked = any(each.setting == "metadata" for each in differences)
        if was_unmarked and self._lacks_lanes_alone(info.config):  # no subjects are added before it is marked
            self._emit_changes(self._stream, differences)
            return await self._ensure_stream()
        if left:
            raise StreamRefused(f"{self._stream} cannot be changed: {_list(left)}")
        self._emit_changes(self._stream, differences)
        return info

    async def _update_stream(
        self, actual: StreamConfig, wanted: StreamConfig, differences: Iterable[Difference]
    ) -> StreamInfo:
        metadata = {**(actual.metadata or {}), **(wanted.metadata or {})}
        config = replace(actual, **{**_changes(differences), "metadata": metadata})
        changing = self._api.manager.update_stream(config)
        return await self._api.ask(f"STREAM.UPDATE.{wanted.name}", changing)

    def _lacks_lanes_alone(self, actual: StreamConfig) -> bool:
        had = set(actual.subjects or ())
        return subject_of(self._settings.subject_prefix, "*") in had and not set(self._lanes) <= had

    async def _create_stream(self, wanted: StreamConfig) -> StreamInfo:
        try:
            creating = self._api.manager.add_stream(wanted)
            info = await self._api.ask(f"STREAM.CREATE.{wanted.name}", creating)
        except ApiRefused as refused:
            if refused.code == _NAME_IN_USE:  # another worker, or another installation, was faster
                return await self._api.stream_info()
            if refused.code == _SUBJECTS_OVERLAP and self.lanes_refused is None:
                await self._do_without_lanes(wanted, refused, "cannot be made")
                return await self._create_stream(replace(wanted, subjects=(wanted.subjects or [])[:1]))
            raise await self._stream_refusal(wanted, refused, "cannot be made") from refused
        made = Difference("created", None, shown(info.created), changeable=True)
        self._emit_changes(self._stream, [made])
        return info

    def _check_stream(self, actual: StreamConfig, wanted: StreamConfig) -> list[Difference]:
        """Return the differences to change; refuse another installation's stream, and what cannot change."""
        self._refuse_others(actual)
        owner = (actual.metadata or {}).get(INSTALLATION)
        own = str(self._installation_id) if self._installation_id else owner
        differences = stream_differences(actual, wanted)
        if self._lacks_lanes_alone(actual) and (owner is None or self.lanes_refused is not None):
            differences = [each for each in differences if each.setting != "subjects"]
        fixed = [each for each in differences if not each.changeable]
        if owner is None:  # an unmarked stream may serve another application: leave its subjects
            fixed += [each for each in differences if each.setting == "subjects"]
        if fixed:
            raise StreamRefused(f"{self._stream} cannot be used: {_list(fixed)}")
        if owner != own:
            differences.append(Difference("metadata", actual.metadata, wanted.metadata, changeable=True))
        return differences

    def _refuse_others(self, actual: StreamConfig) -> None:
        owner, own = (actual.metadata or {}).get(INSTALLATION), self._installation_id
        if own is not None and owner not in {None, str(own)}:
            self._checked, self._refused = None, self._api.connection.losses
            raise StreamRefused(
                f"{self._stream} belongs to another installation: "
                f"its metadata has {INSTALLATION}={owner}, this database is {own}; {_SEPARATE}"
            )

    async def _do_without_lanes(self, wanted: StreamConfig, refused: ApiRefused, asked: str) -> None:
        self.lanes_refused = str(
            await self._stream_refusal(replace(wanted, subjects=self._lanes), refused, asked)
        )

    async def _stream_refusal(self, wanted: StreamConfig, refused: ApiRefused, asked: str) -> StreamRefused:
        """Return an error with the server's reason, or with the name of the stream whose subjects overlap."""
        if refused.code != _SUBJECTS_OVERLAP:
            return StreamRefused(f"{self._stream} {asked}; the server says: {refused.reason}")
        subjects = wanted.subjects or []
        found = await self._api.stream_with(subjects[0])
        other = f"stream {found}" if found else "another stream"
        return StreamRefused(
            f"{self._stream} cannot have subjects={shown(subjects)}: {other} overlaps; {_SEPARATE}"
        )

    async def ensure_consumer(
        self, kind: str, ack_waits: Mapping[str, float], *, shortens: bool = True
    ) -> EnsuredConsumer:
        """Create or change one consumer; raises as ``ensure`` does.

        ``shortens``: whether to shorten an ack_wait that is longer than asked for, which does no harm.
        """
        what = f"consumer {kind} of {self._stream}"
        wanted = consumer_config(self._settings, kind, ack_waits.get(kind, self._settings.ack_wait))
        info = await self._consumer(kind)
        if info is None:
            try:
                info = await self._put_consumer(wanted)
            except ApiRefused as refused:
                advice = "" if refused.code else f"; {_permitted_way(kind)}"
                raise StreamRefused(
                    f"{what} cannot be made for {wanted.filter_subject};"
                    f" the server says: {refused.reason}{advice}"
                ) from refused
        found = consumer_differences(info.config, wanted)
        differences = [each for each in found if shortens or _does_harm(each)]
        fixed = [each for each in differences if not each.changeable]
        if fixed:
            raise StreamRefused(f"{what} cannot be used: {_list(fixed)}; delete it, and it is made anew")
        if not differences:
            return EnsuredConsumer(bool(info.paused))
        names: dict[str, Any] = {"name": wanted.name, "durable_name": wanted.durable_name}
        reason = "it took the change and did not make it"
        try:
            await self._put_consumer(replace(info.config, **names, **_changes(differences)))
            # A server that was restarted answers the first change with what the consumer had before.
            info = await self._api.consumer_state(kind)
        except ApiRefused as refused:
            reason = refused.reason
        left = consumer_differences(info.config, wanted)
        self._refuse_harm(what, [each for each in left if _does_harm(each)], reason)
        changed = [each for each in differences if each not in left]
        self._emit_changes(what, changed)
        had = (prefix_of(each.actual, kind) for each in changed if each.setting == "filter_subject")
        return EnsuredConsumer(bool(info.paused), next(had, None))

    async def _consumer(self, name: str) -> ConsumerInfo | None:
        """Return a consumer's state, None if it does not exist; StreamUnavailable: it may be another's."""
        info = None
        with suppress(NotThere):
            info = await self._api.consumer_state(name)
        if not self.is_own:
            raise StreamUnavailable(f"{self._stream}: the connection to NATS was lost")
        return info

    def _refuse_harm(self, what: str, bad: list[Difference], reason: str) -> None:
        stale, scan = self._settings.stale_threshold, self._settings.scan_interval
        for difference in bad:
            if difference.setting == "ack_wait" and difference.actual <= stale + 2 * scan:
                raise StreamRefused(
                    f"{what} has ack_wait={shown(difference.actual)} s, must exceed "
                    f"JSWORKER_STALE_THRESHOLD={stale:g} + 2 × JSWORKER_SCAN_INTERVAL={scan:g}"
                )
        if bad:
            raise StreamRefused(f"{what} cannot be changed: {_list(bad)}; the server says: {reason}")

    async def _put_consumer(self, config: ConsumerConfig) -> ConsumerInfo:
        request = f"CONSUMER.CREATE.{self._api.name}.{config.name}.{config.filter_subject}"
        content = {"stream_name": self._api.name, "config": config.as_dict()}
        return await self._api.request(request, read_consumer, **content)

    def _emit_changes(self, what: str, made: Iterable[Difference]) -> None:
        for each in made:
            fields = {"what": what, "setting": each.setting, "was": each.actual, "is": each.wanted}
            self._events.emit("stream.changed", **fields)


def _permitted_way(consumer: str) -> str:
    kind, priority = lane_of(consumer)
    options = "" if priority == NORMAL else "--lanes "
    return f"run `jsworker stream ensure {options}{kind}` with a login that may make it"


def _list(differences: Iterable[Difference]) -> str:
    return "; ".join(map(str, differences))


def _does_harm(difference: Difference) -> bool:
    """Return whether a difference matters: a longer ack_wait than asked for does not."""
    return difference.setting != "ack_wait" or difference.actual < difference.wanted


def _changes(differences: Iterable[Difference]) -> dict[str, Any]:
    return {difference.setting: difference.wanted for difference in differences}
