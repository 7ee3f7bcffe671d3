"""Functions as processors: ``@job`` turns a function into a subclass of ``JobProcessor``."""

import inspect
import types
import typing
from collections.abc import Callable, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, get_args, get_origin, overload

from typing_extensions import TypedDict, Unpack

from jsworker.core.errors import InvalidName
from jsworker.core.job import Job
from jsworker.core.limits import Limit, Rate
from jsworker.core.names import is_kind, printable
from jsworker.core.priorities import Priority
from jsworker.core.processor import (
    Backoff,
    FromSettings,
    JobProcessor,
    Middleware,
    Payload,
    Returned,
    Seconds,
    Unique,
)
from jsworker.core.schedule_rules import Schedule

if TYPE_CHECKING:
    from jsworker.client.job_client import JobClient
    from jsworker.client.results import JobHandle
    from jsworker.client.sync_client import SyncJobClient
    from jsworker.client.sync_parts import SyncJobHandle
    from jsworker.core.enqueue_options import EnqueueOptions

Given_contra = TypeVar("Given_contra", contravariant=True)
Answer = TypeVar("Answer")
Answer_co = TypeVar("Answer_co", covariant=True)
_LONGEST_CAUSE = 300


class ClassAttributes(TypedDict, total=False):
    """The keywords of ``@job``: the class attributes of ``JobProcessor``, whose docstring describes them."""

    kind: str
    max_attempts: int | FromSettings
    max_stalls: int | FromSettings
    timeout: float | FromSettings | None
    progress_timeout: float | FromSettings | None
    stale_threshold: float | FromSettings | None
    backoff: Backoff
    concurrency: int | None
    schedule: Schedule | Mapping[str, Schedule] | None
    limit: Limit | None
    rate: Rate | None
    priority: Priority
    expires_in: Seconds | None
    unique: Unique
    unique_for: Seconds | None
    debounce: Seconds | None
    debounce_max: Seconds | None
    max_snoozes: int
    middleware: Sequence[Middleware]
    isolation: Literal["process"] | None
    max_jobs_per_process: int | None
    max_memory_mb: float | None


