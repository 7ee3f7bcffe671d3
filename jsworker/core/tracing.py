"""Tracing, once the application has set up OpenTelemetry; before that, nothing of OpenTelemetry is loaded."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from uuid import UUID

from jsworker.core.tracebacks import traceback_of

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from jsworker.core.spans import Spans

T = TypeVar("T")

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")

_reported: set[type[Exception]] = set()


class TraceContext(NamedTuple):
    """A span's identity, in the two headers of W3C Trace Context; without a span it is empty."""

    traceparent: str | None = None
    tracestate: str | None = None

    def headers(self) -> dict[str, str] | None:
        """Return the context as message headers; None if it is empty, or the row's text is not valid."""
        if self.traceparent is None or not _TRACEPARENT.fullmatch(self.traceparent):
            return None
        found = {"traceparent": self.traceparent}
        has_state = self.tracestate is not None and _TRACESTATE.fullmatch(self.tracestate)
        return {**found, "tracestate": str(self.tracestate)} if has_state else found


def active() -> "Spans | None":
    """Return the maker of spans; None: this process has set up no tracer provider of OpenTelemetry's."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    return _spans_of(provider)


@lru_cache(maxsize=1)
def _spans_of(provider: "TracerProvider") -> "Spans":
    from jsworker.core.spans import Spans  # noqa: PLC0415 -- loads OpenTelemetry, which is there already

    return Spans(provider)


def attempt(call: Callable[[], T]) -> T | None:
    """Return what a call returns, or None if it raises: a broken exporter must not harm a job.

    The first error of each type is reported on stderr, as errors of event listeners are.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 -- foreign code
        if type(error) not in _reported:
            _reported.add(type(error))
            with suppress(Exception):  # stderr may be closed, or None
                sys.stderr.write(f"tracing raised; jobs go on without spans:\n{traceback_of(error)}")
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
    """Export finished spans within ``seconds``, for a process that ends without ``atexit``."""
    provider = None if (api := sys.modules.get("opentelemetry.trace")) is None else api.get_tracer_provider()
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        attempt(partial(force_flush, round(seconds * 1000)))
