"""The base class of processors; each processor does the jobs of one kind."""

import json
import math
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import SimpleNamespace
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic.errors import PydanticErrorMixin
from typing_extensions import TypeVar

from jsworker.core import round_trip, strict_json
from jsworker.core.clock import jittered
from jsworker.core.errors import InvalidJson, InvalidPayload, InvalidTarget
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import check_kind, kebab_case, printable, shown
from jsworker.core.priorities import Priority
from jsworker.core.schedule_rules import Schedule

P = TypeVar("P", default=dict[str, Any])
Payload = TypeVar("Payload")
Returned = TypeVar("Returned")
_Returned_co = TypeVar("_Returned_co", covariant=True)
Seconds: TypeAlias = float | timedelta
"""A duration, in seconds or as a timedelta."""
Unique: TypeAlias = Literal["live", "waiting"]
_LONGEST_CAUSE: Final = 500
_WITHOUT_SCHEMA: Final = re.compile(r"Unable to generate pydantic-core schema for (.+?)\. Set `", re.DOTALL)
Middleware: TypeAlias = Callable[[Job[Any], "JobProcessor[Any]"], AbstractAsyncContextManager[Any]]
"""Called for each run with job and processor; ``process`` runs inside the returned context manager."""


class FromSettings(Enum):
    """The type of ``FROM_SETTINGS``: a class attribute that leaves the choice to the settings."""

    FROM_SETTINGS = "from settings"


FROM_SETTINGS: Final = FromSettings.FROM_SETTINGS


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting times between attempts: ``first × factor^(attempt−1)``, at most ``longest``, with jitter.

    Attributes:
        first: seconds before the second attempt.
        factor: growth from one attempt to the next.
        longest: the longest wait in seconds, before jitter.
        jitter: share of the wait by which it varies either way, 0 to 1.

    Raises:
        ValueError: an attribute is not a finite number of 0 or more, or ``jitter`` is above 1.
    """

    first: float = 1.0
    factor: float = 2.0
    longest: float = 600.0
    jitter: float = 0.2

    def __post_init__(self) -> None:
        for name, number in (
            ("first", "number of seconds"),
            ("factor", "number"),
            ("longest", "number of seconds"),
            ("jitter", "number"),
        ):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"backoff {name}={shown(value)} must be a finite {number}, 0 or more")
        if self.jitter > 1:
            raise ValueError(f"backoff jitter={self.jitter} must be from 0 to 1")

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after this attempt, counted from 1."""
        try:
            wait = self.first * float(self.factor) ** max(attempt - 1, 0)
        except OverflowError:
            wait = self.longest if self.first else 0.0
        return jittered(min(wait, self.longest), self.jitter)


