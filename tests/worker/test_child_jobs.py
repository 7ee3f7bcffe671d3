"""``job.enqueue``: children are committed with the completion of their parent, once, or not at all."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from psycopg import AsyncConnection
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from jsworker import Fail, Job, JobClient, JobProcessor, Limit, Retry, Snooze, UsageError
from jsworker.core.errors import InvalidPayload
from jsworker.core.settings import Settings
from jsworker.worker.pipeline import child_jobs
from tests.support.polling import eventually
from tests.worker.perilous import Parent
from tests.worker.processors import KIND, LATER, Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker, lose_job

CHILD = "child"
CONFLICT = text("DO $$ BEGIN RAISE SQLSTATE '40001'; END $$")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Item(BaseModel):
    tenant: str
    number: int = 0


class Child(JobProcessor[Item]):
    limit = Limit(10, key="tenant")
    max_attempts = 7

    async def process(self, job: Job[Item]) -> int:
        return job.payload.number


async def children(rows: Rows) -> list[dict[str, Any]]:
    return await rows.query("SELECT * FROM jsworker.jobs WHERE kind = %s ORDER BY id", CHILD)


def plain(job: Job[Any]) -> list[str]:
    one = job.sync.enqueue(Child, Item(tenant="a"), unique_key="key", delay=timedelta(hours=1))
    return list(map(str, [one, *job.sync.enqueue_many(Child, [Item(tenant="b", number=n) for n in (1, 2)])]))


async def coroutine(job: Job[Any]) -> list[str]:
    one = await job.enqueue(Child, Item(tenant="a"), unique_key="key", delay=timedelta(hours=1))
    return list(map(str, [one, *await job.enqueue_many(Child, [Item(tenant="b", number=n) for n in (1, 2)])]))


@pytest.mark.parametrize("process", [coroutine, plain], ids=["coroutine", "thread"])
async def test_children_are_committed_with_the_completion_and_run(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    running = await start(scripted(process), Child)
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    kept, *run = [UUID(each) for each in row["result"]]
    for number, job_id in enumerate(run, 1):
        done = await rows.becomes(job_id, "completed")
        assert (done["result"], done["limit_key"], done["payload"]) == (
            number,
            "b",
            {"tenant": "b", "number": number},
        )
    waits = await rows.job(kept)
    assert (waits["status"], waits["unique_key"], waits["limit_key"]) == ("scheduled", "key", "a")
    assert waits["created_at"] == max(row["finished_at"], waits["created_at"])
    by = "SELECT count(DISTINCT CAST(xmin AS text)) FROM jsworker.jobs WHERE id = ANY(%s)"
    assert await rows.value(by, [job.id, kept]) == 1
    await running.stream_is_empty()


async def test_the_relay_publishes_them_at_once(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    async def process(job: Job[Any]) -> None:
        if job.payload["how"] == "transaction":
            async with job.transaction():
                await job.enqueue(CHILD, {})
        else:
            await job.enqueue(CHILD, {})

    await start(scripted(process), with_settings=make_settings(relay_interval=3600.0))
    for number, how in enumerate(("return", "transaction"), 1):
        await client.enqueue(KIND, {"how": how})

        async def published(number: int = number) -> None:
            assert [row["stream_seq"] is not None for row in await children(rows)] == [True] * number

        await eventually(published)


def raising(error: BaseException) -> Callable[[Job[Any]], Any]:
    async def process(job: Job[Any]) -> None:
        await job.enqueue(CHILD, {"attempt": job.attempt})
        raise error

    return process


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (ValueError("an error"), "scheduled"),
        (Retry(after=3600), "scheduled"),
        (Snooze(after=3600), "scheduled"),
        (Fail("for good"), "failed"),
    ],
    ids=["error", "retry", "snooze", "fail"],
)
async def test_a_run_that_does_not_complete_leaves_none(
    client: JobClient, rows: Rows, start: StartWorker, *, error: BaseException, becomes: str
) -> None:
    await start(scripted(raising(error), backoff=LATER))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, becomes)
    assert await children(rows) == []


async def test_nor_does_one_that_is_cancelled(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> None:
        await job.enqueue(CHILD, {})
        await gate.process(job)

    gate = Gate()
    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await gate.met()
    await client.cancel(job.id)
    await rows.becomes(job.id, "cancelled")
    assert await children(rows) == []


async def test_of_many_attempts_the_last_one_leaves_its_own(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.enqueue(CHILD, {"attempt": job.attempt})
        if job.attempt < 3:
            raise ValueError("again")

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert [row["payload"] for row in await children(rows)] == [{"attempt": 3}]


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_run_that_has_lost_its_job_leaves_none(
    client: JobClient, rows: Rows, start: StartWorker, *, in_transaction: bool
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.enqueue(CHILD, {})
        await gate.process(job)
        if in_transaction:
            async with job.transaction():
                await job.enqueue(CHILD, {})

    gate = Gate()
    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await lose_job(running, rows, job.id, gate)
    assert await children(rows) == []
    assert (await rows.job(job.id))["status"] == "scheduled"


async def in_block(job: Job[Any]) -> None:
    await job.enqueue(CHILD, {"n": 0})
    async for attempt in job.transaction("done", retry=True):
        async with attempt as session:
            await job.enqueue(CHILD, {"n": 1}, unique_key="key")
            await session.execute(text("INSERT INTO effects VALUES (1)"))
            tries.append(job.attempt)
            await job.step("once", steps.append, len(tries))
            if len(tries) == 1:
                await session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            await job.enqueue(CHILD, {"n": 2}, expires_in=600, unique_key="other")


def in_block_of_thread(job: Job[Any]) -> None:
    job.sync.enqueue(CHILD, {"n": 0})
    for attempt in job.sync.transaction("done", retry=True):
        with attempt as session:
            job.sync.enqueue(CHILD, {"n": 1}, unique_key="key")
            session.execute(text("INSERT INTO effects VALUES (1)"))
            tries.append(job.attempt)
            job.sync.step("once", steps.append, len(tries))
            if len(tries) == 1:
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            job.sync.enqueue(CHILD, {"n": 2}, expires_in=600, unique_key="other")


tries: list[int] = []
steps: list[int] = []


@pytest.fixture
async def _effects(rows: Rows) -> None:
    tries.clear()
    steps.clear()
    await rows.query("CREATE TABLE effects (n int)")


@pytest.mark.usefixtures("_effects")
@pytest.mark.parametrize("process", [in_block, in_block_of_thread], ids=["coroutine", "thread"])
async def test_in_a_transaction_they_share_its_fate_in_each_try(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["result"], row["attempts"], tries) == ("done", 1, [1, 1])
    assert steps == [1]
    assert [row["payload"]["n"] for row in await children(rows)] == [0, 1, 2]
    by = (
        "SELECT count(DISTINCT x) FROM (SELECT CAST(xmin AS text) AS x FROM jsworker.jobs"
        " UNION ALL SELECT CAST(xmin AS text) FROM effects) AS written"
    )
    assert await rows.value(by) <= 2  # publishing may have been noted since


async def test_a_block_that_failed_leaves_none_though_the_run_completes(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        await job.enqueue(CHILD, {"n": "before"})
        try:
            async with job.transaction(), asyncio.timeout(0.05):
                await job.enqueue(CHILD, {"n": "in the block"})
                await asyncio.sleep(60)
        except TimeoutError:
            await job.enqueue(CHILD, {"n": "after"})

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert [row["payload"]["n"] for row in await children(rows)] == ["before", "after"]


async def beside_block(job: Job[Any]) -> None:
    inside, done = asyncio.Event(), asyncio.Event()

    async def beside() -> None:
        await inside.wait()
        await job.enqueue(CHILD, {"n": "beside"})
        done.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(beside())
        async for attempt in job.transaction(retry=True):
            async with attempt as session:
                await asyncio.to_thread(job.sync.enqueue, CHILD, {"n": "before"})
                inside.set()
                await done.wait()
                await asyncio.create_task(job.enqueue(CHILD, {"n": "after"}))
                tries.append(job.attempt)
                if len(tries) == 1:
                    await session.execute(CONFLICT)


def beside_block_of_thread(job: Job[Any]) -> None:
    inside, done = threading.Event(), threading.Event()

    def beside() -> None:
        inside.wait()
        job.sync.enqueue(CHILD, {"n": "beside"})
        done.set()

    thread = threading.Thread(target=beside)
    thread.start()
    for attempt in job.sync.transaction(retry=True):
        with attempt as session:
            job.sync.enqueue(CHILD, {"n": "before"})
            inside.set()
            done.wait()
            job.sync.enqueue(CHILD, {"n": "after"})
            tries.append(job.attempt)
            if len(tries) == 1:
                session.execute(CONFLICT)
    thread.join()


@pytest.mark.usefixtures("_effects")
@pytest.mark.parametrize("process", [beside_block, beside_block_of_thread], ids=["coroutine", "thread"])
async def test_a_block_that_failed_drops_none_that_the_job_enqueued_beside_it(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    await start(scripted(process))
    job = await client.enqueue(KIND, {}, max_attempts=1)
    await rows.becomes(job.id, "completed")
    assert tries == [1, 1]
    assert sorted(row["payload"]["n"] for row in await children(rows)) == ["after", "before", "beside"]


async def test_what_could_not_be_committed_with_the_completion_is_refused(
    client: JobClient, rows: Rows, start: StartWorker, engine: AsyncEngine
) -> None:
    left: list[asyncio.Task[Any]] = []
    told: list[str] = []
    ended = asyncio.Event()

    async def refused(job: Job[Any]) -> None:
        try:
            await job.enqueue(CHILD, {})
        except UsageError as error:
            assert "its completion is made" in str(error)  # noqa: PT017 -- in a job it would be its error
            told.append(job.payload["case"])

    async def late(job: Job[Any]) -> None:
        await ended.wait()
        await refused(job)

    async def process(job: Job[Any]) -> None:
        match job.payload["case"]:
            case "after its transaction":
                async with job.transaction():
                    pass
                await refused(job)
            case "after its statement":
                async with AsyncSession(engine) as session, session.begin():
                    (await session.execute(job.complete_statement())).one()
                await refused(job)
            case "before its statement":
                await job.enqueue(CHILD, {"of": job.payload["case"]})
                with pytest.raises(UsageError, match=r"jsworker\.enqueue_statement\(\) in your session"):
                    job.complete_statement()
            case "within its statement":
                with pytest.raises(UsageError, match=r"jsworker\.enqueue_statement\(\) in your session"):
                    job.complete_statement(
                        lambda: str(job.sync.enqueue(CHILD, {"of": "within its statement"}))
                    )
                await refused(job)
            case "after its end" | "after its failure":
                left.append(asyncio.create_task(late(job)))
                if job.payload["case"] == "after its failure":
                    raise Fail("on purpose")

    await start(scripted(process))
    cases = ["after its transaction", "after its statement", "before its statement"]
    cases += ["within its statement", "after its end", "after its failure"]
    for job in await client.enqueue_many(KIND, [{"case": case} for case in cases]):
        status = "failed" if (await client.get(job.id)).payload["case"] == cases[-1] else "completed"
        row = await rows.becomes(job.id, status)
        assert row["attempts"] == 1, row["last_error"]
    ended.set()
    await asyncio.gather(*left)
    assert sorted(told) == sorted(set(cases) - {"before its statement"})
    found = [row["payload"]["of"] for row in await children(rows)]
    assert found == ["before its statement", "within its statement"]


async def fan_out(job: Job[Any]) -> None:
    inside, done = asyncio.Event(), asyncio.Event()

    async def beside() -> None:
        await inside.wait()
        await job.enqueue(CHILD, {"n": "beside"})
        done.set()

    async def fan() -> None:
        inside.set()
        await done.wait()
        for enqueued in (job.enqueue, job.enqueue_many):
            with pytest.raises(UsageError, match=r"job\.enqueue\(\) in step 'fan': a later run"):
                await enqueued(CHILD, [{}])

    task = asyncio.create_task(beside())
    await job.step("fan", fan)
    await task
    refused: list[tuple[str, Callable[..., Any]]] = [("direct", job.enqueue), ("thread", job.sync.enqueue)]
    for name, function in refused:
        with pytest.raises(UsageError, match=f"in step '{name}'"):
            await job.step(name, function, CHILD, {})
    await job.enqueue(CHILD, {"n": "behind"})


def fan_out_plainly(job: Job[Any]) -> None:
    async def in_step() -> None:
        await job.enqueue(CHILD, {})

    refused: list[tuple[str, Callable[[], Any]]] = [
        ("direct", lambda: job.sync.enqueue(CHILD, {})),
        ("coroutine", in_step),
    ]
    for name, function in refused:
        with pytest.raises(UsageError, match=f"in step '{name}'"):
            job.sync.step(name, function)
    job.sync.enqueue(CHILD, {"n": "behind"})


@pytest.mark.parametrize("process", [fan_out, fan_out_plainly], ids=["coroutine", "thread"])
async def test_a_step_enqueues_nothing_for_no_later_run_would_call_it(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    await start(scripted(process))
    job = await client.enqueue(KIND, {}, max_attempts=1)
    await rows.becomes(job.id, "completed")
    expected = ["beside", "behind"] if process is fan_out else ["behind"]
    assert [row["payload"]["n"] for row in await children(rows)] == expected


async def test_a_step_that_completes_the_job_enqueues_with_its_completion(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def complete(job: Job[Any]) -> None:
        async with job.transaction("done"):
            await job.enqueue(CHILD, {"n": 1})

    async def process(job: Job[Any]) -> None:
        await job.step("complete", complete, job)

    await start(scripted(process))
    job = await client.enqueue(KIND, {}, max_attempts=1)
    assert (await rows.becomes(job.id, "completed"))["result"] == "done"
    assert [row["payload"]["n"] for row in await children(rows)] == [1]


async def test_mistakes_are_told_at_once_and_cost_nothing(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    async def process(job: Job[Any]) -> None:
        with pytest.raises(InvalidPayload, match=r"payloads\[1\]"):
            await job.enqueue_many(Child, [{"tenant": "a"}, {}])  # type: ignore[misc] # what it is about
        with pytest.raises(ValueError, match="1 unique_keys for 2 payloads"):
            await job.enqueue_many(CHILD, [1, 2], unique_keys=["a"])
        with pytest.raises(TypeError, match="there is no such argument"):
            await job.enqueue(CHILD, {}, dealy=1)  # type: ignore[call-overload] # what it is about
        await job.enqueue_many(CHILD, [{}] * child_jobs.MOST)
        with pytest.raises(ValueError, match="a run may enqueue 5,000 jobs, not 5,001"):
            await job.enqueue(CHILD, {})

    async def large(job: Job[Any]) -> None:
        payload = "x" * 998
        for _ in range(8):
            await job.enqueue("large", payload)
        with pytest.raises(
            ValueError, match=r"8,000 bytes together \(8 × JSWORKER_MAX_PAYLOAD_BYTES\), not 8,003"
        ):
            await job.enqueue("large", "y")

    async def wide(job: Job[Any]) -> None:
        payloads = ["\N{GRINNING FACE}" * 249] * 8
        with pytest.raises(ValueError, match=r"8,000 bytes together .*, not 8,982"):
            await job.enqueue_many("large", [*payloads, payloads[0]])

    await start(scripted(process))
    small = make_settings(max_payload_bytes=1000)
    await start(scripted(large, kind="fat"), scripted(wide, kind="wide"), with_settings=small)
    for kind in (KIND, "fat", "wide"):
        job = await client.enqueue(kind, {})
        row = await rows.becomes(job.id, "completed")
        assert row["attempts"] == 1, row["last_error"]
    assert len(await children(rows)) == child_jobs.MOST
    assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE kind = 'large'") == 8


async def test_threads_of_one_job_enqueue_at_once(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> None:
        calls = (asyncio.to_thread(job.sync.enqueue_many, CHILD, [{"n": n}] * 20) for n in range(50))
        await asyncio.gather(*calls)

    await start(scripted(process))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert len(await children(rows)) == 1000


async def test_a_child_that_postgresql_refuses_fails_its_parent(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await rows.query("ALTER TABLE jsworker.jobs ADD CONSTRAINT no_children CHECK (kind <> 'child')")
    await start(scripted(raising(StopAsyncIteration("not reached")), kind="other"), scripted(coroutine_child))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "failed")
    assert (row["failure_reason"], "no_children" in row["last_error"]) == ("result", True)


async def coroutine_child(job: Job[Any]) -> None:
    await job.enqueue(CHILD, {})


@pytest.mark.parametrize("in_thread", [False, True])
async def test_the_key_of_an_expired_job_costs_a_transaction_no_attempt(
    client: JobClient, rows: Rows, start: StartWorker, *, in_thread: bool
) -> None:
    # No sweep sees it before the commit.
    expires = text("UPDATE jsworker.jobs SET expires_at = now() - interval '1 s' WHERE unique_key = 'one'")
    child: Any = {"unique_key": "one", "delay": 3600.0}

    async def process(job: Job[Any]) -> None:
        async with job.transaction() as session:
            await session.execute(expires)
            await job.enqueue(CHILD, {}, **child)

    def plain(job: Job[Any]) -> None:
        with job.sync.transaction() as session:
            session.execute(expires)
            job.sync.enqueue(CHILD, {}, **child)

    await client.enqueue(CHILD, {}, unique_key="one", expires_in=600.0)
    await start(scripted(plain if in_thread else process))
    job = await client.enqueue(KIND, {}, max_attempts=1)
    await rows.becomes(job.id, "completed")
    found = await children(rows)
    assert [(row["status"], row["failure_reason"]) for row in found] == [
        ("cancelled", "expired"),
        ("scheduled", None),
    ]


@pytest.mark.filterwarnings(
    "ignore:coroutine 'Job.step:RuntimeWarning", "ignore:coroutine '_enqu:RuntimeWarning"
)
async def test_a_call_without_await_takes_nothing_from_a_transaction_but_the_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async def process(job: Job[Any]) -> None:
        async with job.transaction():
            job.enqueue(CHILD, {"attempt": job.attempt})  # type: ignore[unused-coroutine] # what it is about
            if job.attempt == 1:
                job.step("charge", print)  # type: ignore[unused-coroutine] # likewise

    running = await start(scripted(process))
    job = await client.enqueue(KIND, {})
    assert (await rows.becomes(job.id, "completed"))["attempts"] == 2
    assert [row["payload"] for row in await children(rows)] == [{"attempt": 2}]
    assert (
        "job.step() has done nothing, for it was never awaited" in running.events.of("job.error")[0]["error"]
    )


async def test_a_call_that_is_returned_without_await_takes_the_attempt(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    def plain(job: Job[Any]) -> Any:
        return job.step("charge", print) if job.attempt == 1 else "done"

    running = await start(scripted(plain))
    job = await client.enqueue(KIND, {})
    row = await rows.becomes(job.id, "completed")
    assert (row["attempts"], row["result"]) == (2, "done")
    assert "for it was never awaited" in running.events.of("job.error")[0]["error"]


@pytest.mark.parametrize("how", ["return", "coroutine", "thread"])
async def test_it_stays_its_owners_while_a_producer_takes_the_key_of_a_child(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings, how: str
) -> None:
    async def process(job: Job[Any]) -> None:
        if how == "return":
            await job.enqueue(CHILD, {}, unique_key="taken")
            return
        async with job.transaction():
            await job.enqueue(CHILD, {}, unique_key="taken")

    def plain(job: Job[Any]) -> None:
        with job.sync.transaction():
            job.sync.enqueue(CHILD, {}, unique_key="taken")

    async def waits() -> None:
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type"
        )
        assert await rows.value(waiting + " = 'Lock'")

    running = await start(scripted(plain if how == "thread" else process))
    async with await AsyncConnection.connect(settings.database_dsn()) as producer:
        await producer.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, unique_key, status, run_at)"
            " VALUES (gen_random_uuid(), %s, '{}', 'taken', 'scheduled', now() + interval '1 hour')",
            [CHILD],
        )
        job = await client.enqueue(KIND, {}, max_attempts=1)
        if how == "return":
            await eventually(waits)
        else:
            says = (
                "PostgreSQL failed in the job's own transaction: another transaction is taking the unique key"
            )
            assert (await rows.becomes(job.id, "scheduled"))["clear_reason"].startswith(says)
        await producer.rollback()
    row = await rows.becomes(job.id, "completed")
    assert (row["attempts"], row["errors"], row["stalls"]) == (1, 0, 0)
    assert [row["unique_key"] for row in await children(rows)] == ["taken"]
    assert not running.events.of("job.fenced")
    assert not running.events.of("job.lost")


async def test_a_job_may_follow_itself(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def process(job: Job[Any]) -> None:
        if job.payload["left"]:
            await job.enqueue(KIND, {"left": job.payload["left"] - 1}, unique_key="chain")

    await start(scripted(process))
    await client.enqueue(KIND, {"left": 5}, unique_key="chain")

    async def all_completed() -> None:
        found = await rows.query("SELECT payload ->> 'left' AS n, status FROM jsworker.jobs ORDER BY id")
        assert [(row["n"], row["status"]) for row in found] == [
            (str(n), "completed") for n in (5, 4, 3, 2, 1, 0)
        ]

    await eventually(all_completed)


async def test_children_of_a_quarantined_job(
    client: JobClient, rows: Rows, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    # On a busy machine, the process in which it runs alone does not give itself up.
    patient = make_settings(statement_timeout=5.0, heartbeat_interval=6.0)
    running = await start(Parent, scripted(echo, kind=CHILD), with_settings=patient)
    for how in ("return", "transaction", "raise", "step"):
        job = await client.enqueue(Parent, {"how": how}, max_attempts=1)
        row = await rows.becomes(job.id, "failed" if how in {"raise", "step"} else "completed")
        if how == "return":
            assert row["result"] != os.getpid()
    found = await children(rows)
    assert [row["payload"] for row in found] == [
        {"of": how, "n": n} for how in ("return", "transaction") for n in (0, 1)
    ]
    for row in found:
        await rows.becomes(row["id"], "completed")
    assert all(
        event["quarantined"] for event in running.events.of("job.started") if event["kind"] == "parent"
    )


@pytest.fixture
def _tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    provider = TracerProvider()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield
    provider.shutdown()


@pytest.mark.usefixtures("_tracing")
@pytest.mark.parametrize(
    "process", [coroutine_child, lambda job: job.sync.enqueue(CHILD, {})], ids=["coroutine", "thread"]
)
async def test_the_span_of_the_run_is_the_parent(
    client: JobClient, rows: Rows, start: StartWorker, process: Any
) -> None:
    seen: list[str] = []

    async def noted(job: Job[Any]) -> None:
        context = trace.get_current_span().get_span_context()
        seen.append(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
        await (asyncio.to_thread(process, job) if process is not coroutine_child else process(job))

    await start(scripted(noted))
    job = await client.enqueue(KIND, {})
    await rows.becomes(job.id, "completed")
    assert [row["traceparent"][:-2] for row in await children(rows)] == seen


async def test_without_spans_the_context_of_the_parent_goes_on(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    job = await client.enqueue(KIND, {}, delay=3600)
    await rows.query(
        "UPDATE jsworker.jobs SET traceparent = %s, tracestate = 'a=b', run_at = now() WHERE id = %s",
        TRACEPARENT,
        job.id,
    )
    await start(scripted(coroutine_child))
    await rows.becomes(job.id, "completed")
    assert [(row["traceparent"], row["tracestate"]) for row in await children(rows)] == [(TRACEPARENT, "a=b")]
