"""Tracing, once the application has set up OpenTelemetry; nothing of it is loaded before."""

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from jsworker.core.trace_context import TraceContext

if TYPE_CHECKING:
    from jsworker.core.spans import Spans

T = TypeVar("T")

_made: "tuple[object, Spans] | None" = None
"""The provider that was seen last, and its spans."""
_reported: set[type[Exception]] = set()


def active() -> "Spans | None":
    """Return the maker of spans; None: this process has set up no tracer provider of OpenTelemetry's."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    global _made  # noqa: PLW0603 -- a cache of one entry
    if _made is None or _made[0] is not provider:
        from jsworker.core.spans import Spans  # noqa: PLC0415 -- loads OpenTelemetry, which is there already

        _made = (provider, Spans(provider))
    return _made[1]


def attempt(call: Callable[[], T]) -> T | None:
    """Call, and return None when that fails: a job must not pay for a broken exporter.

    The first error of each type is reported on stderr, as those of events' listeners are.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 -- foreign code
        if type(error) not in _reported:
            _reported.add(type(error))
            sys.stderr.write(f"tracing raised; jobs go on without spans:\n{traceback.format_exc()}")
        return None


@contextmanager
def creating(destination: str, *, job_id: UUID | None = None, jobs: int = 1) -> Iterator[TraceContext]:
    """Enqueue within a span of its own, if spans are made; yields the context of the created jobs."""
    spans = active()
    span = None if spans is None else attempt(partial(spans.create, destination, job_id=job_id, jobs=jobs))
    if span is None:
        yield TraceContext()
        return
    try:
        with span.active():
            yield span.context()
    except BaseException as error:
        attempt(partial(span.end, error))
        raise
    attempt(partial(span.end, None))


def current() -> TraceContext:
    """Return the context of the caller's own span."""
    spans = active()
    return TraceContext() if spans is None else spans.current()


def within(context: TraceContext) -> AbstractContextManager[None]:
    """Make a span of another process the parent of the caller's, if spans are made."""
    spans = active()
    return nullcontext() if spans is None else spans.within(context)


def flush(seconds: float) -> None:
    """Export finished spans within ``seconds``, where the process ends without ``atexit``."""
    provider = None if (api := sys.modules.get("opentelemetry.trace")) is None else api.get_tracer_provider()
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        attempt(partial(force_flush, round(seconds * 1000)))
