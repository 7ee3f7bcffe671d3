"""Workflows as producers write them: what is enqueued, and what is refused before anything is stored."""

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel

from jsworker import JobClient
from jsworker.client import workflows
from jsworker.client.workflows import Flow, Node
from jsworker.core.errors import (
    DatabaseRefused,
    DatabaseTimeout,
    InvalidName,
    InvalidPayload,
    TransitionRefused,
    UsageError,
    WorkflowFailed,
    WorkflowNotFound,
)
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workflow_enqueue import enqueue_workflow
from tests.support.polling import eventually
from tests.support.proxy import proxied
from tests.worker.rows import Rows


class Day(BaseModel):
    day: int


class Report(JobProcessor[Day]):
    kind = "report"

    async def process(self, job: Job[Day]) -> None:
        raise NotImplementedError


async def nothing_is_stored(rows: Rows) -> None:
    for table in ("jobs", "batches", "workflows"):
        assert await rows.value(f"SELECT count(*) FROM jsworker.{table}") == 0  # noqa: S608


async def test_a_graph_is_enqueued_at_the_end_of_the_block(client: JobClient, rows: Rows) -> None:
    async with client.workflow("nightly") as flow:
        parts = flow.batch("count", [{"n": number} for number in range(3)])
        extra = flow.job("fetch", {}, name="rates", max_attempts=2)
        merge = flow.job(Report, Day(day=1), after=[parts, "rates"], on_failure="run")
        await nothing_is_stored(rows)
    jobs = await rows.query("SELECT * FROM jsworker.jobs ORDER BY id")
    assert [job["kind"] for job in jobs] == ["count"] * 3 + ["fetch", "report"]
    assert [job["status"] for job in jobs] == ["queued"] * 4 + ["scheduled"]
    assert [job["payload"] for job in jobs[:3]] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (jobs[3]["max_attempts"], jobs[4]["held_by"], jobs[4]["payload"]) == (2, "needs", {"day": 1})
    found = await client.workflows.get(flow.id)
    assert (found["name"], found["status"]) == ("nightly", "running")
    assert [(node["name"], node["needs"], node["jobs"]) for node in found["nodes"]] == [
        ("count", [], {"queued": 3}),
        ("rates", [], {"queued": 1}),
        ("report", ["count", "rates"], {"held": 1}),
    ]
    assert [node.id for node in (parts, extra, merge)] == [node["id"] for node in found["nodes"]]


class Text(str, Enum):  # noqa: UP042 -- a StrEnum is formatted by its value
    FLOW = "nightly"
    FIRST = "first"
    RUN = "run"


async def test_members_of_enums_are_names_by_their_values(client: JobClient, rows: Rows) -> None:
    run: Any = Text.RUN
    async with client.workflow(Text.FLOW) as flow:
        first = flow.job("part", {}, name=Text.FIRST)
        flow.job("part", {}, name="second", after=Text.FIRST, on_failure=run)
        flow.job("part", {}, name="third", after=first)
    assert (f"{flow.name}", f"{first.name}") == ("nightly", "first")
    assert await rows.value("SELECT name FROM jsworker.workflows") == "nightly"
    found = await rows.query("SELECT name, on_failure FROM jsworker.batches ORDER BY place")
    assert [tuple(each.values()) for each in found] == [
        ("first", "cancel"),
        ("second", "run"),
        ("third", "cancel"),
    ]


async def test_a_block_that_raises_enqueues_nothing(client: JobClient, rows: Rows) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 -- what the block does is the point
        async with client.workflow("nightly") as flow:
            flow.job("count", {})
            _ = 1 / 0
    await nothing_is_stored(rows)


