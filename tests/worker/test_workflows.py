"""Workers run workflows: stage after stage, through failures, and with members that add members."""

import asyncio
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import TextClause

from jsworker import JobClient
from jsworker.client import enqueueing
from jsworker.core.clock import boottime
from jsworker.core.errors import (
    DatabaseTimeout,
    DatabaseUnavailable,
    Fail,
    LockTimeout,
    Snooze,
    TransitionRefused,
    UsageError,
    WorkflowFailed,
)
from jsworker.core.job import Job
from jsworker.core.limits import Limit
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.pool import Parameters
from jsworker.ownership.queries import workflow_listing
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions import workflow_control, workflows
from jsworker.ownership.transitions.enqueue import NewJob
from jsworker.worker.pipeline import run_ownership
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.support.rounds import count_rounds, rounds_pass
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


async def double(job: Job[Any]) -> int:
    return int(job.payload["n"]) * 2


async def total(job: Job[Any]) -> dict[str, Any]:
    found = [each async for each in job.results_of("parts")]
    return {"sum": sum(each.result for each in found if each.status == "completed"), "members": len(found)}


async def test_a_graph_runs_stage_by_stage(client: JobClient, rows: Rows, start: StartWorker) -> None:
    running = await start(scripted(double, kind="double"), scripted(total, kind="total"))
    async with client.workflow("sums") as flow:
        flow.batch("double", [{"n": number} for number in range(500)], name="parts")
        flow.job("total", {}, after="parts")
    assert await flow.result(timeout=60) == {"sum": 249_500, "members": 500}
    await running.events.told("workflow.finished")
    [end] = running.events.of("workflow.finished")
    assert (end["workflow"], end["name"], end["outcome"], end["batches"]) == (
        str(flow.id),
        "sums",
        "completed",
        2,
    )
    assert Counter(event["outcome"] for event in running.events.of("batch.finished")) == {"completed": 2}
    held = "SELECT count(*) FROM jsworker.jobs WHERE kind = 'total' AND dispatch = 1 AND attempts = 1"
    assert await rows.value(held) == 1


@pytest.mark.parametrize("jobs", [1, 30])
async def test_the_results_of_a_batch_come_in_the_order_of_its_payloads(
    client: JobClient, start: StartWorker, jobs: int
) -> None:
    await start(scripted(double, kind="double"))
    async with client.workflow("sums") as flow:
        flow.batch("double", [{"n": number} for number in range(jobs)])
    assert await flow.result(timeout=60) == [2 * number for number in range(jobs)]


