"""The shape that stream and consumers must have, and how an actual one differs from it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final
from uuid import UUID

from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    ReplayPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from jsworker.core.settings import Settings
from jsworker.stream.wire import LIMIT_BYTES, subject_of

INSTALLATION: Final = "jsworker.installation"
"""Key in the stream's metadata: the id of the database that the stream belongs to."""

_DUPLICATE_SECONDS: Final = 120.0
_UNLIMITED: Final = -1
_MAX_WAITING: Final = 4096
_LEAST_WAITING: Final = 512

# A stream that refuses what does not fit, keeps a message until it is acknowledged, and forgets none by age,
# number or size. What the server cannot change is refused, the rest is changed.
_STREAM_FIXED: Final = ("retention", "storage", "mirror", "sealed", "persist_mode")
_STREAM_CHANGEABLE: Final = (
    "discard",
    "discard_new_per_subject",
    "max_age",
    "max_bytes",
    "max_msgs",
    "max_msgs_per_subject",
    "max_msg_size",
    "duplicate_window",
    "no_ack",
    "subject_transform",
)
_CONSUMER_FIXED: Final = ("deliver_policy", "ack_policy", "replay_policy", "deliver_subject", "mem_storage")
_CONSUMER_CHANGEABLE: Final = (
    "filter_subject",
    "filter_subjects",
    "ack_wait",
    "backoff",
    "max_deliver",
    "max_ack_pending",
    "headers_only",
    "inactive_threshold",
    "rate_limit_bps",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not as it must be."""

    setting: str
    actual: Any
    wanted: Any
    changeable: bool

    def __str__(self) -> str:
        return f"{self.setting}={shown(self.actual)}, must be {shown(self.wanted)}"


def shown(value: Any) -> str:
    """Return a setting of JetStream as its own tools show it."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, Enum):
        return str(value.value)
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


def stream_config(settings: Settings, installation_id: UUID | None) -> StreamConfig:
    """Return the stream that these settings ask for."""
    return StreamConfig(
        name=settings.stream,
        subjects=[subject_of(settings.subject_prefix, "*")],
        retention=RetentionPolicy.WORK_QUEUE,
        storage=StorageType.FILE,
        num_replicas=settings.stream_replicas,
        discard=DiscardPolicy.NEW,
        max_age=0.0,
        max_bytes=_UNLIMITED,
        max_msgs=_UNLIMITED,
        max_msgs_per_subject=_UNLIMITED,
        max_msg_size=LIMIT_BYTES,
        duplicate_window=_DUPLICATE_SECONDS,
        metadata={INSTALLATION: str(installation_id)} if installation_id else None,
    )


def consumer_config(settings: Settings, kind: str, ack_wait: float) -> ConsumerConfig:
    """Return the consumer of a kind; ``ack_wait`` in seconds."""
    return ConsumerConfig(
        name=kind,
        durable_name=kind,
        filter_subject=subject_of(settings.subject_prefix, kind),
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        replay_policy=ReplayPolicy.INSTANT,
        ack_wait=ack_wait,
        max_deliver=_UNLIMITED,  # a limit strands messages for ever
        max_ack_pending=_UNLIMITED,
        max_waiting=_MAX_WAITING,
    )


def stream_differences(actual: StreamConfig, wanted: StreamConfig) -> list[Difference]:
    """Compare a stream. More replicas or subjects than asked for do no harm and are left alone."""
    differences = list(_compare(actual, wanted, _STREAM_FIXED, changeable=False))
    differences += _compare(actual, wanted, _STREAM_CHANGEABLE, changeable=True)
    missing = [subject for subject in wanted.subjects or [] if subject not in (actual.subjects or [])]
    if missing:
        subjects = [*(actual.subjects or []), *missing]
        differences.append(Difference("subjects", actual.subjects, subjects, changeable=True))
    if (actual.num_replicas or 1) < (wanted.num_replicas or 1):
        replicas = Difference("num_replicas", actual.num_replicas, wanted.num_replicas, changeable=True)
        differences.append(replicas)
    return differences


def consumer_differences(actual: ConsumerConfig, wanted: ConsumerConfig) -> list[Difference]:
    """Compare a consumer."""
    differences = list(_compare(actual, wanted, _CONSUMER_FIXED, changeable=False))
    differences += _compare(actual, wanted, _CONSUMER_CHANGEABLE, changeable=True)
    if (actual.max_waiting or _LEAST_WAITING) < _LEAST_WAITING:
        waiting = Difference("max_waiting", actual.max_waiting, wanted.max_waiting, changeable=False)
        differences.append(waiting)
    return differences


def _compare(
    actual: Any, wanted: Any, settings: tuple[str, ...], *, changeable: bool
) -> Iterator[Difference]:
    for setting in settings:
        has, wants = getattr(actual, setting), getattr(wanted, setting)
        if not _same(has, wants):
            yield Difference(setting, has, wants, changeable)


def _same(has: Any, wants: Any) -> bool:
    if isinstance(has, float) and isinstance(wants, float):
        return math.isclose(has, wants, abs_tol=1e-6)  # nats-py cuts nanoseconds off
    return bool((has or None) == (wants or None))  # the server leaves out what is zero, false or empty
