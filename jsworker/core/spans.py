"""Spans of a job: create, send, claim, process, settle, by OpenTelemetry's messaging conventions.

All of them belong to the trace of the producer: its context is stored in the row, travels in the message's
headers, and is the parent of everything that follows. A run that follows another one links to it.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import Any, Final
from uuid import UUID

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from jsworker.core.tracing import TraceContext

Attributes = Mapping[str, AttributeValue]

_OPERATIONS: Final = {
    "create": ("create", SpanKind.PRODUCER),
    "send": ("send", SpanKind.CLIENT),
    "claim": ("receive", SpanKind.CLIENT),
    "process": ("process", SpanKind.CONSUMER),
    "settle": ("settle", SpanKind.CLIENT),
}
"""For each operation its type and the kind of its span."""
_OWN_STATE: Final = re.compile(r"jsworker=([0-9a-f]{32})-([0-9a-f]{16})")
"""jsworker's member of a tracestate: trace and span of the job's previous run."""
_LONGEST_STATE: Final = 512

_propagator: Final = TraceContextTextMapPropagator()


class Spans:
    """Makes the spans of one process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("jsworker", version("jsworker"))

    def current(self) -> TraceContext:
        """Return the context of the caller's own span."""
        return _context_of(contexts.get_current())

    def begin(
        self,
        operation: str,
        destination: str,
        job_id: UUID | None,
        attributes: Attributes | None = None,
        **options: Any,
    ) -> Span:
        """Begin the span of one of the operations; the options are those of ``Tracer.start_span``."""
        operation_type, kind = _OPERATIONS[operation]
        named: dict[str, AttributeValue] = {
            "messaging.system": "nats",
            "messaging.operation.name": operation,
            "messaging.operation.type": operation_type,
            "messaging.destination.name": destination,
            **(attributes or {}),
        }
        if job_id is not None:
            named["messaging.message.id"] = str(job_id)
        return self._tracer.start_span(f"{operation} {destination}", kind=kind, attributes=named, **options)

    def create(self, destination: str, *, job_id: UUID | None, jobs: int) -> "OwnSpan":
        """Begin the span of an enqueue; the created jobs belong to it."""
        attributes = {"messaging.batch.message_count": jobs} if job_id is None else None
        return OwnSpan(self.begin("create", destination, job_id, attributes))

    def sent(
        self, destination: str, job_id: UUID, context: TraceContext, *, began_ns: int, stored: bool
    ) -> None:
        """Make the span of a message sent since ``began_ns``, Unix time; an error unless ``stored``."""
        if context.traceparent is None:
            return
        span = self.begin("send", destination, job_id, context=_extracted(context), start_time=began_ns)
        if not stored:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    @contextmanager
    def within(self, context: TraceContext) -> Iterator[None]:
        """Make a span of another process the parent of the spans that begin within the block."""
        token = contexts.attach(_extracted(context))
        try:
            yield
        finally:
            contexts.detach(token)

    def run(
        self,
        destination: str,
        job_id: UUID,
        context: TraceContext,
        attributes: Attributes,
        *,
        claim_began_ns: int,
        claimed_ns: int,
    ) -> "RunSpans":
        """Make the span of a claim, and begin the span of the run that follows it."""
        parent = _extracted(context)
        links = [Link(before)] if (before := _run_before(context.tracestate)) is not None else []
        span = self.begin("process", destination, job_id, attributes, context=parent, links=links)
        has_producer = trace.get_current_span(parent).get_span_context().is_valid
        # Without a producer's span the claim belongs to the run, not to a trace of its own.
        parent = parent if has_producer else trace.set_span_in_context(span)
        claim = self.begin(
            "claim", destination, job_id, attributes, context=parent, start_time=claim_began_ns
        )
        claim.end(claimed_ns)
        return RunSpans(self, span, destination, job_id, context.tracestate)


class OwnSpan:
    """A span that this process has begun."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def active(self) -> AbstractContextManager[Span]:
        """Return a context manager that makes it the current span."""
        return trace.use_span(
            self._span, end_on_exit=False, record_exception=False, set_status_on_exception=False
        )

    def context(self) -> TraceContext:
        """Return its context, for jobs or for another process."""
        return _context_of(trace.set_span_in_context(self._span))

    def end(self, error: BaseException | None, at_ns: int | None = None) -> None:
        """End the span. It records only the type of an error, because the text may hold anything."""
        if error is not None:
            self._span.set_attribute("error.type", type(error).__qualname__)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(at_ns)


class RunSpans(OwnSpan):
    """The spans of one run."""

    def __init__(
        self, spans: Spans, span: Span, destination: str, job_id: UUID, tracestate: str | None
    ) -> None:
        super().__init__(span)
        self._spans = spans
        self._message = (destination, job_id)
        self._tracestate = tracestate
        self._ended_ns = 0

    def state(self) -> str | None:
        """Return the row's tracestate, by which a later run finds this one; None: the span is not sampled."""
        own = self._span.get_span_context()
        if not own.trace_flags.sampled:
            return None
        member = f"jsworker={own.trace_id:032x}-{own.span_id:016x}"
        others = [each for each in _members(self._tracestate) if not each.startswith("jsworker=")]
        state = ",".join([member, *others])
        return state if len(state) <= _LONGEST_STATE else member

    def processed(self, error: BaseException | None) -> None:
        """End the run's span."""
        self._ended_ns = time.time_ns()
        self.end(error, self._ended_ns)

    def settled(self, outcome: str) -> None:
        """Make the span of the write that settled the job."""
        run, began_ns = trace.set_span_in_context(self._span), self._ended_ns or time.time_ns()
        outcomes = {"jsworker.outcome": outcome}
        self._spans.begin("settle", *self._message, outcomes, context=run, start_time=began_ns).end()


def _context_of(context: contexts.Context) -> TraceContext:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context)
    return TraceContext(carrier.get("traceparent"), carrier.get("tracestate") or None)


def _extracted(context: TraceContext) -> contexts.Context:
    return _propagator.extract(context.headers() or {}, contexts.Context())


def _members(tracestate: str | None) -> list[str]:
    return [member.strip() for member in (tracestate or "").split(",") if member.strip()]


def _run_before(tracestate: str | None) -> SpanContext | None:
    """Return the run that a tracestate names; members of other systems are skipped."""
    found = next(filter(None, map(_OWN_STATE.fullmatch, _members(tracestate))), None)
    if found is None:
        return None
    flags = TraceFlags(TraceFlags.SAMPLED)
    before = SpanContext(int(found[1], 16), int(found[2], 16), is_remote=True, trace_flags=flags)
    return before if before.is_valid else None