class FunctionProcessor(JobProcessor[Payload], Generic[Given_contra, Payload, Answer_co]):
    """A processor class that ``@job`` has made from a function; use it like any other processor class.

    Attributes:
        function: the undecorated function, to be called in tests.
    """

    if not TYPE_CHECKING:  # for type checkers, and for ``inspect.signature``, it takes no arguments

        def __init__(self, *args: Any, **named: Any) -> None:
            if args or named:
                name = type(self).__name__
                raise TypeError(f"{name} is a processor: enqueue it, or call {name}.function(…)")
            super().__init__()

        __init__.__signature__ = inspect.Signature(
            [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
        )

    def process(self, job: Job[Payload]) -> Answer_co:
        """Call the function."""
        raise NotImplementedError

    @staticmethod
    def function(given: Given_contra, /) -> Answer_co:
        """See the class."""
        raise NotImplementedError

    @overload
    @classmethod
    def enqueue(
        cls: "type[FunctionProcessor[Any, Payload, Coroutine[Any, Any, Returned]]]",
        payload: Payload,
        *,
        client: "JobClient",
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> "Coroutine[Any, Any, JobHandle[Returned]]": ...

    @overload
    @classmethod
    def enqueue(
        cls: "type[FunctionProcessor[Any, Payload, Returned]]",
        payload: Payload,
        *,
        client: "JobClient",
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> "Coroutine[Any, Any, JobHandle[Returned]]": ...

    @overload
    @classmethod
    def enqueue(
        cls: "type[FunctionProcessor[Any, Payload, Coroutine[Any, Any, Returned]]]",
        payload: Payload,
        *,
        client: "SyncJobClient",
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> "SyncJobHandle[Returned]": ...

    @overload
    @classmethod
    def enqueue(
        cls: "type[FunctionProcessor[Any, Payload, Returned]]",
        payload: Payload,
        *,
        client: "SyncJobClient",
        unique_key: str | None = None,
        **options: "Unpack[EnqueueOptions]",
    ) -> "SyncJobHandle[Returned]": ...

    @classmethod
    def enqueue(cls: type[Any], payload: Any, *, client: Any, **options: Any) -> Any:
        """Enqueue a job of this function; the arguments are those of the client's ``enqueue``."""
        return client.enqueue(cls, payload, **options)


class _Decorator(Protocol):
    @overload
    def __call__(
        self, function: Callable[[Job[Payload]], Answer], /
    ) -> type[FunctionProcessor[Job[Payload], Payload, Answer]]: ...
    @overload
    def __call__(
        self, function: Callable[[Payload], Answer], /
    ) -> type[FunctionProcessor[Payload, Payload, Answer]]: ...


@overload
def job(
    function: Callable[[Job[Payload]], Answer], /
) -> type[FunctionProcessor[Job[Payload], Payload, Answer]]: ...


@overload
def job(function: Callable[[Payload], Answer], /) -> type[FunctionProcessor[Payload, Payload, Answer]]: ...


@overload
def job(**attributes: Unpack[ClassAttributes]) -> _Decorator: ...


def job(function: Any = None, /, **attributes: Any) -> Any:
    """Make a processor from a function: ``@job``, or ``@job(max_attempts=5, timeout=60.0)``.

    The function is ``async def`` or ``def`` (which runs in a thread), and takes the job, as
    ``count_words(job: Job[Text])``, or its payload alone, as ``count_words(text: Text)``. Without an
    annotation the payload is a dict; a parameter called ``job`` then takes the job. What it returns is the
    job's result.

    Args:
        function: the function to decorate.
        attributes: class attributes of ``JobProcessor``; ``kind`` is the function's name unless given, with
            hyphens for underscores.

    Returns:
        A class, which is used like any other processor class.

    Raises:
        TypeError: what is decorated is not a function of one argument, its annotations cannot be read, or
            ``JobProcessor`` has no attribute of a given name.
        InvalidName: the kind is not allowed.
    """
    for name in attributes:
        if name not in JobProcessor.__annotations__:
            near = get_close_matches(name, JobProcessor.__annotations__, n=1)
            advice = f"did you mean {near[0]}?" if near else "class attributes of JobProcessor are taken"
            raise TypeError(f"@job takes no {name}: {advice}")
    if function is None:
        return lambda function: _processor_of(function, attributes)
    return _processor_of(function, attributes)


def _processor_of(function: Any, attributes: dict[str, Any]) -> type[JobProcessor[Any]]:
    if not inspect.isfunction(function):
        raise TypeError(f"@job decorates a function, not {_named(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"@job: {function.__qualname__} must return its result, not yield")
    parameter = _only_parameter(function)
    hints = _hints_of(function)
    given = hints.get(parameter, Job if parameter == "job" else dict[str, Any])
    takes_job = (get_origin(given) or given) is Job
    payload = (get_args(given) or (dict[str, Any],))[0] if takes_job else given
    if isinstance(payload, TypeVar):
        rule = f"must be a type, not the type variable {payload.__name__}"
        raise TypeError(f"@job: the payload of {function.__qualname__} {rule}")
    is_async = any(inspect.iscoroutinefunction(each) for each in (function, inspect.unwrap(function)))
    process = _process(function, takes_job=takes_job, is_async=is_async)
    process.__annotations__ = {"return": hints["return"]} if "return" in hints else {}
    kind = function.__name__.strip("_").replace("_", "-").lower()
    if "kind" not in attributes and not is_kind(kind):
        raise InvalidName(
            f"@job: {function.__name__} is no name of a kind: give one, as in @job(kind='resize-image')"
        )
    written = {
        "kind": kind,
        **attributes,
        "__module__": function.__module__,
        "__qualname__": function.__qualname__,
        "__doc__": function.__doc__,
        "function": staticmethod(function),
        "process": process,
    }
    parent = FunctionProcessor[given, payload, Any]  # type: ignore[valid-type]  # known when it runs
    made: type[JobProcessor[Any]] = types.new_class(
        function.__name__, (parent,), exec_body=lambda names: names.update(written)
    )
    return made


def _process(function: Callable[[Any], Any], *, takes_job: bool, is_async: bool) -> Callable[..., Any]:
    async def process_async(_: Any, job: Job[Any]) -> Any:
        return await function(job if takes_job else job.payload)

    def process(_: Any, job: Job[Any]) -> Any:
        return function(job if takes_job else job.payload)

    return process_async if is_async else process


def _only_parameter(function: Callable[..., Any]) -> str:
    try:
        [name] = inspect.signature(function).bind(None).arguments
    except (TypeError, ValueError):
        name = function.__name__
        rule = f"must take the job or its payload alone, as {name}(job: Job[Text]) or {name}(text: Text)"
        raise TypeError(f"@job: {function.__qualname__} {rule}") from None
    return str(name)


def _hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # noqa: BLE001 -- evaluates the user's code
        cause = printable(f"{type(error).__name__}: {error}", _LONGEST_CAUSE)
        raise TypeError(f"@job: the annotations of {function.__qualname__} cannot be read: {cause}") from None


def _named(value: Any) -> str:
    return f"class {value.__qualname__}" if isinstance(value, type) else f"{type(value).__name__}"