class JobProcessor(ABC, Generic[P]):
    """The base class of processors, which do the jobs of one kind. Subclass it and write ``process``.

    The type argument is the payload's type: a pydantic model, a dataclass, a TypedDict (before Python 3.12
    the one of typing_extensions). Without a type argument it is a dict.

    Attributes:
        kind: the kind of this processor's jobs; default: the class name in kebab-case.
        max_attempts: attempts that may end in an error before the job fails.
        max_stalls: runs that may be taken back from a silent owner before the job fails.
        max_snoozes: runs that may end in ``Snooze``; the next one that does fails the job.
        timeout: seconds that one run may take; left out: JSWORKER_JOB_TIMEOUT, a day; None: no limit. A
            coroutine that exceeds it is cancelled. A plain function cannot be cancelled: its process is
            ended, and the other jobs of that process run again uncounted.
        progress_timeout: seconds without a sign of life from the job itself; None: no limit.
        stale_threshold: seconds of silence after which any worker may take the job back;
            None: the job is taken back only on evidence of the owner's death, by an operator, or after a day
            of silence beyond the crash threshold, by which time an owner that lives has stopped the run.
        backoff: the wait between attempts.
        concurrency: job slots of one process that this kind may fill; None: all.
        isolation: where its jobs run: None, in the worker's own process; ``process``, in one of its
            ``JSWORKER_ISOLATED_PROCESSES`` child processes, so that code which computes, leaks or crashes
            harms no other job. ``setup`` and ``teardown`` are called in each child process.
        max_jobs_per_process: jobs after which an isolated process is replaced; None: never.
        max_memory_mb: megabytes, of 1,000,000 bytes, that an isolated process may take. A process that has
            taken more is replaced after its job; one that has taken twice as many is killed at once, which
            is a stall of its job. None: no limit.
        schedule: when jobs are enqueued automatically: a ``Cron`` or an ``Every``, or several, by name.
        limit: how many jobs run at once in the whole installation: ``Limit(2)``; or how many jobs of each
            key, which is a field of the payload: ``Limit(2, key="tenant")``.
        rate: how many jobs begin in a span of time: ``Rate(50, per=60)``. A limit beside it has the same key.
        priority: the priority of its jobs: ``high``, ``normal`` or ``low``. An enqueue call may override it.
        unique: the rule for jobs that this class enqueues with the same unique key: ``live``, at most one
            waits or runs; ``waiting``, at most one waits and one runs.
        unique_for: seconds, or a timedelta, in which this class enqueues at most one job of a unique key;
            jobs that have ended count too. None: no window.
        debounce: seconds, or a timedelta, from the last enqueueing of a unique key by this class until its
            job is due, with the last payload; None: no such wait.
        debounce_max: likewise, the longest wait from the first enqueueing; None: no longest wait.
        expires_in: seconds, or a timedelta, from the enqueueing of a job by this class until it is cancelled,
            unless it has begun; None: it does not expire.
        middleware: async context managers around ``process``, the first one outermost; all of them are
            inside the middleware of the worker.
    """

    kind: ClassVar[str] = ""
    max_attempts: ClassVar[int | FromSettings] = FROM_SETTINGS
    max_stalls: ClassVar[int | FromSettings] = FROM_SETTINGS
    timeout: ClassVar[float | FromSettings | None] = FROM_SETTINGS
    progress_timeout: ClassVar[float | FromSettings | None] = FROM_SETTINGS
    stale_threshold: ClassVar[float | FromSettings | None] = FROM_SETTINGS
    backoff: ClassVar[Backoff] = Backoff()
    concurrency: ClassVar[int | None] = None
    isolation: ClassVar[Literal["process"] | None] = None
    max_jobs_per_process: ClassVar[int | None] = None
    max_memory_mb: ClassVar[float | None] = None
    schedule: ClassVar[Schedule | Mapping[str, Schedule] | None] = None
    limit: ClassVar[Limit | None] = None
    rate: ClassVar[Rate | None] = None
    priority: ClassVar[Priority] = "normal"
    expires_in: ClassVar[Seconds | None] = None
    unique: ClassVar[Unique] = "live"
    unique_for: ClassVar[Seconds | None] = None
    debounce: ClassVar[Seconds | None] = None
    debounce_max: ClassVar[Seconds | None] = None
    max_snoozes: ClassVar[int] = 1000
    middleware: ClassVar[Sequence[Middleware]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = check_kind(cls.__dict__.get("kind") or kebab_case(cls.__name__))
        _refuse_misspelled(cls)

    @abstractmethod
    def process(self, job: Job[P]) -> Any:
        """Do the job; ``async def`` or ``def`` (a plain function runs in a thread).

        Returns:
            The result, stored as JSON.

        Raises:
            Retry: run it again, after a given wait.
            Fail: it failed for good.
            Snooze: run it again later; neither an attempt nor an error is counted.
            Exception: anything else: it is retried with back-off until ``max_attempts``.
        """

    async def setup(self) -> None:
        """Open what all jobs of this processor share; called once, before the first job."""

    async def teardown(self) -> None:
        """Close what ``setup`` opened; called once, after the last job."""

    async def on_failed(self, job: Job[P], error: BaseException) -> None:
        """React to a run after which its job has failed for good.

        It is called in the worker's process, at most once. It is not called if that process has died, or if
        the payload could not be read: a job that others take back and fail (``stalled``) has no such run.

        A job that runs in a process of its own, isolated or in quarantine, passes only the text of its error,
        also if that process has died. ``setup`` of an isolated kind is not called in the worker's process.

        Args:
            job: the job, as ``process`` gets it.
            error: what ``process`` raised, from another process a RuntimeError with the first line of its
                text; TimeoutError if it was cancelled for a time limit; InvalidJson if the result cannot be
                stored.
        """

    async def on_lost(self, job: Job[P]) -> None:
        """React to a run that lost its job; it has been stopped, its writes are refused.

        It is called in the worker's process, in which ``setup`` of an isolated kind is not called.
        """


_SETTINGS: Final = tuple(JobProcessor.__annotations__)


def _refuse_misspelled(cls: type[JobProcessor[Any]]) -> None:
    """Raise TypeError for a class attribute that has nearly the name of a setting, and no effect."""
    for name, value in vars(cls).items():
        if name in _SETTINGS or name.startswith("_") or name.isupper():
            continue
        if isinstance(value, type) or hasattr(type(value), "__get__"):  # a nested class, a method, a property
            continue
        if meant := _misspelled(name):
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__}: {name} is no setting of a processor: did you mean"
                f" {meant}? (An attribute of your own needs a name that is less like it.)"
            )


