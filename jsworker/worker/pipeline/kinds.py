"""The kinds of a worker: its processors, with the limits of their classes and of the settings."""

import asyncio
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar, get_args

from pydantic import TypeAdapter

from jsworker.client.terms import Terms, positive_seconds
from jsworker.core.contents import PLAIN, Contents
from jsworker.core.errors import InvalidTarget, SettingsError
from jsworker.core.limits import Limit, Rate, common_key, name_of_key
from jsworker.core.names import printable, shown
from jsworker.core.priorities import NORMAL, PRIORITIES, priority_number
from jsworker.core.processor import (
    Backoff,
    FromSettings,
    JobProcessor,
    Middleware,
    Unique,
    payload_type,
    return_type,
)
from jsworker.core.settings import Settings
from jsworker.core.settings.variables import LONGEST_SECONDS
from jsworker.core.targets import factory_of
from jsworker.ownership.transitions.claim import RunLimits
from jsworker.ownership.transitions.limits import Numbers
from jsworker.worker.pipeline import middleware as around

T = TypeVar("T")

_MOST = 1_000_000
_BACKOFF = ("first", "factor", "longest")
_LONGEST_CAUSE = 500
_LONG_SECONDS = 600.0  # from here on time-outs get no timer, which would slow short jobs by a tenth


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of job."""

    name: str
    processor: JobProcessor[Any]
    limits: RunLimits  # what a claim writes into the row
    progress_timeout: float | None
    concurrency: int  # job slots of this process that the kind may fill
    result_type: TypeAdapter[Any]
    is_async: bool  # process is a coroutine function; a plain one runs in a thread
    has_own_timeout: bool  # its class sets a time-out, or it has a progress time-out
    origin: str | None  # MODULE:NAME from which another process can make the processor
    priority: int = NORMAL  # of its jobs, where who enqueues them says nothing else
    middleware: tuple[Middleware, ...] = ()  # outermost first
    middleware_origins: tuple[str, ...] = ()  # as ``origin``, of what the worker was given
    conceals: bool = False  # errors of its runs are shown without words, which may quote what is encoded
    is_isolated: bool = False  # its jobs run in child processes, each of which has at most:
    max_jobs_per_process: int | None = None
    max_memory_bytes: int | None = None

    @property
    def needs_timers(self) -> bool:
        """Whether a run has a time limit that a look at all runs now and then would keep too late."""
        timeout = self.limits.timeout
        return self.progress_timeout is not None or (timeout is not None and timeout < _LONG_SECONDS)

    def limits_when_quiet(self, seconds: float) -> RunLimits:
        """Return limits that allow so many seconds more of silence; None stays None: no such limit."""
        if not seconds:
            return self.limits
        stale_after, crash_after = self.limits.stale_after, self.limits.crash_after
        return self.limits._replace(
            stale_after=None if stale_after is None else stale_after + seconds,
            crash_after=None if crash_after is None else crash_after + seconds,
        )


class AdmissionState:
    """The state of a kind by the table, shared by its lanes: are keys counted, rated, is the kind paused."""

    def __init__(self, kind: Kind) -> None:
        self.is_limited = kind.processor.limit is not None or kind.processor.rate is not None
        self.is_counted = False  # whether runs that were claimed without admission are counted, too
        self.plain_claims = 0  # the number of claims under way without admission
        self.is_rated = kind.processor.rate is not None
        self.is_paused = False
        self.admitting = asyncio.Lock()
        self.freed_meanwhile: set[str] = set()  # keys that became free while claims were undecided


def flushes_of(kinds: Mapping[str, Kind]) -> list[Callable[[float], object]]:
    """Return the ``flush`` of each middleware that has one; it gets the seconds that it may take."""
    once = {id(each): each for kind in kinds.values() for each in kind.middleware}
    return [each.flush for each in once.values() if hasattr(each, "flush")]


def resolve_kinds(
    processors: Sequence[JobProcessor[Any] | type[JobProcessor[Any]]],
    settings: Settings,
    middleware: Sequence[Middleware] = (),
    contents: Contents = PLAIN,
) -> dict[str, Kind]:
    """Return the kinds by name, with ``middleware`` around all of them.

    With a codec of ``contents``, the messages of their errors are neither stored nor shown.

    Raises:
        InvalidTarget: there is no processor, or one that cannot be used, or middleware is no such.
        SettingsError: a class attribute is no sensible limit.
    """
    kinds: dict[str, Kind] = {}
    given_middleware = around.checked(middleware, "the worker")
    of_all = (*around.of_settings(settings), *given_middleware)
    origins = [_importable_name(each) for each in given_middleware]
    if isinstance(processors, type | JobProcessor):
        one = processors if isinstance(processors, type) else type(processors)
        raise InvalidTarget(f"processors must be a list, even of one: [{one.__qualname__}]")
    for given in processors:
        processor = _make(given) if isinstance(given, type) else given
        if not isinstance(processor, JobProcessor):
            raise InvalidTarget(f"{given!r} is no JobProcessor")
        if (other := kinds.get(processor.kind)) is not None:
            if type(other.processor) is type(processor):
                twice = around.name_of(type(processor))
                raise InvalidTarget(f"kind {processor.kind}: its processor {twice} is given twice")
            two = f"{around.name_of(type(other.processor))} and {around.name_of(type(processor))}"
            raise InvalidTarget(
                f"kind {processor.kind} has two processors, {two}: give one of them another `kind`"
            )
        _check_class(processor)
        whose = f"kind {processor.kind} ({type(processor).__qualname__})"
        kinds[processor.kind] = replace(
            _resolve(processor, settings),
            origin=None if None in origins else _origin_of(given),
            middleware=(*of_all, *around.checked(processor.middleware, whose)),
            middleware_origins=tuple(filter(None, origins)),
            conceals=contents.codec is not None,
        )
    if not kinds:
        raise InvalidTarget("a worker needs at least one processor")
    return kinds


def without_timeout(kinds: dict[str, Kind]) -> list[str]:
    """Return the kinds without a time limit of their own, which have at most JSWORKER_JOB_TIMEOUT."""
    return sorted(name for name, kind in kinds.items() if not kind.has_own_timeout)


def numbers_of(kind: Kind) -> Numbers | None:
    """Return the limit and the rate of a kind's class; None: it has neither."""
    limit, rate = kind.processor.limit, kind.processor.rate
    if limit is None and rate is None:
        return None
    most = None if limit is None else limit.max_running
    return Numbers(most) if rate is None else Numbers(most, rate.number, float(rate.per))