Fill = Callable[[Flow], Any]
BAD: dict[str, tuple[Fill, type[Exception], str]] = {
    "empty workflow": (lambda _: None, ValueError, "workflow 'nightly' has no nodes"),
    "empty batch": (
        lambda flow: flow.batch("count", []),
        ValueError,
        "node 'count': a batch of 0 jobs; it takes 1 to 100,000",
    ),
    "100,001 members": (
        lambda flow: flow.batch("count", [{}] * 100_001),
        ValueError,
        "node 'count': a batch of 100,001 jobs; it takes 1 to 100,000",
    ),
    "unknown name": (
        lambda flow: flow.job("count", {}, after="parts"),
        ValueError,
        "workflow 'nightly': node 'count' comes after 'parts', which is no node of it",
    ),
    "node of another workflow": (
        lambda flow: flow.job("count", {}, after=NODE_OF_ANOTHER),
        ValueError,
        "node 'count' comes after 'elsewhere', which is no node of it",
    ),
    "circle": (
        lambda flow: [flow.job("count", {}, name=one, after=[two]) for one, two in ("ab", "bc", "ca")],
        ValueError,
        "workflow 'nightly' goes in a circle: 'a' after 'b' after 'c' after 'a'",
    ),
    "itself": (
        lambda flow: flow.job("count", {}, name="a", after="a"),
        ValueError,
        "goes in a circle: 'a' after 'a'",
    ),
    "after nothing": (
        lambda flow: flow.job("count", {}, after=[None]),  # type: ignore[list-item]
        TypeError,
        "node 'count': after=None must be a node or a node's name",
    ),
    "after None": (
        lambda flow: flow.job("count", {}, after=None),  # type: ignore[call-overload]
        TypeError,
        "node 'count': after=None must be a node or a node's name",
    ),
    "name twice": (
        lambda flow: [flow.job("count", {}, name="a") for _ in range(2)],
        ValueError,
        "there is a node 'a' already",
    ),
    "no name": (
        lambda flow: flow.job("count", {}, name=""),
        ValueError,
        "node name '' must be text of 1 to 255 printable characters",
    ),
    "name with NUL": (
        lambda flow: flow.job("count", {}, name="a\0"),
        ValueError,
        r"node name 'a\\x00' must be",
    ),
    "policy": (
        lambda flow: flow.job("count", {}, on_failure="ignore"),  # type: ignore[call-overload]
        ValueError,
        "node 'count': on_failure='ignore' must be 'cancel' or 'run'",
    ),
    "kind": (lambda flow: flow.job("Count Lines", {}), InvalidName, "kind 'Count Lines' must match"),
    "payload": (
        lambda flow: flow.batch(Report, [{"day": 1}, {"day": "x"}]),  # type: ignore[misc]
        InvalidPayload,
        r"payloads\[1\]",
    ),
    "payload that is large": (
        lambda flow: flow.job("count", {"text": "x" * 2_000_000}),
        InvalidPayload,
        "exceeds JSWORKER_MAX_PAYLOAD_BYTES",
    ),
    "one payload": (lambda flow: flow.batch("count", {"n": 1}), TypeError, "payloads must be a list"),
    "attempts": (lambda flow: flow.job("count", {}, max_attempts=0), ValueError, "max_attempts"),
}
NODE_OF_ANOTHER: Node


async def test_what_cannot_be_is_refused_in_one_line_and_stores_nothing(
    client: JobClient, rows: Rows
) -> None:
    global NODE_OF_ANOTHER  # noqa: PLW0603 -- made by a client
    other = client.workflow("other")
    async with other:
        NODE_OF_ANOTHER = other.job("elsewhere", {})
    await rows.query("DELETE FROM jsworker.workflows")
    await rows.query(
        "UPDATE jsworker.jobs SET status = 'cancelled', finished_at = now(), needs_publish = false"
    )
    await rows.query("DELETE FROM jsworker.jobs")

    async def write(fill: Fill) -> None:
        async with client.workflow("nightly") as flow:
            fill(flow)

    for case, (fill, error, message) in BAD.items():
        [refused] = await asyncio.gather(write(fill), return_exceptions=True)
        assert isinstance(refused, error), (case, refused)
        assert re.search(message, str(refused)), (case, refused)
        assert "\n" not in str(refused)
        await nothing_is_stored(rows)


@pytest.mark.parametrize("name", ["", "x" * 256, "a\nb", 7])
async def test_names_of_workflows(client: JobClient, name: Any) -> None:
    with pytest.raises(ValueError, match=r"workflow name .* must be text of 1 to 255 printable characters"):
        client.workflow(name)


async def test_as_many_nodes_as_there_may_be(client: JobClient) -> None:
    with pytest.raises(ValueError, match="more than 1,000 nodes"):  # noqa: PT012 -- as above
        async with client.workflow("nightly") as flow:
            for _ in range(1001):
                flow.job("count", {})


async def test_nodes_are_added_inside_the_block_alone(client: JobClient) -> None:
    flow = client.workflow("nightly")
    with pytest.raises(RuntimeError, match="inside its `async with` block"):
        flow.job("count", {})
    with pytest.raises(RuntimeError, match="was not enqueued"):
        await flow.result()
    async with flow:
        flow.job("count", {})
    with pytest.raises(RuntimeError, match="inside its `async with` block"):
        flow.job("count", {})
    with pytest.raises(RuntimeError, match="each is enqueued once"):
        async with flow:
            pass


async def test_a_hundred_thousand_members(client: JobClient, rows: Rows) -> None:
    async with client.workflow("large") as flow:
        flow.batch("count", [{}] * 100_000)
        flow.batch("merge", [{}] * 2, after="count")
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 100_002
    assert (await client.workflows.get(flow.id))["nodes"][0]["jobs"] == {"queued": 100_000}