def _misspelled(name: str) -> str | None:
    """Return the setting that a name misspells, or None. ``timeout_ms``, say, may be the user's own."""
    name = name.lower()
    for setting in get_close_matches(name, _SETTINGS, n=1, cutoff=0.85):
        is_longer = name.startswith(setting) or name.endswith(setting)
        is_shuffled = sorted(name.replace("_", "")) == sorted(setting.replace("_", ""))
        if not is_longer and (is_shuffled or get_close_matches(name, [setting], cutoff=0.9)):
            return setting
    return None


class ProcessorOf(Protocol[Payload, _Returned_co]):
    """A processor with a payload type and a return type, for type checkers.

    Type checkers infer both from ``process``; ``type[JobProcessor[Text]]`` does not have the return type.
    """

    def process(self, job: Job[Payload], /) -> _Returned_co:
        """See ``JobProcessor.process``."""
        ...

    async def setup(self) -> None:
        """See ``JobProcessor.setup``; without it every class with a ``process`` would match."""


AsyncProcessorOf: TypeAlias = ProcessorOf[Payload, Coroutine[Any, Any, Returned]]
"""``ProcessorOf`` for a ``process`` that is ``async def``; in overloads it goes before ``ProcessorOf``."""

KindOf: TypeAlias = str | type[ProcessorOf[Payload, Any]]
"""A kind's name, or a processor, against whose payload type the type checkers then check the payloads."""


@cache
def payload_type(processor: type[JobProcessor[Any]]) -> TypeAdapter[Any]:
    """Return the validator of a processor's payload type; InvalidTarget: it cannot be used."""
    with _naming("payload type", processor):
        return strict_json.adapter_of(payload_argument(processor))


@cache
def return_type(processor: type[JobProcessor[Any]]) -> TypeAdapter[Any]:
    """Return the adapter of the type that a processor's ``process`` returns; InvalidTarget: likewise."""
    owner = next(each for each in processor.__mro__ if "process" in vars(each))
    try:
        arguments = _arguments(processor, owner)
    except NameError:  # names that only a type checker sees, say
        arguments = {}
    with _naming("return type", processor):
        return strict_json.result_type(processor.process, arguments)


@contextmanager
def _naming(what: str, processor: type[JobProcessor[Any]]) -> Iterator[None]:
    """Raise any error as InvalidTarget that names this type of a processor."""
    try:
        yield
    except Exception as error:
        fault = f"the {what} of {processor.__qualname__} cannot be used"
        raise InvalidTarget(f"{fault}: {_unusable(error)}") from error


def _unusable(error: Exception) -> str:
    """Return what is wrong with a type; pydantic's own texts are long, and their advice does not help."""
    if isinstance(error, PydanticSchemaGenerationError) and (found := _WITHOUT_SCHEMA.match(error.message)):
        rule = "must be a pydantic model, a dataclass, a TypedDict or a type that pydantic knows"
        return f"{printable(found[1], _LONGEST_CAUSE)} {rule}"
    text = error.message.partition("\n")[0] if isinstance(error, PydanticErrorMixin) else str(error)
    return f"{type(error).__name__}: {printable(text, _LONGEST_CAUSE)}"


def read_payload(processor: type[JobProcessor[Any]], value: Any) -> Any:
    """Return a JSON value, or an instance of the payload type, as the processor's payload type.

    Fields are found by their names and by their aliases.

    Raises:
        InvalidPayload: it does not fit; the message names fields and rules, never values (but the text of
            a validator of your own is shown as it is).
    """
    try:
        return payload_type(processor).validate_python(value, by_alias=True, by_name=True)
    except ValidationError as error:
        fault = _invalid_payload(processor, error)
    try:  # strict models take dates, UUIDs, tuples ... in their JSON form from JSON text only
        text = strict_json.dumps(value)
    except InvalidJson:
        raise fault from None
    return read_payload_text(processor, text)


def read_payload_text(processor: type[JobProcessor[Any]], text: str, fault: str = "") -> Any:
    """Return a payload's JSON text, as it is stored, as its payload type; ``fault`` precedes an error."""
    try:
        return payload_type(processor).validator.validate_json(text, by_alias=True, by_name=True)
    except ValidationError as error:
        raise _invalid_payload(processor, error, fault) from None


