"""A processor that is traced in quarantine, where it sets up OpenTelemetry for a process of its own."""

import os
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor


class Traced(JobProcessor):
    """Tells which span its work belongs to."""

    kind = "traced"
    max_attempts = 1
    max_stalls = 1

    async def setup(self) -> None:
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(TracerProvider())

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, str]:
        if job.payload.get("fails"):
            raise ValueError
        context = trace.get_current_span().get_span_context()
        return {"trace": f"{context.trace_id:032x}", "span": f"{context.span_id:016x}"}


class Exports(Traced):
    """Exports its spans in batches, to the file that a variable names."""

    kind = "exports"

    async def setup(self) -> None:
        provider = TracerProvider()
        out = Path(os.environ["TRACED_FILE"]).open("w")  # noqa: ASYNC230, SIM115 -- as long as the process
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=out)))
        trace.set_tracer_provider(provider)

    async def process(self, job: Job[dict[str, Any]]) -> dict[str, str]:
        with trace.get_tracer("application").start_as_current_span("in quarantine"):
            return await super().process(job)
