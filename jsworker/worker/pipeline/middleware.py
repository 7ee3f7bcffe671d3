"""Middleware: async context managers around ``process``; the first one of a list is outermost."""

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

from jsworker.core.errors import InvalidTarget, JsworkerError
from jsworker.core.job import Job
from jsworker.core.names import shown
from jsworker.core.processor import JobProcessor, Middleware
from jsworker.core.settings import Settings
from jsworker.core.targets import load_named

_NOT_ONE_YIELD: Final = {
    "generator didn't yield",
    "generator didn't stop",
    "generator didn't stop after throw()",
    "generator didn't stop after athrow()",
}
"""Messages of contextlib for a generator that does not yield once; they name no function and no file."""


class MiddlewareFault(JsworkerError):
    """A middleware broke a rule of middleware; the attempt has failed."""


class Opened(NamedTuple):
    """The context manager that a middleware returned for a job."""

    name: str
    context: Any

    @property
    def enters_threads(self) -> bool:
        """Whether it is entered in a plain function's thread: if it is a plain context manager, too."""
        return isinstance(self.context, AbstractContextManager)


def name_of(middleware: Any) -> str:
    """Return ``MODULE:NAME`` of a function or a class; for other objects, that of their class."""
    named = middleware if hasattr(middleware, "__qualname__") else type(middleware)
    return f"{named.__module__}:{named.__qualname__}"


def check_signature(function: Any, arguments: tuple[str, ...], rule: str, if_yields: str) -> None:
    """Raise InvalidTarget for a generator, and for what cannot be called with these arguments."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidTarget(if_yields)
    if not callable(function):  # Python's message would have its repr, which may hold secrets
        raise InvalidTarget(rule)
    try:
        taken = inspect.signature(function, follow_wrapped=False)
        if any(each.kind is each.VAR_POSITIONAL for each in taken.parameters.values()):
            taken = inspect.signature(function)  # a decorator that passes on what it gets
        taken.bind(*arguments)
    except TypeError as error:
        raise InvalidTarget(f"{rule}: {error}") from None
    except (ValueError, NameError):  # written in C, or annotated with names that only type checkers import
        return


def checked(given: Any, whose: str) -> tuple[Middleware, ...]:
    """Return middleware as a tuple; raise InvalidTarget if an item cannot be middleware."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise InvalidTarget(f"middleware of {whose} must be a list, not {shown(given)}")
    for each in given:
        what = f"middleware {name_of(each)} of {whose}"
        rule = f"{what} must be callable with job and processor"
        check_signature(each, ("job", "processor"), rule, f"{what} must be decorated: @asynccontextmanager")
        if inspect.iscoroutinefunction(each):
            raise InvalidTarget(f"{what} must return an async context manager, not be a coroutine function")
    return tuple(given)


def of_settings(settings: Settings) -> Iterator[Middleware]:
    """Import the middleware of JSWORKER_MIDDLEWARE; raise InvalidTarget if it cannot be imported or used."""
    for target in filter(None, map(str.strip, settings.middleware.split(","))):
        yield from checked([load_named(target, "NAME", "my_jobs:log_jobs")], "JSWORKER_MIDDLEWARE")


def opened(middleware: Sequence[Middleware], job: Job[Any], processor: JobProcessor[Any]) -> list[Opened]:
    """Call each middleware for a job; raise MiddlewareFault if one returns no async context manager."""
    found = [Opened(name_of(each), each(job, processor)) for each in middleware]
    for each in found:
        if not isinstance(each.context, AbstractAsyncContextManager):
            what = type(each.context).__name__
            raise MiddlewareFault(f"middleware {each.name} must return an async context manager, not {what}")
    return found


async def call_within(around: Sequence[Opened], call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a call within all contexts; raise MiddlewareFault if one breaks a rule."""
    if not around:
        return await call()
    watch = _Watch(around[0].name)
    with watch.outside():
        async with around[0].context:
            with watch.inside():
                return await call_within(around[1:], call)
    raise watch.swallowed()


def call_within_in_thread(around: Sequence[Opened], call: Callable[[], Any]) -> Any:
    """Do the same in the thread of a plain function."""
    if not around:
        return call()
    watch = _Watch(around[0].name)
    with watch.outside(), around[0].context, watch.inside():
        return call_within_in_thread(around[1:], call)
    raise watch.swallowed()


class _Watch:
    """Watches which errors enter one context and which leave it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._raised: BaseException | None = None

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Note an error that enters the context."""
        try:
            yield
        except BaseException as error:
            self._raised = error
            raise

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Raise MiddlewareFault, which names the middleware, if its generator does not yield once."""
        try:
            yield
        except RuntimeError as error:
            if error is not self._raised and str(error) in _NOT_ONE_YIELD:
                raise MiddlewareFault(f"middleware {self._name} must yield once: {error}") from error
            raise

    def swallowed(self) -> MiddlewareFault:
        """Return the error for a context that an error entered and none left."""
        error = self._raised
        what = f"middleware {self._name} swallowed {type(error).__name__}"
        fault = MiddlewareFault(f"{what}: it must let errors pass, or raise others")
        fault.__cause__ = error
        return fault