def declared_limits(kinds: dict[str, Kind]) -> dict[str, dict[str, Any]]:
    """Return the limits of classes by kind, for a comparison of workers; without kinds that have none."""
    declared: dict[str, dict[str, Any]] = {}
    for name, kind in kinds.items():
        if numbers := numbers_of(kind):
            key = common_key(kind.processor.limit, kind.processor.rate)
            declared[name] = numbers._asdict() | {"key": None if key is None else name_of_key(key)}
    return declared


def shown_settings(kinds: dict[str, Kind]) -> dict[str, dict[str, Any]]:
    """Return the settings of runs by kind, as operators see them; times in seconds."""
    return {
        name: {
            "max_attempts": kind.limits.max_attempts,
            "max_stalls": kind.limits.max_stalls,
            "backoff": {part: float(getattr(kind.processor.backoff, part)) for part in _BACKOFF},
            "timeout": kind.limits.timeout,
            "progress_timeout": kind.progress_timeout,
            "stale_threshold": kind.limits.stale_after,
            "concurrency": kind.concurrency,
            "priority": kind.processor.priority,
            "isolation": kind.processor.isolation,
            "max_jobs_per_process": kind.max_jobs_per_process,
            "max_memory_mb": kind.processor.max_memory_mb,
        }
        for name, kind in kinds.items()
    }


