"""Where runs and workers are: asked over a real server, told as code places and nothing else."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.job import Job
from jsworker.core.settings import Settings
from jsworker.core.tracebacks import frames_of_task
from jsworker.stream.liveness import Answer, ask_stacks
from jsworker.worker import stacks
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker.perilous import Perilous
from tests.worker.processors import Gate, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker

PAYLOAD = {"password": "not-for-anybody"}


async def told(settings: Settings, worker_id: str, job_id: Any = None) -> dict[str, Any]:
    reply = await ask_stacks(settings, worker_id, job_id=job_id, seconds=30.0)
    assert reply.answer is Answer.ALIVE, reply
    assert PAYLOAD["password"].encode() not in reply.content
    answer: dict[str, Any] = json.loads(reply.content)
    assert answer["worker_id"] == worker_id
    return answer


def functions(stack: dict[str, Any]) -> list[str]:
    return [function.rpartition(".")[2] for _, _, function in stack["places"]]


async def forever() -> None:
    await asyncio.Event().wait()


async def endless() -> AsyncIterator[int]:
    yield 1
    await forever()


async def awaits(_: Job[Any]) -> None:
    await forever()


async def gathers(_: Job[Any]) -> None:
    await asyncio.gather(forever(), asyncio.sleep(3600))


async def groups(_: Job[Any]) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(forever())


async def iterates(_: Job[Any]) -> None:
    async for _number in endless():
        pass


async def awaits_task(_: Job[Any]) -> None:
    await asyncio.create_task(forever())


def blocks(job: Job[Any]) -> None:
    while not job.should_stop:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "case",
    [
        (awaits, ["awaits", "forever", "wait"], []),
        (gathers, ["gathers"], [["forever", "wait"], ["sleep"]]),
        (groups, ["groups", "__aexit__"], [["forever", "wait"]]),
        (iterates, ["iterates", "endless", "forever", "wait"], []),
        (awaits_task, ["awaits_task", "forever", "wait"], [["forever", "wait"]]),
        (blocks, ["process", "plain", "blocks"], []),
    ],
    ids=lambda case: case[0].__name__,
)
async def test_a_run_tells_at_which_places_it_is(
    client: JobClient,
    settings: Settings,
    start: StartWorker,
    case: tuple[Callable[[Job[Any]], Any], list[str], list[list[str]]],
) -> None:
    process, first, others = case
    running = await start(scripted(process))
    job = await client.enqueue("scripted", PAYLOAD)

    async def found() -> dict[str, Any]:
        answer = await told(settings, running.worker.id, job.id)
        assert answer["job"] is not None
        assert answer["job"]["phase"] == "running"
        own, *rest = answer["job"]["stacks"]
        assert first[-1] in functions(own)
        assert sorted(map(functions, rest)) == sorted(others)
        return answer

    run = (await eventually(found))["job"]
    assert (run["job_id"], run["kind"], run["attempt"]) == (str(job.id), "scripted", 1)
    assert run["seconds"] >= 0
    own = run["stacks"][0]
    assert own["of"] == ("coroutine" if inspect.iscoroutinefunction(process) else "thread")
    names = [name for name in functions(own) if name not in {"process", "plain", "coroutine"}]
    assert names[: len(first)] == [name for name in first if name not in {"process", "plain"}]
    [place] = [place for place in own["places"] if place[2] == process.__name__]
    lines, begins = inspect.getsourcelines(process)
    assert place[0] == __file__
    assert begins < place[1] < begins + len(lines)


async def test_a_run_is_shown_without_what_wraps_its_thread(
    client: JobClient, settings: Settings, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_of_threads = threading.Thread.run

    def wrapped(thread: threading.Thread) -> None:
        run_of_threads(thread)

    monkeypatch.setattr(threading.Thread, "run", wrapped)
    running = await start(scripted(blocks))
    job = await client.enqueue("scripted", PAYLOAD)

    async def found() -> list[str]:
        answer = await told(settings, running.worker.id, job.id)
        assert answer["job"], "it has not been claimed"
        assert answer["job"]["stacks"], "the run has not begun"
        names = functions(answer["job"]["stacks"][0])
        assert "blocks" in names
        return names

    assert (await eventually(found))[:2] == ["plain", "blocks"]


async def test_a_worker_tells_of_its_runs_threads_and_tasks(
    client: JobClient, settings: Settings, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(scripted(gate.process), scripted(blocks, kind="blocks"))
    jobs = [await client.enqueue("scripted", PAYLOAD), await client.enqueue("blocks", PAYLOAD)]
    await gate.met()

    async def found() -> dict[str, Any]:
        answer = await told(settings, running.worker.id)
        assert len(answer["jobs"]) == 2
        return answer

    answer = await eventually(found)
    assert {run["job_id"] for run in answer["jobs"]} == {str(job.id) for job in jobs}
    assert {run["stacks"][0]["of"] for run in answer["jobs"]} == {"coroutine", "thread"}
    assert not any("blocks" in functions(stack) for stack in answer["threads"])  # told with its job
    assert any(stack["places"] for stack in answer["tasks"])
    assert (answer["waiting"], answer["left_out"]) == (0, 0)


async def test_an_answer_fits_into_a_message(
    client: JobClient, settings: Settings, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_MOST_BYTES", 500)
    gate = Gate()
    running = await start(scripted(gate.process))
    await client.enqueue("scripted", PAYLOAD)
    await gate.met()
    reply = await ask_stacks(settings, running.worker.id, job_id=None, seconds=30.0)
    assert len(reply.content) < 1000
    assert json.loads(reply.content)["left_out"] > 0


async def test_tasks_are_looked_through_once_and_stacks_read_as_far_as_they_are_sent(
    client: JobClient, settings: Settings, start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[set[asyncio.Task[Any]]] = []
    reads: list[asyncio.Task[Any]] = []
    all_tasks = asyncio.all_tasks

    def looked_through() -> set[asyncio.Task[Any]]:
        looks.append(all_tasks())
        return looks[-1]

    def read(task: asyncio.Task[Any]) -> Any:
        reads.append(task)
        return frames_of_task(task)

    gate = Gate()
    running = await start(scripted(gate.process))
    jobs = [await client.enqueue("scripted", PAYLOAD) for _ in range(5)]
    for _ in jobs:
        await gate.met()
    monkeypatch.setattr(asyncio, "all_tasks", looked_through)
    monkeypatch.setattr("jsworker.worker.stacks.frames_of_task", read)
    assert len((await told(settings, running.worker.id))["jobs"]) == len(jobs)
    assert (len(looks), len(reads) >= len(jobs)) == (1, True)
    looks.clear()
    reads.clear()
    monkeypatch.setattr(stacks, "_MOST_BYTES", 1)
    answer = await told(settings, running.worker.id)
    assert answer["jobs"] == answer["threads"] == answer["tasks"] == []
    assert answer["left_out"] > len(jobs)
    assert len(looks) == 1
    assert len(reads) < len(jobs)


@pytest.mark.parametrize("question", ["01981f3a-0000-7000-8000-000000000000", "nonsense"])
async def test_a_job_that_is_not_in_hand_has_no_stack(
    settings: Settings, start: StartWorker, question: str
) -> None:
    running = await start(scripted(awaits))
    assert (await told(settings, running.worker.id, question))["job"] is None


async def test_who_is_not_there_does_not_answer(settings: Settings) -> None:
    reply = await ask_stacks(settings, "nobody-1-00000000", job_id=None, seconds=30.0)
    assert reply.answer is Answer.NO_RESPONDERS


async def test_a_job_in_quarantine_tells_from_its_own_process(
    client: JobClient, rows: Rows, settings: Settings
) -> None:
    running = Running(Worker([Perilous], settings))
    running.worker.on("*", running.events)
    await running.worker.start()
    try:
        job = await client.enqueue("perilous", {"does": "wait"}, max_stalls=1)

        async def found() -> dict[str, Any]:
            answer = await told(settings, running.worker.id, job.id)
            assert answer["job"]
            assert answer["job"]["stacks"]
            assert "process" in functions(answer["job"]["stacks"][0])
            return answer

        run = (await eventually(found))["job"]
        assert run["alone"] is True
        assert run["stacks"][0]["places"][0][0].endswith("perilous.py")
        [told_of] = (await told(settings, running.worker.id))["jobs"]
        assert (told_of["alone"], told_of["stacks"]) == (True, None)
    finally:
        await running.end()


async def gathers_thousands(_: Job[Any]) -> None:
    await asyncio.gather(*(forever() for _ in range(6_000)))


async def test_a_run_that_waits_for_thousands_of_tasks_costs_nobody_a_connection(
    client: JobClient, rows: Rows, start: StartWorker, settings: Settings
) -> None:
    patient = settings.model_copy(update={"statement_timeout": 15.0, "heartbeat_interval": 16.0})
    running = await start(scripted(gathers_thousands), with_settings=patient)
    job = await client.enqueue("scripted", {})
    await rows.becomes(job.id, "processing")

    async def answered() -> None:
        run = (await told(settings, running.worker.id, job.id))["job"]
        assert run, "the answer to its claim has not come"
        assert run["stacks"], "the run has not begun"
        stacks = run["stacks"]
        assert "gathers_thousands" in functions(stacks[0])
        assert len(stacks) > 50

    await eventually(answered)
    # On a busy machine the loop of this process stands still by itself.
    assert {each["what"] for each in running.events.of("worker.degraded")} <= {"event loop"}
