"""Tracing: who wants spans, and the context that travels in a job's row and in its message's headers.

Nothing of OpenTelemetry is loaded here. Whoever has set it up has loaded it already.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from uuid import UUID

if TYPE_CHECKING:
    from jsworker.core.spans import Spans

T = TypeVar("T")

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE: Final = re.compile(r"[ -~]{1,512}")


class TraceContext(NamedTuple):
    """A span's identity, in the two headers of W3C Trace Context.

    Attributes:
        traceparent: version, trace id, span id and flags; None: there is no span.
        tracestate: what tracing systems add to it.
    """

    traceparent: str | None = None
    tracestate: str | None = None

    def headers(self) -> dict[str, str] | None:
        """Return them as headers of a message; None: there are none, or the row holds something else."""
        if self.traceparent is None or not _TRACEPARENT.fullmatch(self.traceparent):
            return None
        found = {"traceparent": self.traceparent}
        has_state = self.tracestate is not None and _TRACESTATE.fullmatch(self.tracestate)
        return {**found, "tracestate": str(self.tracestate)} if has_state else found


_made: "tuple[object, Spans] | None" = None
"""The provider that was seen last, and what makes spans with it."""
_reported: set[type[Exception]] = set()


def active() -> "Spans | None":
    """Return what makes spans; None: this process has set up no tracer provider of OpenTelemetry's."""
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
    """Do something about spans, and return None when that fails: a job must not pay for somebody's exporter.

    The first error of its kind is reported on stderr, as those of events' listeners are.
    """
    try:
        return call()
    except Exception as error:  # noqa: BLE001 -- somebody else's code
        if type(error) not in _reported:
            _reported.add(type(error))
            sys.stderr.write(f"tracing raised; jobs go on without spans:\n{traceback.format_exc()}")
        return None


@contextmanager
def creating(destination: str, *, job_id: UUID | None = None, jobs: int = 1) -> Iterator[TraceContext]:
    """Enqueue in here: in a span of its own, if anybody wants spans; what is created belongs to it.

    Args:
        destination: the subject of the messages.
        job_id: the job; None: they are many.
        jobs: how many.
    """
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
    """Make a span of another process the caller's own parent, if anybody here wants spans."""
    spans = active()
    return nullcontext() if spans is None else spans.within(context)


def flush(seconds: float) -> None:
    """Have finished spans exported, within so many seconds: this process will not end in the usual way."""
    provider = None if (api := sys.modules.get("opentelemetry.trace")) is None else api.get_tracer_provider()
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        attempt(partial(force_flush, round(seconds * 1000)))