def check_isolated(kinds: Iterable[Kind], contents: Contents) -> None:
    """Raise InvalidTarget for an isolated kind whose processor or codec another process cannot create."""
    for kind in kinds:
        if not kind.is_isolated:
            continue
        rule = ""
        if kind.origin is None:
            needed = "a class, or an instance, that can be imported: MODULE:NAME"
            rule = f"isolation='process' needs {needed}, and middleware of the worker, too"
        elif not contents.is_of_settings:
            rule = "isolation='process' needs a codec that another process can make: JSWORKER_CODEC"
        if rule:
            raise InvalidTarget(f"kind {kind.name} ({around.name_of(type(kind.processor))}): {rule}")


def processor_at(origin: str) -> JobProcessor[Any]:
    """Create the processor of an origin in this process."""
    found = named_at(origin.removesuffix("()"))
    processor: JobProcessor[Any] = found() if isinstance(found, type) or origin.endswith("()") else found
    return processor


def named_at(origin: str) -> Any:
    """Return the object with this name in its module."""
    module, _, name = origin.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _importable_name(given: Any) -> str | None:
    """Return ``MODULE:NAME`` of a function or class, or of an object in its class's module; else None."""
    named = given if hasattr(given, "__qualname__") else type(given)
    module = sys.modules.get(named.__module__)
    if module is None or named.__module__ == "__main__":
        return None
    name = named.__qualname__
    if named is not given:
        name = next((key for key, each in vars(module).items() if each is given), "")
    with suppress(AttributeError):
        if attrgetter(name)(module) is given:
            return f"{named.__module__}:{name}"
    return None


def _origin_of(given: JobProcessor[Any] | type[JobProcessor[Any]]) -> str | None:
    """Return ``MODULE:NAME`` by which another process can create this processor; None if that is not certain.

    An instance must be an attribute of its class's module, or its class must take no arguments: with
    arguments a new instance might differ from this one.
    """
    if isinstance(given, type):
        return _importable_name(given)
    name = factory_of(given) or _importable_name(given)
    if name is None and not inspect.signature(type(given)).parameters:
        return _importable_name(type(given))
    return name


def _make(cls: type[JobProcessor[Any]]) -> JobProcessor[Any]:
    try:
        return cls()
    except Exception as error:
        raise InvalidTarget(f"target {around.name_of(cls)} cannot be made: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(str(error), _LONGEST_CAUSE)}"


def _is_count(value: Any) -> bool:
    return isinstance(value, FromSettings) or (type(value) is int and 1 <= value <= _MOST)


def _is_time_limit(value: Any) -> bool:
    left_open = value is None or isinstance(value, FromSettings)
    return left_open or (type(value) in {int, float} and 0 < value <= LONGEST_SECONDS)


def _is_duration(value: Any) -> bool:
    try:
        return positive_seconds("", value) > 0
    except (TypeError, ValueError):
        return False


_COUNT = f"a whole number from 1 to {_MOST}"
_SECONDS = f"None or a number of seconds greater than 0 and at most {LONGEST_SECONDS}"
_DURATION = "None, a number of seconds or a timedelta, more than 0 and at most ten years"
_PARAMETERS_OF_HOOKS: dict[str, tuple[str, ...]] = {
    "setup": (),
    "teardown": (),
    "on_failed": ("job", "error"),
    "on_lost": ("job",),
}
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_attempts": (_is_count, _COUNT),
    "max_stalls": (_is_count, _COUNT),
    "max_snoozes": (lambda value: type(value) is int and _is_count(value), _COUNT),
    "concurrency": (lambda value: value is None or _is_count(value), _COUNT),
    "timeout": (_is_time_limit, _SECONDS),
    "progress_timeout": (_is_time_limit, _SECONDS),
    "isolation": (lambda value: value in (None, "process"), "None or 'process'"),
    "max_jobs_per_process": (
        lambda value: value is None or (type(value) is int and _is_count(value)),
        f"None or {_COUNT}",
    ),
    "max_memory_mb": (
        lambda value: value is None or (type(value) in {int, float} and 0 < value <= _MOST),
        f"None or megabytes, more than 0 and at most {_MOST}",
    ),
    "limit": (lambda value: value is None or isinstance(value, Limit), "a Limit, for example Limit(2)"),
    "rate": (lambda value: value is None or isinstance(value, Rate), "a Rate, for example Rate(50, per=60)"),
    "unique": (lambda value: value in get_args(Unique), "'live' or 'waiting'"),
    **dict.fromkeys(
        ("unique_for", "debounce", "debounce_max", "expires_in"),
        (lambda value: value is None or _is_duration(value), _DURATION),
    ),
    "backoff": (lambda value: isinstance(value, Backoff), "a Backoff, for example Backoff(first=5.0)"),
    "priority": (
        lambda value: isinstance(value, str) and value in PRIORITIES,
        f"one of {', '.join(PRIORITIES)}",
    ),
}