async def test_listing(client: JobClient) -> None:
    flows = []
    for number in range(3):
        async with client.workflow(f"flow {number}") as flow:
            flow.job("count", {})
        flows.append(flow.id)
    listed = await client.workflows.list(limit=2)
    assert [each["name"] for each in listed] == ["flow 2", "flow 1"]
    assert (listed[0]["nodes"], listed[0]["nodes_finished"], listed[0]["status"]) == (1, 0, "running")
    assert [each["id"] for each in await client.workflows.list(after=flows[1])] == [flows[0]]
    with pytest.raises(ValueError, match="limit"):
        await client.workflows.list(limit=0)


@pytest.mark.parametrize("unknown", ["nightly", "01a20f47-e801-7589-9415-c0d406396231"])
async def test_unknown_workflows(client: JobClient, unknown: str) -> None:
    with pytest.raises(WorkflowNotFound, match=f"no workflow has id .*{unknown}"):
        await client.workflows.get(unknown)
    for call in (client.workflows.cancel, client.workflows.retry):
        with pytest.raises((TransitionRefused, WorkflowNotFound), match="no workflow"):
            await call(unknown)
    assert not issubclass(WorkflowNotFound, UsageError)


async def test_a_result_that_does_not_come_in_time(client: JobClient) -> None:
    async with client.workflow("nightly") as flow:
        flow.job("count", {})
    for timeout in (0.2, timedelta(seconds=0.2)):
        with pytest.raises(TimeoutError, match=rf"^node 'count' of workflow {flow.id} .* within 0\.2 s$"):
            await flow.result(timeout)
    for bad, error in ((0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("5", TypeError)):
        with pytest.raises(error, match=r"^timeout=.* must be "):
            await flow.result(bad)  # type: ignore[arg-type]
    waiting = asyncio.create_task(flow.result(timeout=60))
    await client.workflows.cancel(flow.id)
    with pytest.raises(WorkflowFailed, match=r"node 'count' has no result: job .* is cancelled$"):
        await waiting
    assert (await client.workflows.get(flow.id))["status"] == "cancelled"


@pytest.mark.parametrize("is_stored", [True, False])
async def test_without_an_answer_it_is_unclear_whether_a_workflow_was_enqueued(
    client: JobClient, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    async def lose_the_answer(database: Database, **given: Any) -> None:
        if is_stored:
            await enqueue_workflow(database, **given)
        raise DatabaseTimeout("no answer")

    monkeypatch.setattr(workflows, "enqueue_workflow", lose_the_answer)
    flow = client.workflow("nightly")
    unclear = (
        rf"^it is unclear whether workflow 'nightly' was enqueued: client\.workflows\.get\('{flow.id}'\)"
        " finds it if it was"
    )
    with pytest.raises(DatabaseTimeout, match=f"{unclear}: no answer$"):
        async with flow:
            flow.job("count", {})
    with pytest.raises(RuntimeError, match=f"{unclear}$"):
        await flow.result(timeout=60)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=f"{unclear}$"):
        async with flow:
            pass
    with pytest.raises(RuntimeError, match=f"{unclear}$"):
        await flow.result(timeout=60)
    assert [each["id"] for each in await client.workflows.list()] == [flow.id] * is_stored


async def test_a_workflow_that_is_refused_was_not_enqueued(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_database: Database, **_given: Any) -> None:
        raise DatabaseRefused("no rights")

    monkeypatch.setattr(workflows, "enqueue_workflow", refuse)
    with pytest.raises(DatabaseRefused, match=r"^no rights$"):
        async with client.workflow("nightly") as flow:
            flow.job("count", {})
    with pytest.raises(RuntimeError, match=r"^workflow 'nightly' was not enqueued: "):
        await flow.result(timeout=60)


async def test_a_result_waits_for_a_database_that_is_away(
    client: JobClient, make_settings: Callable[..., Settings], database_url: str
) -> None:
    async with proxied(database_url) as (proxy, url), JobClient(make_settings(database_url=url)) as far:
        async with far.workflow("nightly") as flow:
            flow.job("count", {})
        proxy.cut()

        async def is_said() -> None:  # on a busy machine an answer may take longer than a second
            with pytest.raises(TimeoutError) as caught:
                await flow.result(1)
            assert re.search(r"within 1 s: PostgreSQL at .* is not available", str(caught.value))

        await eventually(is_said)
        waiting = asyncio.create_task(flow.result(60))
        await client.workflows.cancel(flow.id)
        proxy.restore()
        with pytest.raises(WorkflowFailed, match="is cancelled"):
            await waiting
