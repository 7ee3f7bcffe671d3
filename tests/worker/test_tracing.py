"""Spans from the producer to the settled outcome, one trace for all of them, links from run to run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode
from sqlalchemy.ext.asyncio import create_async_engine

from jsworker import Fail, Job, JobClient, Retry, enqueue_statement
from jsworker.core import tracing
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.timeline import note_runs
from tests.support.polling import eventually
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.isolated_processes import nothing_is_left
from tests.worker.processors import KIND, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, new_worker
from tests.worker.traced import Exports, Traced

SECRET = "secret-of-an-exception"


class Exported:
    """The spans that were finished so far."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def of(self, operation: str) -> list[ReadableSpan]:
        return [span for span in self.all() if attribute(span, "messaging.operation.name") == operation]

    async def told(self, operation: str, times: int = 1) -> list[ReadableSpan]:
        async def often_enough() -> list[ReadableSpan]:
            found = self.of(operation)
            assert len(found) == times, [span.name for span in self.all()]
            return found

        return await eventually(often_enough)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Exported]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield Exported(exporter)
    provider.shutdown()


def attribute(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {}).get(name)


def id_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    assert context is not None
    return context.trace_id, context.span_id


def parent_of(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


async def test_one_trace_from_the_producer_to_the_outcome(
    exported: Exported,
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    *,
    settings: Settings,
    js: JetStreamContext,
) -> None:
    tracer = trace.get_tracer("application")

    async def work(_job: Job[Any]) -> None:
        with tracer.start_as_current_span("query"):
            pass

    with tracer.start_as_current_span("request") as request:
        job = await client.enqueue(KIND, {"n": 1})
    [create] = exported.of("create")
    [send] = await exported.told("send")
    message = await js.get_msg(settings.stream, 1)
    await start(scripted(work))
    await rows.becomes(job.id, "completed")
    [settle] = await exported.told("settle")
    [claim], [process] = exported.of("claim"), exported.of("process")
    [query] = [span for span in exported.all() if span.name == "query"]

    assert parent_of(create) == (request.get_span_context().trace_id, request.get_span_context().span_id)
    assert [parent_of(span) for span in (send, claim, process)] == [id_of(create)] * 3
    assert parent_of(query) == id_of(process)
    assert parent_of(settle) == id_of(process)
    assert process.links == ()

    subject = f"{settings.subject_prefix}.{KIND}"
    assert [span.name for span in (create, send, claim, process, settle)] == [
        f"{operation} {subject}" for operation in ("create", "send", "claim", "process", "settle")
    ]
    assert [span.kind for span in (create, send, claim, process, settle)] == [
        SpanKind.PRODUCER,
        SpanKind.CLIENT,
        SpanKind.CLIENT,
        SpanKind.CONSUMER,
        SpanKind.CLIENT,
    ]
    for span in (create, send, claim, process, settle):
        assert attribute(span, "messaging.system") == "nats"
        assert attribute(span, "messaging.destination.name") == subject
        assert attribute(span, "messaging.message.id") == str(job.id)
    assert attribute(process, "jsworker.fencing_token") == 1
    assert attribute(settle, "jsworker.outcome") == "completed"
    times = [(span.start_time, span.end_time) for span in (claim, process, settle)]
    assert times == sorted(times)

    context = create.get_span_context()
    assert context is not None
    flags = context.trace_flags
    traceparent = f"00-{id_of(create)[0]:032x}-{id_of(create)[1]:016x}-{flags:02x}"
    assert (await rows.job(job.id))["traceparent"] == traceparent
    assert (message.headers or {})["traceparent"] == traceparent


async def test_a_run_that_may_be_followed_settles_after_its_note(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = asyncio.Event()

    async def late(*arguments: Any, **rest: Any) -> None:
        await noted.wait()
        await note_runs(*arguments, **rest)

    async def work(job: Job[Any]) -> None:
        if job.attempt < 2:
            raise Retry(after=0.0)

    monkeypatch.setattr("jsworker.worker.pipeline.run_reports.note_runs", late)
    job = await client.enqueue(KIND, {})
    running = await start(scripted(work))
    await exported.told("process", 1)  # its outcome is there
    await rounds_pass(count_rounds(running.worker._components.beats), 2)
    assert (await rows.job(job.id))["status"] == "processing"
    noted.set()
    await rows.becomes(job.id, "completed")
    await exported.told("settle", 2)
    first, second = sorted(exported.of("process"), key=lambda span: attribute(span, "jsworker.fencing_token"))
    assert [link.context.span_id for link in second.links] == [id_of(first)[1]]


async def test_a_run_that_follows_another_one_links_to_it(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    async def work(job: Job[Any]) -> None:
        if job.attempt < 3:
            raise Retry(after=0.0)

    job = await client.enqueue(KIND, {})
    await start(scripted(work))
    await rows.becomes(job.id, "completed")
    await exported.told("settle", 3)
    runs = sorted(exported.of("process"), key=lambda span: attribute(span, "jsworker.fencing_token"))
    linked = [[(link.context.trace_id, link.context.span_id) for link in run.links] for run in runs]
    assert linked == [[], [id_of(runs[0])], [id_of(runs[1])]]
    assert {id_of(run)[0] for run in runs} == {id_of(exported.of("create")[0])[0]}
    outcomes = [attribute(span, "jsworker.outcome") for span in exported.of("settle")]
    assert outcomes == ["scheduled", "scheduled", "completed"]


async def test_a_run_that_was_taken_from_its_owner_is_linked_to(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    gate = Gate()
    await start(scripted(gate.process))
    job = await client.enqueue(KIND, {})
    await gate.met()

    async def noted() -> None:
        assert "jsworker=" in ((await rows.job(job.id))["tracestate"] or "")

    await eventually(noted)
    await client.clear_and_reenqueue(job.id, "stuck")
    gate.open()
    await rows.becomes(job.id, "completed")
    runs = await exported.told("process", 2)
    runs.sort(key=lambda span: attribute(span, "jsworker.fencing_token"))
    assert [link.context.span_id for link in runs[1].links] == [id_of(runs[0])[1]]
    assert attribute(runs[1], "jsworker.cleared") is True


async def test_many_jobs_come_from_one_span(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    jobs = await client.enqueue_many(KIND, [{"n": n} for n in range(5)])
    await start(scripted(echo))
    for job in jobs:
        await rows.becomes(job.id, "completed")
    [create] = exported.of("create")
    assert attribute(create, "messaging.batch.message_count") == 5
    runs = await exported.told("process", 5)
    assert {parent_of(run) for run in runs} == {id_of(create)}


async def test_a_statement_in_the_callers_transaction_carries_the_callers_span(
    exported: Exported, start: StartWorker, rows: Rows, database: Database
) -> None:
    engine = create_async_engine(database.url)
    with trace.get_tracer("application").start_as_current_span("order") as order:
        async with engine.begin() as connection:
            [row] = (await connection.execute(enqueue_statement(KIND, {}))).all()
    await engine.dispose()
    await start(scripted(echo))
    await rows.becomes(row.id, "completed")
    [process], [send] = await exported.told("process"), exported.of("send")
    assert parent_of(process) == parent_of(send)
    assert parent_of(process) == (order.get_span_context().trace_id, order.get_span_context().span_id)


async def test_errors_are_told_by_their_type_alone(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    async def work(_job: Job[Any]) -> None:
        raise Fail(SECRET)

    await start(scripted(work))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "failed")
    [settle] = await exported.told("settle")
    [process] = exported.of("process")
    assert process.status.status_code is StatusCode.ERROR
    assert attribute(process, "error.type") == "Fail"
    assert attribute(settle, "jsworker.outcome") == "failed"
    assert all(SECRET not in span.to_json() for span in exported.all())


async def test_a_generator_exit_that_an_awaited_task_brings_ends_its_span(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    """Python closes the coroutines that await the task, that of the span among them."""

    async def brings_it() -> None:
        raise GeneratorExit

    async def work(_job: Job[Any]) -> None:
        await asyncio.create_task(brings_it())

    await start(scripted(work, max_attempts=1))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "failed")
    [settle] = await exported.told("settle")
    [process] = exported.of("process")
    assert attribute(process, "error.type") == "GeneratorExit"
    assert attribute(settle, "jsworker.outcome") == "failed"
    again = await client.enqueue(KIND, {})
    await rows.becomes(again.id, "failed")  # the worker goes on


async def test_plain_functions_work_in_the_span_of_their_run(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    def work(_job: Job[Any]) -> None:
        with trace.get_tracer("application").start_as_current_span("query"):
            pass

    await start(scripted(work))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    [process] = await exported.told("process")
    [query] = [span for span in exported.all() if span.name == "query"]
    assert parent_of(query) == id_of(process)


async def test_a_quarantined_job_works_in_the_span_of_its_run(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    running = await start(Traced)
    job = await client.enqueue("traced", {})
    row = await rows.becomes(job.id, "completed")
    [process] = await exported.told("process")
    assert running.events.of("job.started")[0]["quarantined"] is True
    trace_id, span_id = id_of(process)
    assert row["result"] == {"trace": f"{trace_id:032x}", "span": f"{span_id:016x}"}


async def test_an_error_in_quarantine_is_shown_by_its_span(
    exported: Exported, client: JobClient, start: StartWorker
) -> None:
    await start(Traced)
    await client.enqueue("traced", {"fails": True})
    await exported.told("settle")
    [process] = exported.of("process")
    assert process.status.status_code is StatusCode.ERROR
    assert attribute(process, "error.type") == "RuntimeError"


async def test_spans_made_in_quarantine_are_exported_before_its_process_ends(
    client: JobClient, settings: Settings, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "spans"
    monkeypatch.setenv("TRACED_FILE", str(file))
    monkeypatch.setattr(Exports, "setup", JobProcessor.setup)  # of the owner's own process
    running = new_worker(Exports, settings=settings)
    await running.worker.start()
    try:
        job = await client.enqueue("exports", {})
        await rows.becomes(job.id, "completed")
        await nothing_is_left()  # the process ends beside the write of the outcome
        spans = await asyncio.to_thread(file.read_text)
    finally:
        await running.end()
    assert '"name": "in quarantine"' in spans


async def test_nothing_is_traced_where_nobody_asks(
    client: JobClient, start: StartWorker, rows: Rows, settings: Settings, js: JetStreamContext
) -> None:
    job = await client.enqueue(KIND, {})
    assert "traceparent" not in ((await js.get_msg(settings.stream, 1)).headers or {})
    await start(scripted(echo))
    row = await rows.becomes(job.id, "completed")
    assert (row["traceparent"], row["tracestate"]) == (None, None)


@pytest.mark.parametrize(
    ("traceparent", "tracestate"),
    [
        ("nonsense", "jsworker=nonsense"),
        ("00-0-0-0", "x" * 5000),
        (None, "jsworker=" + "0" * 32 + "-" + "0" * 16),
    ],
)
async def test_a_row_with_a_broken_context_runs_all_the_same(
    exported: Exported,
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    *,
    traceparent: str | None,
    tracestate: str | None,
) -> None:
    job = await client.enqueue(KIND, {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET traceparent = %s, tracestate = %s, run_at = now() WHERE id = %s",
        traceparent,
        tracestate,
        job.id,
    )
    await start(scripted(echo))
    await rows.becomes(job.id, "completed")
    [process] = await exported.told("process")
    assert process.links == ()


class Broken(SpanProcessor):
    """An exporter's mistake, at one end of a span or at the other."""

    def __init__(self, at: str) -> None:
        self._at = at

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:  # noqa: ARG002 -- the library's
        if self._at == "start":
            raise RuntimeError("no exporter")

    def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002 -- the library's
        if self._at == "end":
            raise RuntimeError("no exporter")


@pytest.mark.parametrize("at", ["start", "end"])
async def test_a_broken_exporter_costs_no_job(
    monkeypatch: pytest.MonkeyPatch,
    client: JobClient,
    start: StartWorker,
    rows: Rows,
    capsys: pytest.CaptureFixture[str],
    *,
    at: str,
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(Broken(at))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    monkeypatch.setattr(tracing, "_reported", set())
    jobs = [await client.enqueue(KIND, {"n": n}) for n in range(5)]
    jobs += await client.enqueue_many(KIND, [{"n": n} for n in range(5)])
    running = await start(scripted(echo))
    for job in jobs:
        await rows.becomes(job.id, "completed")
    await running.stream_is_empty()
    assert capsys.readouterr().err.count("tracing raised") == 1


def test_without_a_stderr_a_broken_exporter_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no exporter")

    monkeypatch.setattr(tracing, "_reported", set())
    monkeypatch.setattr("sys.stderr", None)
    tracing.attempt(broken)


async def test_without_a_producers_span_claim_and_run_are_one_trace(
    exported: Exported, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    job = await client.enqueue(KIND, {}, delay=3600)
    await rows.query("UPDATE jsworker.jobs SET traceparent = NULL, run_at = now() WHERE id = %s", job.id)
    await start(scripted(echo))
    await rows.becomes(job.id, "completed")
    [settle] = await exported.told("settle")
    [claim], [process] = exported.of("claim"), exported.of("process")
    assert parent_of(process) is None
    assert parent_of(claim) == parent_of(settle) == id_of(process)


async def test_what_is_not_sampled_is_not_noted_in_the_row(
    monkeypatch: pytest.MonkeyPatch, client: JobClient, start: StartWorker, rows: Rows
) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=ALWAYS_OFF))
    gate = Gate()
    job = await client.enqueue(KIND, {})
    running = await start(scripted(gate.process))
    await gate.met()
    assert running.worker._components.pipeline.tracing._notes._task is None
    gate.open()
    row = await rows.becomes(job.id, "completed")
    assert row["tracestate"] is None
