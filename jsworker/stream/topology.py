"""Stream and consumers: made when missing, compared with what the protocol needs, changed or refused."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from nats.js.api import ConsumerConfig, ConsumerInfo, StreamConfig, StreamInfo
from tenacity import AsyncRetrying, retry_if_exception_type, stop_before_delay, wait_random_exponential

from jsworker.core.errors import StreamRefused, StreamUnavailable
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.stream.api import JetStreamApi
from jsworker.stream.faults import ApiRefused, NotThere
from jsworker.stream.shape import (
    INSTALLATION,
    Difference,
    consumer_config,
    consumer_differences,
    shown,
    stream_config,
    stream_differences,
)

_SUBJECTS_OVERLAP: Final = 10065
_NAME_IN_USE: Final = 10058


class Topology:
    """Sees to it that the stream and the consumers are there and as they must be.

    Any number of workers may do so at once: all of them want the same.

    Args:
        api: JetStream's requests about the stream.
        settings: its name, subjects and replicas.
        installation_id: id of the database that the stream belongs to; None neither claims nor checks it.
        events: told ``stream.changed`` when the stream was made or anything was changed.
    """

    def __init__(
        self, api: JetStreamApi, settings: Settings, *, installation_id: UUID | None, events: Events
    ) -> None:
        self._api = api
        self._settings = settings
        self._installation_id = installation_id
        self._events = events
        self._stream = f"stream {settings.stream}"

    async def ensure(
        self,
        kinds: Iterable[str],
        ack_waits: Mapping[str, float],
        seconds: float,
        *,
        shortens: bool = True,
    ) -> datetime:
        """Make, compare and change; returns when the stream was created.

        Args:
            kinds: those that need a consumer.
            ack_waits: seconds by kind; the settings' own for others.
            seconds: how long to try while nobody answers, as in a cluster that elects its leaders.
            shortens: whether a longer ack_wait than asked for, which does no harm, is made shorter.

        Raises:
            StreamRefused: something is not as it must be and cannot be changed; the line says what.
            StreamUnavailable: nobody answered.
        """
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(StreamUnavailable),
            wait=wait_random_exponential(multiplier=0.1, max=1.0),
            stop=stop_before_delay(seconds),
            reraise=True,
        ):
            with attempt:
                info = await self._ensure_stream()
                for kind in kinds:
                    ack_wait = ack_waits.get(kind, self._settings.ack_wait)
                    await self._ensure_consumer(kind, ack_wait, shortens=shortens)
        if info.created is None:
            raise StreamRefused(f"{self._stream}: the server does not say when it was created")
        return info.created

    async def _ensure_stream(self) -> StreamInfo:
        wanted = stream_config(self._settings, self._installation_id)
        try:
            info = await self._api.stream_info()
        except NotThere:
            info = await self._create_stream(wanted)
        differences = self._check_stream(info.config, wanted)
        return await self._change_stream(info, wanted, differences) if differences else info

    async def _create_stream(self, wanted: StreamConfig) -> StreamInfo:
        try:
            info = await self._api.create_stream(wanted)
        except ApiRefused as refused:
            if refused.code == _NAME_IN_USE:  # another worker, or another installation, was faster
                return await self._api.stream_info()
            raise await self._stream_refusal(wanted, refused, "cannot be made") from refused
        self._tell(self._stream, "created", None, shown(info.created))
        return info

    def _check_stream(self, actual: StreamConfig, wanted: StreamConfig) -> list[Difference]:
        """Return what must be changed, the metadata of a stream that nobody has claimed among it.

        Raises:
            StreamRefused: the stream is somebody else's, or of another shape that cannot be changed.
        """
        owner = (actual.metadata or {}).get(INSTALLATION)
        own = str(self._installation_id) if self._installation_id else owner
        if owner is not None and owner != own:
            raise StreamRefused(
                f"{self._stream} belongs to another installation: "
                f"its metadata has {INSTALLATION}={owner}, this database is {own}"
            )
        differences = stream_differences(actual, wanted)
        fixed = [each for each in differences if not each.changeable]
        if owner is None:  # subjects of a stream that may be a stranger's are not ours to change
            fixed += [each for each in differences if each.setting == "subjects"]
        if fixed:
            raise StreamRefused(f"{self._stream} cannot be used: {_list(fixed)}")
        if owner != own:
            differences.append(Difference("metadata", actual.metadata, wanted.metadata, changeable=True))
        return differences

    async def _change_stream(
        self, info: StreamInfo, wanted: StreamConfig, differences: list[Difference]
    ) -> StreamInfo:
        metadata = {**(info.config.metadata or {}), **(wanted.metadata or {})}
        config = replace(info.config, **{**_changes(differences), "metadata": metadata})
        try:
            changed = await self._api.update_stream(config)
        except ApiRefused as refused:
            asked = f"cannot be changed: {_list(differences)}"
            raise await self._stream_refusal(wanted, refused, asked) from refused
        left = self._check_stream(changed.config, wanted)
        if left:
            raise StreamRefused(f"{self._stream} cannot be changed: {_list(left)}")
        for difference in differences:
            self._tell(self._stream, difference.setting, difference.actual, difference.wanted)
        return changed

    async def _stream_refusal(self, wanted: StreamConfig, refused: ApiRefused, asked: str) -> StreamRefused:
        """Say what the server refused, and which stream is in the way."""
        if refused.code != _SUBJECTS_OVERLAP:
            return StreamRefused(f"{self._stream} {asked}; the server says: {refused.reason}")
        subjects = wanted.subjects or []
        try:
            other = f"stream {await self._api.stream_of(subjects[0])}"
        except (StreamRefused, StreamUnavailable):  # not permitted to ask
            other = "another stream"
        return StreamRefused(f"{self._stream} cannot have subjects={shown(subjects)}: {other} overlaps")

    async def _ensure_consumer(self, kind: str, ack_wait: float, *, shortens: bool) -> None:
        wanted = consumer_config(self._settings, kind, ack_wait)
        try:
            info = await self._api.consumer_info(kind)
        except NotThere:
            info = await self._create_consumer(wanted)
        found = consumer_differences(info.config, wanted)
        differences = [each for each in found if shortens or _does_harm(each)]
        fixed = [each for each in differences if not each.changeable]
        if fixed:
            raise StreamRefused(
                f"{self._consumer(kind)} cannot be used: {_list(fixed)}; delete it, and it is made anew"
            )
        if differences:
            await self._change_consumer(info, wanted, differences)

    async def _create_consumer(self, wanted: ConsumerConfig) -> ConsumerInfo:
        try:
            return await self._api.put_consumer(wanted)
        except ApiRefused as refused:
            raise StreamRefused(
                f"{self._consumer(wanted.name)} cannot be made for {wanted.filter_subject}; "
                f"the server says: {refused.reason}"
            ) from refused

    async def _change_consumer(
        self, info: ConsumerInfo, wanted: ConsumerConfig, differences: list[Difference]
    ) -> None:
        config = replace(
            info.config, name=wanted.name, durable_name=wanted.durable_name, **_changes(differences)
        )
        reason = "it took the change and did not make it"
        try:
            info = await self._api.put_consumer(config)
        except ApiRefused as refused:
            reason = refused.reason
        left = consumer_differences(info.config, wanted)
        self._check_consumer(wanted, left, reason)
        for difference in differences:
            if difference not in left:
                self._tell(
                    self._consumer(wanted.name), difference.setting, difference.actual, difference.wanted
                )

    def _check_consumer(self, wanted: ConsumerConfig, left: list[Difference], reason: str) -> None:
        """Refuse what could not be changed and does harm."""
        stale, scan = self._settings.stale_threshold, self._settings.scan_interval
        bad = [each for each in left if _does_harm(each)]
        for difference in bad:
            if difference.setting == "ack_wait" and difference.actual <= stale + 2 * scan:
                raise StreamRefused(
                    f"{self._consumer(wanted.name)} has ack_wait={shown(difference.actual)} s, must exceed "
                    f"JSWORKER_STALE_THRESHOLD={stale:g} + 2 × JSWORKER_SCAN_INTERVAL={scan:g}"
                )
        if bad:
            raise StreamRefused(
                f"{self._consumer(wanted.name)} cannot be changed: {_list(bad)}; the server says: {reason}"
            )

    def _consumer(self, kind: str | None) -> str:
        return f"consumer {kind} of {self._stream}"

    def _tell(self, what: str, setting: str, was: Any, now: Any) -> None:
        fields = {"what": what, "setting": setting, "was": was, "is": now}
        self._events.emit("stream.changed", **fields)


def _list(differences: Iterable[Difference]) -> str:
    return "; ".join(map(str, differences))


def _does_harm(difference: Difference) -> bool:
    """Tell whether a consumer cannot be left so: a longer ack_wait than asked for can."""
    return difference.setting != "ack_wait" or difference.actual < difference.wanted


def _changes(differences: Iterable[Difference]) -> dict[str, Any]:
    return {difference.setting: difference.wanted for difference in differences}