async def test_results_that_are_too_large_for_a_page_come_in_smaller_ones(
    client: JobClient, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, pages = Database.run_along_index, list[int]()

    async def read_in_time(
        database: Database, statement: TextClause, parameters: Parameters, **seconds: Any
    ) -> Any:
        if statement is workflow_listing.RESULTS:
            assert isinstance(parameters, dict)
            pages.append(parameters["limit"])
            if pages[-1] > 30:
                raise DatabaseTimeout("PostgreSQL did not answer within 3 s")
        return await read(database, statement, parameters, **seconds)

    monkeypatch.setattr(Database, "run_along_index", read_in_time)
    await start(scripted(double, kind="double"), scripted(total, kind="total"))
    async with client.workflow("sums") as flow:
        flow.batch("double", [{"n": number} for number in range(50)], name="parts")
        flow.job("total", {}, after="parts")
    assert await flow.result(timeout=60) == {"sum": 2450, "members": 50}
    assert pages.count(10) >= 5


async def test_a_large_result_is_read_alone_and_gets_more_time_after_each_try(
    make_settings: Callable[..., Settings], database_url: str, start: StartWorker
) -> None:
    large = secrets.token_hex(100_000)

    async def part(job: Job[Any]) -> str:
        return large if job.payload["large"] else "small"

    async def sizes(job: Job[Any]) -> list[int]:
        return sorted([len(each.result) async for each in job.results_of("parts")])

    await start(scripted(part, kind="part"), scripted(sizes, kind="sizes"))
    async with (
        proxied(database_url) as (proxy, url),
        JobClient(make_settings(database_url=url)) as client,
    ):
        async with client.workflow("large") as flow:
            flow.batch("part", [{"large": True}, {"large": False}], name="parts")
            flow.job("sizes", {}, after="parts")
        assert await flow.result(timeout=60) == [5, 200_000]
        async with client.workflow("one") as flow:
            flow.batch("part", [{"large": False}, {"large": True}])
        assert await flow.result(timeout=60) == ["small", large]
        client.database._statement_timeout = 1.0
        proxy.slow_down(0.06, dribble_bytes=8_192)
        assert await flow.result(timeout=60) == ["small", large]


async def test_a_plain_function_reads_results_too(client: JobClient, start: StartWorker) -> None:
    def summed(job: Job[Any]) -> int:
        return sum(each.result for each in job.sync.results_of("double"))

    await start(scripted(double, kind="double"), scripted(summed, kind="total"))
    async with client.workflow("sums") as flow:
        flow.batch("double", [{"n": 1}, {"n": 2}])
        flow.job("total", {}, after="double")
    assert await flow.result(timeout=60) == 6


async def test_a_job_waits_for_no_workflow_whose_jobs_could_wait_for_its_slot(
    client: JobClient, start: StartWorker
) -> None:
    async def outer(job: Job[Any]) -> Any:
        async with client.workflow("inner") as flow:
            parts = flow.batch("double", [{"n": 1}, {"n": 2}])
            flow.job("total", {}, after=[flow.job("other", {}, after=parts)])
        try:
            return await flow.result(60)
        except UsageError as error:
            return str(error)

    await start(scripted(outer, kind="outer"), scripted(double, kind="double"))
    said = await (await client.enqueue("outer", {})).result(60)
    assert said.startswith(
        "node 'total' cannot be waited for inside a job of this worker, which serves kind double"
    )


async def test_a_job_may_wait_for_a_workflow_of_other_workers_or_one_that_has_finished(
    client: JobClient, start: StartWorker
) -> None:
    async def outer(job: Job[Any]) -> Any:
        async with client.workflow("inner") as flow:
            flow.job("outer", {"is_inner": True})  # which nobody waits for
            flow.batch("double", [{"n": 1}, {"n": 2}])
        return await flow.result(60)

    async def both(job: Job[Any]) -> Any:
        async with client.workflow("inner") as flow:
            flow.job("both", {"is_inner": True})

        async def finished() -> None:
            assert (await client.workflows.get(flow.id))["status"] == "completed"

        await eventually(finished)
        return await flow.result(60)

    def unless_inner(process: Callable[[Job[Any]], Any]) -> Callable[[Job[Any]], Any]:
        async def run(job: Job[Any]) -> Any:
            return "inner" if job.payload.get("is_inner") else await process(job)

        return run

    await start(scripted(unless_inner(outer), kind="outer"), scripted(unless_inner(both), kind="both"))
    await start(scripted(double, kind="double"))
    assert await (await client.enqueue("outer", {})).result(60) == [2, 4]
    assert await (await client.enqueue("both", {})).result(60) == "inner"


async def test_a_failure_cancels_and_a_retry_goes_on(client: JobClient, start: StartWorker) -> None:
    is_broken = True

    async def perhaps(job: Job[Any]) -> int:
        if is_broken and job.payload["n"] == 3:
            raise ValueError("broken")
        return int(job.payload["n"])

    async def read(job: Job[Any]) -> Any:
        return [each.result async for each in job.results_of("total")]

    kinds = (scripted(total, kind="total"), scripted(read, kind="read"))
    await start(scripted(perhaps, kind="double", max_attempts=1), *kinds)
    async with client.workflow("sums") as flow:
        parts = flow.batch("double", [{"n": number} for number in range(5)], name="parts")
        flow.job("total", {}, after="parts")
        flow.job("read", {}, after="total")
    broken = rf"job {parts.new[3].id} of node 'parts' failed: ValueError: broken"
    with pytest.raises(WorkflowFailed, match=rf"^node 'read' has no result: job .* is cancelled: {broken}$"):
        await flow.result(timeout=60)
    found = await client.workflows.get(flow.id)
    assert (found["errors"][0]["node"], found["nodes"][1]["outcome"]) == ("parts", "cancelled")
    is_broken = False
    assert await client.workflows.retry(flow.id) == 1
    assert await flow.result(timeout=60) == [{"sum": 10, "members": 5}]


async def test_a_failure_before_is_not_named_where_an_operator_has_cancelled(
    client: JobClient, start: StartWorker
) -> None:
    begun = asyncio.Event()

    async def broken(_: Job[Any]) -> None:
        raise ValueError("broken")

    async def clean_up(_: Job[Any]) -> None:
        begun.set()
        await asyncio.sleep(60)

    await start(
        scripted(broken, kind="double", max_attempts=1),
        scripted(clean_up, kind="clean-up"),
        scripted(echo, kind="total"),
    )
    async with client.workflow("sums") as flow:
        flow.job("double", {})
        cleaning = flow.job("clean-up", {}, after="double", on_failure="run")
        flow.job("total", {}, after="clean-up")
    async with asyncio.timeout(60):
        await begun.wait()
    assert await client.cancel(cleaning.new[0].id)
    with pytest.raises(WorkflowFailed, match=r"^node 'total' has no result: job \S+ is cancelled$"):
        await flow.result(timeout=60)


async def test_a_retry_while_the_results_are_read_is_waited_for(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    async def second_time(job: Job[Any]) -> int:
        tries.append(job.payload["n"])
        if len(tries) == 1:
            raise ValueError("broken")
        return int(job.payload["n"])

    retried: list[int] = []
    read = workflow_listing.results

    async def after_a_retry(*given: Any, **tries: Any) -> Any:
        if not retried:
            retried.append(await client.workflows.retry(flow.id))
        return await read(*given, **tries)

    monkeypatch.setattr(workflow_listing, "results", after_a_retry)
    await start(scripted(second_time, kind="double", max_attempts=1))
    async with client.workflow("sums") as flow:
        flow.job("double", {"n": 3})
    assert await flow.result(timeout=60) == 3
    assert retried == [1]
    await rows.query("DELETE FROM jsworker.jobs")
    with pytest.raises(WorkflowFailed, match=r"node 'double' has no result: job .* was pruned"):
        await flow.result(timeout=60)


async def test_what_runs_after_failures_too_sees_them(client: JobClient, start: StartWorker) -> None:
    async def fails(job: Job[Any]) -> None:
        raise ValueError("broken")

    async def report(job: Job[Any]) -> list[list[Any]]:
        return [[each.status, (each.error or "").split("\n")[0]] async for each in job.results_of("double")]

    await start(scripted(fails, kind="double", max_attempts=1), scripted(report, kind="report"))
    async with client.workflow("sums") as flow:
        flow.job("double", {})
        flow.job("report", {}, after="double", on_failure="run")
    assert await flow.result(timeout=60) == [["failed", "ValueError: broken"]]


@pytest.mark.parametrize("is_swallowed", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
async def test_results_are_read_anew_if_a_job_is_retried_meanwhile(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_open: bool,
    is_plain: bool,
    is_swallowed: bool,
) -> None:
    monkeypatch.setattr(run_ownership, "_OPEN_AGAIN_SECONDS", 0.1)
    retried, finishes, goes_on = asyncio.Event(), asyncio.Event(), threading.Event()
    runs: list[list[int]] = []
    swallowed = [Snooze] if is_swallowed else []

    async def part(job: Job[Any]) -> int:
        if job.payload["n"] == 0:
            if not retried.is_set():
                raise Fail("broken")
            await finishes.wait()
        return int(job.payload["n"])

    async def read(job: Job[Any]) -> list[int]:
        runs.append([])
        with suppress(*swallowed):
            async for each in job.results_of("parts"):
                runs[-1].append(each.result)
                await asyncio.to_thread(goes_on.wait, 60)
        return sorted(runs[-1])

    def read_plainly(job: Job[Any]) -> list[int]:
        runs.append([])
        with suppress(*swallowed):
            for each in job.sync.results_of("parts"):
                runs[-1].append(each.result)
                goes_on.wait(60)
        return sorted(runs[-1])

    async def begun() -> None:
        assert runs
        assert runs[0]

    async def begun_anew() -> None:
        assert len(runs) >= 3

    async def finished_again() -> None:
        sql = "SELECT count(*) FROM jsworker.batches WHERE name = 'parts' AND finished_at IS NOT NULL"
        assert await rows.value(f"{sql} AND generation = 1") == 1

    reader = scripted(read_plainly if is_plain else read, kind="read", max_attempts=1)
    await start(scripted(part, kind="part"), reader)
    async with client.workflow("sums") as flow:
        flow.batch("part", [{"n": number} for number in range(60)], name="parts")
        flow.job("read", {}, after="parts", on_failure="run")
    await eventually(begun)
    retried.set()
    assert await client.workflows.retry(flow.id) == 1
    if not is_open:
        finishes.set()
        await eventually(finished_again)
    goes_on.set()
    if is_open:
        await eventually(begun_anew)
        assert runs[1] == []  # the node was open from the beginning
        finishes.set()
    assert await flow.result(timeout=60) == list(range(60))
    [reading] = await rows.query("SELECT attempts, errors, snoozes FROM jsworker.jobs WHERE kind = 'read'")
    assert (reading["attempts"], reading["errors"], reading["snoozes"]) == (1, 0, 0)


async def test_results_of_what_is_no_need(client: JobClient, start: StartWorker) -> None:
    async def wrong(job: Job[Any]) -> str:
        try:
            return str([each async for each in job.results_of("elsewhere")])
        except ValueError as error:
            return str(error)

    await start(scripted(double, kind="double"), scripted(wrong, kind="wrong"))
    async with client.workflow("sums") as flow:
        flow.job("double", {"n": 1}, name="elsewhere")
        flow.job("double", {"n": 1}, after="elsewhere")
        flow.job("wrong", {}, after="double")
    expected = "results_of('elsewhere'): this job's node does not name it in after=; it names: 'double'"
    assert await flow.result(timeout=60) == expected


async def test_members_add_members(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def spread(job: Job[Any]) -> int:
        if job.payload["n"] == 0:
            await job.add_to_batch("spread", [{"n": number} for number in (1, 2, 3)])
        elif job.payload["n"] == 1:
            async with job.transaction(result=1) as session:
                added = await session.execute(job.add_to_batch_statement("spread", [{"n": 4}]))
                assert len(added.all()) == 1
        return int(job.payload["n"])

    await start(scripted(spread, kind="spread"), scripted(total, kind="total"))
    async with client.workflow("sums") as flow:
        flow.job("spread", {"n": 0}, name="parts")
        flow.job("total", {}, after="parts")
    assert await flow.result(timeout=60) == {"sum": 10, "members": 5}
    assert await rows.value("SELECT generation FROM jsworker.batches WHERE name = 'parts'") == 2


@pytest.mark.parametrize("plain", [False, True])
async def test_a_job_does_not_wait_for_its_own_transaction_to_add_members(
    client: JobClient, rows: Rows, start: StartWorker, *, plain: bool
) -> None:
    refused: list[str] = []

    async def try_to_add(job: Job[Any]) -> None:
        try:
            await job.add_to_batch("spread", [{"n": 2}])
        except UsageError as error:
            refused.append(str(error))

    def try_to_add_plainly(job: Job[Any]) -> None:
        try:
            job.sync.add_to_batch("spread", [{"n": 2}])
        except UsageError as error:
            refused.append(str(error))

    async def spread(job: Job[Any]) -> None:
        if job.payload["n"] == 0:
            with suppress(ZeroDivisionError):
                async with job.transaction() as session:
                    await session.execute(job.add_to_batch_statement("spread", [{"n": 1}]))
                    await try_to_add(job)
                    raise ZeroDivisionError
            await job.add_to_batch("spread", [{"n": 3}])
            async with job.transaction() as session:
                await job.add_to_batch("spread", [{"n": 4}])
                await session.execute(job.add_to_batch_statement("spread", [{"n": 5}]))

    read_in: list[int] = []

    def lazy() -> Iterator[dict[str, int]]:
        read_in.append(threading.get_ident())
        yield {"n": 3}

    def spread_plainly(job: Job[Any]) -> None:
        if job.payload["n"] == 0:
            with suppress(ZeroDivisionError), job.sync.transaction() as session:
                session.execute(job.add_to_batch_statement("spread", [{"n": 1}]))
                try_to_add_plainly(job)
                raise ZeroDivisionError
            job.sync.add_to_batch("spread", lazy())
            assert read_in == [threading.get_ident()]  # to which a queryset's connection belongs
            with job.sync.transaction() as session:
                job.sync.add_to_batch("spread", [{"n": 4}])
                session.execute(job.add_to_batch_statement("spread", [{"n": 5}]))

    await start(scripted(spread_plainly if plain else spread, kind="spread"))
    async with client.workflow("sums") as flow:
        flow.job("spread", {"n": 0})
    await flow.result(timeout=60)
    [why] = refused
    assert "would wait for the end of the job.transaction() in which" in why
    added = await rows.query("SELECT payload FROM jsworker.jobs ORDER BY id")
    assert [job["payload"]["n"] for job in added] == [0, 3, 4, 5]


async def test_adding_members_is_repeated_until_the_database_answers(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First the batch is locked, then an answer is lost."""
    add_members, calls = workflow_control.add_members, 0

    async def at_last(*args: Any, **values: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LockTimeout("another member adds")
        await add_members(*args, **values)
        if calls == 2:
            raise DatabaseUnavailable("the answer is lost")

    monkeypatch.setattr(workflow_control, "add_members", at_last)

    async def spread(job: Job[Any]) -> int:
        if job.payload["n"] == 0:
            await job.add_to_batch("spread", [{"n": 1}, {"n": 2}])
        return int(job.payload["n"])

    await start(scripted(spread, kind="spread"), scripted(total, kind="total"))
    async with client.workflow("sums") as flow:
        flow.job("spread", {"n": 0}, name="parts")
        flow.job("total", {}, after="parts")
    assert await flow.result(timeout=60) == {"sum": 3, "members": 3}
    assert calls == 3
    assert await rows.value("SELECT max(attempts) FROM jsworker.jobs") == 1


async def test_members_of_earlier_transactions_stay_when_a_later_one_is_refused(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the docs say: what was added stays, and the next run adds all members again."""
    monkeypatch.setattr(enqueueing, "_BATCH", 2)
    add_members, calls = workflow_control.add_members, 0

    async def refused_once(*args: Any, **values: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RowRefused("23514", None)
        await add_members(*args, **values)

    monkeypatch.setattr(workflow_control, "add_members", refused_once)

    async def spread(job: Job[Any]) -> int:
        if job.payload["n"] == 0:
            await job.add_to_batch("spread", [{"n": number} for number in (1, 2, 3)])
        return int(job.payload["n"])

    await start(scripted(spread, kind="spread", max_attempts=2))
    async with client.workflow("sums") as flow:
        flow.job("spread", {"n": 0})
    assert await flow.result(timeout=60) == 0
    added = await rows.query("SELECT payload FROM jsworker.jobs ORDER BY id")
    assert [job["payload"]["n"] for job in added] == [0, 1, 2, 1, 2, 3]


async def test_members_are_added_in_statements_of_limited_length(
    client: JobClient, rows: Rows, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_members, lengths = workflow_control.add_members, list[int]()

    async def noting(*args: Any, new: Sequence[NewJob], **values: Any) -> None:
        lengths.append(sum(len(job.payload) for job in new))
        await add_members(*args, new=new, **values)

    monkeypatch.setattr(workflow_control, "add_members", noting)

    async def spread(job: Job[Any]) -> int:
        if job.payload["n"] == 0:
            await job.add_to_batch("spread", [{"n": n, "text": "x" * 150_000} for n in range(1, 11)])
        return int(job.payload["n"])

    await start(scripted(spread, kind="spread"), scripted(total, kind="total"))
    async with client.workflow("sums") as flow:
        flow.job("spread", {"n": 0}, name="parts")
        flow.job("total", {}, after="parts")
    assert await flow.result(timeout=60) == {"sum": 55, "members": 11}
    assert len(lengths) == 2
    assert max(lengths) <= 1_000_000


async def test_a_job_without_a_batch_adds_to_none(client: JobClient, rows: Rows, start: StartWorker) -> None:
    async def adds(job: Job[Any]) -> str:
        try:
            await job.add_to_batch("spread", [{}])
        except TransitionRefused as error:
            return str(error)
        return ""

    await start(scripted(adds))
    job_id = (await client.enqueue("scripted", {})).id
    assert "belongs to no batch" in (await rows.becomes(job_id, "completed"))["result"]


async def test_cancelling_stops_what_runs(client: JobClient, start: StartWorker) -> None:
    gate = Gate()
    await start(scripted(gate.process, kind="double"))
    async with client.workflow("sums") as flow:
        flow.batch("double", [{"n": 1}, {"n": 2}])
        flow.job("double", {}, after="double", name="last")
    await gate.met()
    await client.workflows.cancel(flow.id)

    async def ended() -> None:
        assert (await client.workflows.get(flow.id))["status"] == "cancelled"

    await eventually(ended)


async def test_the_scan_finds_what_others_left(client: JobClient, rows: Rows, start: StartWorker) -> None:
    """Ended by an operator's own SQL, or by a worker that died right then."""
    async with client.workflow("sums") as flow:
        flow.job("elsewhere", {}, name="parts")
        flow.job("total", {}, after="parts")
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now(), needs_publish = false "
        "WHERE kind = 'elsewhere'"
    )
    await rows.query("UPDATE jsworker.batches SET on_failure = 'run'")
    await start(scripted(total, kind="total"))
    assert await flow.result(timeout=60) == {"sum": 0, "members": 1}


STALLED_TOO_OFTEN = """
UPDATE jsworker.jobs SET status = 'processing', worker_id = 'gone-1-aaaa', fencing_token = 1,
  attempts = 1, needs_publish = false, claimed_at = now() - interval '1 h',
  last_activity_at = now() - interval '1 h', progress_at = now() - interval '1 h',
  stale_after = interval '1 s', max_stalls = 1, max_attempts = 1 WHERE kind = %s
"""


async def test_a_job_that_stalled_too_often_ends_its_batch(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async with client.workflow("sums") as flow:
        flow.job("elsewhere", {}, name="parts")
        flow.job("total", {}, after="parts")
    await rows.query(STALLED_TOO_OFTEN, "elsewhere")
    await start(scripted(total, kind="total"))
    with pytest.raises(WorkflowFailed, match="is cancelled"):
        await flow.result(timeout=60)
    assert (await client.workflows.get(flow.id))["status"] == "failed"


async def test_what_has_to_follow_a_job_that_others_fail_is_a_node_and_no_hook(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    async with client.workflow("order") as flow:
        flow.job("order", {})
        flow.job("compensate", {}, after="order", on_failure="run")
    await rows.query(STALLED_TOO_OFTEN, "order")
    order = scripted(echo, kind="order")
    await start(order, scripted(echo, kind="compensate"))
    await flow.result(timeout=60)
    assert order.failed == []


async def test_what_is_refused_waits_for_the_next_scan_or_end(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    advance = workflows.advance

    async def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return await advance(*args, **kwargs)

    monkeypatch.setattr(workflows, "advance", counted)
    gate = Gate()
    running = await start(
        scripted(gate.process, kind="gate"),
        scripted(double, kind="double"),
        with_settings=make_settings(scan_interval=600.0, stale_threshold=3600.0, ack_wait=7200.0),
    )
    async with client.workflow("refused") as refused:
        refused.job("gate", {"n": 1})
    await gate.met()
    await rows.query("ALTER TABLE jsworker.batches RENAME TO gone")
    gate.open()

    async def told() -> None:
        assert "workflows" in [event["what"] for event in running.events.of("worker.degraded")]

    await eventually(told)
    await rounds_pass(count_rounds(running.worker._components.fences), 3)
    assert calls == 1
    assert running.worker._context.health.up

    await rows.query("ALTER TABLE jsworker.gone RENAME TO batches")
    async with client.workflow("later") as later:
        later.job("double", {"n": 1})
    assert await later.result(timeout=60) == 2
    assert await refused.result(timeout=60) == {"n": 1}


async def test_batches_that_are_refused_are_one_complaint_which_ends(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    await rows.query(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"
    )
    await rows.query(
        "CREATE TRIGGER theirs BEFORE UPDATE ON jsworker.batches FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    flows = []
    for number in range(3):
        async with client.workflow("refused") as flow:
            flow.job("double", {"n": number})
        flows.append(flow)
    running = await start(scripted(double, kind="double"))
    reported = running.worker._context.complaints._reasons
    what = "rows of workflows and batches"
    await running.events.told("worker.degraded")

    async def all_ended() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'") == 3

    await eventually(all_ended)
    await rounds_pass(count_rounds(running.worker._components.workflows), 2)
    assert set(reported) == {what}
    assert "P0001" in reported[what]

    await rows.query("DROP TRIGGER theirs ON jsworker.batches")
    assert [await flow.result(timeout=60) for flow in flows] == [0, 2, 4]
    [ended] = await running.events.told("worker.restored")
    assert ended["what"] == what


async def test_batches_that_are_refused_hide_no_others_from_scans(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workflows, "_MOST_LEFT", 2)
    flows = []
    for number in range(4):
        async with client.workflow("left") as flow:
            flow.job("double", {"n": number})
            flow.job("double", {"n": number}, name="next", after="double")
        flows.append(flow)
    refused = flows[1].id
    # As workers leave them that were killed before they had finished the batches of their jobs.
    await rows.query(
        "UPDATE jsworker.jobs AS j SET status = 'completed', finished_at = now(), needs_publish = false,"
        " attempts = 1, fencing_token = 1"
        " FROM jsworker.batches AS b WHERE b.id = j.batch_id AND b.name = 'double'"
    )
    await rows.query(
        "ALTER TABLE jsworker.batches ADD CONSTRAINT theirs"
        f" CHECK (workflow > '{refused}' OR finished_at IS NULL)"
    )
    running = await start(scripted(double, kind="double"), with_settings=make_settings(scan_interval=0.5))
    assert [await flow.result(timeout=60) for flow in flows[2:]] == [4, 6]
    reported = running.worker._context.complaints._reasons
    assert "rows of workflows and batches" in reported

    async def ended() -> None:
        assert "rows of workflows and batches" not in reported

    await rows.query("ALTER TABLE jsworker.batches DROP CONSTRAINT theirs")
    assert [await flow.result(timeout=60) for flow in flows[:2]] == [0, 2]
    await eventually(ended)


async def test_a_batch_is_not_looked_after_all_the_time(
    client: JobClient,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[float, float, bool]] = []
    advance = workflows.advance

    async def timed(*values: Any, **names: Any) -> workflows.Advanced:
        began = boottime()
        advanced = await advance(*values, **names)
        looks.append((began, boottime(), bool(advanced.batches)))
        return advanced

    async def short(job: Job[Any]) -> None:
        await asyncio.sleep(0.01)

    monkeypatch.setattr(workflows, "advance", timed)
    # One runs at a time, none waits for it here: after each end this worker has no member in flight.
    await start(scripted(short, kind="short", limit=Limit(1)), with_settings=make_settings(concurrency=2))
    async with client.workflow("many") as flow:
        flow.batch("short", [{}] * 100)
    await flow.result(timeout=60)
    rests = [
        (next_began - ended, ended - began)
        for (began, ended, finished), (next_began, _, _) in pairwise(looks)
        if not finished
    ]
    assert rests
    assert all(rest >= min(5 * took, 0.05) for rest, took in rests)


async def test_a_batch_is_not_asked_about_while_a_member_of_it_runs_here(
    client: JobClient,
    rows: Rows,
    start: StartWorker,
    make_settings: Callable[..., Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    advance = workflows.advance
    gate = Gate()

    async def counted(*values: Any, **names: Any) -> workflows.Advanced:
        nonlocal looks
        looks += 1
        return await advance(*values, **names)

    async def first_waits(job: Job[Any]) -> None:
        if job.payload["n"] == 0:
            begun.set()
            await gate.process(job)
        await begun.wait()  # it may be claimed after the others

    begun = asyncio.Event()
    monkeypatch.setattr(workflows, "advance", counted)
    running = await start(
        scripted(first_waits, kind="first-waits"), with_settings=make_settings(concurrency=20)
    )
    async with client.workflow("many") as flow:
        batch = flow.batch("first-waits", [{"n": n} for n in range(20)])
    await gate.met()

    async def others_have_ended() -> None:
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE status = 'completed'") == 19

    await eventually(others_have_ended)
    in_flight = running.worker._context.in_flight
    assert looks == 0
    assert in_flight.has_member_of(batch.id)
    gate.open()
    await flow.result(timeout=60)
    assert looks > 0
    assert not in_flight.has_member_of(batch.id)
    assert not in_flight._members


async def test_a_worker_that_ends_finishes_the_batches_of_its_last_runs(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process, kind="gated"), scripted(total, kind="total"))

    async def nothing() -> None:
        """Leave what ends to the end of the worker."""

    async with client.workflow("last") as flow:
        flow.job("gated", {}, name="parts")
        flow.job("total", {}, after="parts")
    await gate.met()
    running.worker._components.workflows._step = nothing
    closing = asyncio.create_task(running.worker.close())
    await running.events.told("worker.draining")
    gate.open()
    await closing
    assert await rows.value("SELECT status FROM jsworker.jobs WHERE kind = 'total'") == "queued"