def write_payload(processor: type[JobProcessor[Any]], payload: Any) -> str:
    """Return a payload, or a value that can be read as one, as JSON text, checked against its type.

    Raises InvalidPayload if it does not fit the type, and InvalidJson if it fits but cannot be stored.
    """
    found, adapter = read_payload(processor, payload), payload_type(processor)
    if type(found) is dict and _is_dict(processor):
        try:
            return strict_json.dumps(found, what="payload")
        except InvalidJson:
            pass  # pydantic may know a JSON form
    # No computed fields, so that read_payload accepts it again.
    by_alias = round_trip.by_alias(found, adapter, round_trip=True)
    how: strict_json.Written = {"by_alias": by_alias, "round_trip": True}
    form = strict_json.json_form(found, adapter, "payload", how)
    text = strict_json.dumps(form, what="payload")
    if _may_have_keys(processor):
        strict_json.refuse_equal_keys(found, text, adapter, "payload", how)
    if ("null" in text and _may_be_any(processor)) or strict_json.ASTERISKS in text:
        strict_json.refuse_lost(found, form, adapter, "payload", how)
    if not round_trip.is_surely_readable(adapter):
        read_payload_text(processor, text, "a worker could not read it again: ")
    return text


@cache
def _is_dict(processor: type[JobProcessor[Any]]) -> bool:
    return payload_argument(processor) in (dict, dict[str, Any])


@cache
def _may_be_any(processor: type[JobProcessor[Any]]) -> bool:
    """Return whether a part of the payload may be of any type: pydantic writes NaN there as null."""
    return re.search("'any'|'allow'|'function-", repr(payload_type(processor).core_schema)) is not None


@cache
def _may_have_keys(processor: type[JobProcessor[Any]]) -> bool:
    """Return whether a part of the payload may be a dict, whose keys need not be text."""
    return (
        re.search("'dict'|'any'|'allow'|'function-|'is-", repr(payload_type(processor).core_schema))
        is not None
    )


def read_result(processor: type[JobProcessor[Any]], value: Any) -> Any:
    """Return a job's result, a JSON value, as the type that ``process`` returns.

    Without a return type, or if it cannot be read, the JSON value is returned as it is. None stays None.

    Raises InvalidJson if the stored result does not fit that type.
    """
    adapter = return_type(processor)
    if value is None or adapter is strict_json.ANYTHING:
        return value
    # As text: strict models take dates, UUIDs, tuples ... in their JSON form from JSON text only.
    return strict_json.read_result(json.dumps(value), adapter)


def payload_argument(processor: type[JobProcessor[Any]]) -> Any:
    """Return the type argument that a class gives to ``JobProcessor``; left open it is a dict."""
    argument = _arguments(processor, JobProcessor)[P]
    return dict[str, Any] if isinstance(argument, TypeVar) else argument


def _arguments(cls: type[Any], generic: type[Any]) -> dict[Any, Any]:
    """Return what a class gives for the type variables of a class above it; themselves where left open."""
    if cls is generic:
        return {each: each for each in getattr(cls, "__parameters__", ())}
    for parent in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin = get_origin(parent) or parent
        if isinstance(origin, type) and issubclass(origin, generic):
            given = zip(getattr(origin, "__parameters__", ()), get_args(parent), strict=False)
            above = _arguments(origin, generic)
            # Others may be names that only a type checker sees.
            used = {variable for each in above.values() for variable in strict_json.variables_of(each)}
            known = {variable: _evaluated(argument, cls) for variable, argument in given if variable in used}
            return {each: strict_json.substituted(argument, known) for each, argument in above.items()}
    return {}


def _evaluated(argument: Any, cls: type[Any]) -> Any:
    """Return a type argument with the names in it looked up in the module of the class that gives it."""
    names = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    # With local names of its own: Python keeps what a name meant in the first module that gave it.
    given = SimpleNamespace(__annotations__={"argument": argument})
    return get_type_hints(given, names, {}, include_extras=True)["argument"]


def _invalid_payload(
    processor: type[JobProcessor[Any]], error: ValidationError, fault: str = ""
) -> InvalidPayload:
    says, rule = strict_json.misfit(error)
    refusal = InvalidPayload(f"payload of kind {processor.kind}: {fault}{says}")
    refusal.without_content = f"payload of kind {processor.kind} does not fit its type: {rule}"
    return refusal