def _check_class(processor: JobProcessor[Any]) -> None:
    """Raise an error now for attributes that would make each job fail."""
    name = type(processor).__qualname__
    for attribute, (fits, rule) in _RULES.items():
        if not fits(value := getattr(processor, attribute)):
            of_kind = f"of kind {processor.kind} ({name})"
            raise SettingsError(f"{attribute}={shown(value)} {of_kind} must be {rule}")
    try:
        common_key(processor.limit, processor.rate)
        Terms().of(type(processor), keyed=True).check(0.0)
    except ValueError as error:  # two attributes contradict each other
        raise SettingsError(f"kind {processor.kind} ({name}): {error}") from None
    for attribute in ("max_jobs_per_process", "max_memory_mb"):
        if processor.isolation is None and (value := getattr(processor, attribute)) is not None:
            of_kind = f"of kind {processor.kind} ({name})"
            raise SettingsError(f"{attribute}={shown(value)} {of_kind} needs isolation='process'")
    process = f"{name}.process"
    around.check_signature(
        processor.process,
        ("job",),
        f"{process} must take the job alone, as process(self, job)",
        f"{process} is a generator: it must return its result, not yield",
    )
    _check_hooks(processor, name)
    payload_type(type(processor))  # raises InvalidTarget if it cannot be used


def _check_hooks(processor: JobProcessor[Any], name: str) -> None:
    """Refuse a hook that cannot be called; the first job that fails for good would be the first to tell."""
    for hook, parameters in _PARAMETERS_OF_HOOKS.items():
        rule = f"{name}.{hook} must be async def {hook}({', '.join(('self', *parameters))})"
        around.check_signature(getattr(processor, hook), parameters, rule, f"{rule}, and not yield")


async def call_hook(hook: Callable[..., Any], *arguments: Any) -> None:
    """Call a hook of a processor; TypeError: it is a plain function."""
    called = hook(*arguments)
    if not inspect.isawaitable(called):  # a plain function may return a coroutine
        raise TypeError(f"{around.name_of(hook)} must be async def")
    await called


def _resolve(processor: JobProcessor[Any], settings: Settings) -> Kind:
    progress_timeout = _choose(processor.progress_timeout, settings.progress_timeout)
    # A decorator may wrap a coroutine function in a plain one that returns its coroutine, or the reverse.
    functions = processor.process, inspect.unwrap(processor.process)
    is_isolated = processor.isolation is not None
    slots = min(settings.concurrency, settings.isolated_processes) if is_isolated else settings.concurrency
    memory = processor.max_memory_mb
    return Kind(
        name=processor.kind,
        processor=processor,
        limits=RunLimits(
            stale_after=_choose(processor.stale_threshold, settings.stale_threshold),
            crash_after=settings.crash_threshold,
            timeout=_choose(processor.timeout, settings.job_timeout),
            max_attempts=_choose(processor.max_attempts, settings.max_attempts),
            max_stalls=_choose(processor.max_stalls, settings.max_stalls),
        ),
        progress_timeout=progress_timeout,
        concurrency=min(processor.concurrency or slots, slots),
        result_type=return_type(type(processor)),
        is_async=any(inspect.iscoroutinefunction(each) for each in functions),
        has_own_timeout=isinstance(processor.timeout, int | float) or progress_timeout is not None,
        origin=None,
        priority=priority_number(processor.priority),
        is_isolated=is_isolated,
        max_jobs_per_process=processor.max_jobs_per_process,
        max_memory_bytes=None if memory is None else round(memory * 1_000_000),
    )


def _choose(own: T | FromSettings, default: T) -> T:
    return default if isinstance(own, FromSettings) else own
