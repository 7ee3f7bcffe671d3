"""The kinds a worker works on: processors, with the limits that their classes leave to the settings."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jsworker.errors import InvalidTarget, SettingsError
from jsworker.names import printable
from jsworker.ownership.claim import Limits
from jsworker.processor import FromSettings, JobProcessor
from jsworker.runtime.quarantine.origin import origin_of
from jsworker.settings import Settings
from jsworker.settings.variables import LONGEST_SECONDS, as_given

T = TypeVar("T")

_MOST = 1_000_000
_LONGEST_CAUSE = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job.

    Attributes:
        name: the kind.
        processor: does its jobs.
        limits: what a claim writes into the row.
        progress_timeout: seconds without a sign of life from the job itself; None: no limit.
        concurrency: job slots of this process that the kind may fill.
        is_async: whether ``process`` is a coroutine function; a plain one runs in a thread.
        origin: ``MODULE:NAME`` from which another process can make the processor; None: it cannot.
    """

    name: str
    processor: JobProcessor[Any]
    limits: Limits
    progress_timeout: float | None
    concurrency: int
    is_async: bool
    origin: str | None

    @property
    def is_limited(self) -> bool:
        """Whether a run of this kind has any time limit."""
        return self.limits.timeout is not None or self.progress_timeout is not None

    @property
    def timeout(self) -> float | None:
        """Seconds that one run may take; None: no limit."""
        return self.limits.timeout


def resolve_kinds(
    processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]], settings: Settings
) -> dict[str, Kind]:
    """Return the kinds by name.

    Raises:
        InvalidTarget: no processor, something that is none or cannot be made, or two of one kind.
        SettingsError: a class attribute is no sensible limit.
    """
    kinds: dict[str, Kind] = {}
    for given in processors:
        processor = _make(given) if isinstance(given, type) else given
        if not isinstance(processor, JobProcessor):
            raise InvalidTarget(f"{given!r} is no JobProcessor")
        if processor.kind in kinds:
            raise InvalidTarget(f"kind {processor.kind} has two processors; give one of them another `kind`")
        _check_limits(processor)
        kinds[processor.kind] = _resolve(processor, settings, origin_of(given))
    if not kinds:
        raise InvalidTarget("a worker needs at least one processor")
    return kinds


def stale_thresholds(kinds: dict[str, Kind]) -> dict[str, float | None]:
    """Return the stale threshold of each kind in seconds, for the timing rules."""
    return {name: kind.limits.stale_after for name, kind in kinds.items()}


def _make(cls: type[JobProcessor[Any]]) -> JobProcessor[Any]:
    try:
        return cls()
    except Exception as error:
        cause = f"{type(error).__name__}: {printable(str(error), _LONGEST_CAUSE)}"
        name = f"{cls.__module__}:{cls.__qualname__}"
        raise InvalidTarget(f"target {name} cannot be made: {cause}") from error


def _check_limits(processor: JobProcessor[Any]) -> None:
    for name in ("max_attempts", "max_stalls", "concurrency"):
        value = getattr(processor, name)
        left_open = isinstance(value, FromSettings) or (name == "concurrency" and value is None)
        if not left_open and not (type(value) is int and 1 <= value <= _MOST):
            raise SettingsError(
                f"{name}={as_given(value)} of kind {processor.kind} must be a whole number from 1 to {_MOST}"
            )
    for name in ("timeout", "progress_timeout"):
        value = getattr(processor, name)
        left_open = isinstance(value, FromSettings) or value is None
        if not left_open and not (type(value) in {int, float} and 0 < value <= LONGEST_SECONDS):
            raise SettingsError(
                f"{name}={as_given(value)} of kind {processor.kind} must be None or a number of seconds "
                f"greater than 0 and at most {LONGEST_SECONDS}"
            )


def _resolve(processor: JobProcessor[Any], settings: Settings, origin: str | None) -> Kind:
    stale_after = _choose(processor.stale_threshold, settings.stale_threshold)
    limits = Limits(
        stale_after=stale_after,
        crash_after=settings.crash_threshold,
        timeout=_choose(processor.timeout, settings.job_timeout),
        max_attempts=_choose(processor.max_attempts, settings.max_attempts),
        max_stalls=_choose(processor.max_stalls, settings.max_stalls),
    )
    return Kind(
        name=processor.kind,
        processor=processor,
        limits=limits,
        progress_timeout=_choose(processor.progress_timeout, settings.progress_timeout),
        concurrency=min(processor.concurrency or settings.concurrency, settings.concurrency),
        is_async=_is_async(processor.process),
        origin=origin,
    )


def _choose(own: T | FromSettings, default: T) -> T:
    return default if isinstance(own, FromSettings) else own


def _is_async(process: Callable[..., Any]) -> bool:
    # A decorator may wrap a coroutine function in a plain one that returns its coroutine, or the reverse.
    return inspect.iscoroutinefunction(process) or inspect.iscoroutinefunction(inspect.unwrap(process))
