"""Several kinds in one worker: each within its own limit, none behind another, what has no room goes on."""

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest
from nats.js import JetStreamContext
from pydantic import BaseModel

from jsworker import JobClient
from jsworker.core.errors import InvalidTarget
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.core.settings import Settings
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker

MakeSettings = Callable[..., Settings]


class Busy:
    """Notes how many runs of each kind there are at once, and in which order jobs start."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[str] = []

    async def process(self, job: Job[Any]) -> None:
        self.order.append(job.kind)
        for name in (job.kind, "all"):
            self._now[name] += 1
            self.most[name] = max(self.most[name], self._now[name])
        await asyncio.sleep(self._seconds)
        for name in (job.kind, "all"):
            self._now[name] -= 1


async def test_each_kind_keeps_to_its_own_limit_and_all_to_the_workers(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    busy, gate = Busy(0.01), Gate()

    async def process(job: Job[Any]) -> None:
        met[job.kind] += 1
        await gate.process(job)
        await busy.process(job)

    met: Counter[str] = Counter()
    running = await start(
        scripted(process, kind="one", concurrency=1),
        scripted(process, kind="two", concurrency=2),
        scripted(process, kind="any"),
        with_settings=make_settings(concurrency=5),
    )
    for kinds, slots in ((("one", "two"), {"one": 1, "two": 2}), (("any",), {"one": 1, "two": 2, "any": 2})):
        for kind in kinds:
            await client.enqueue_many(kind, [{}] * 30)

        async def all_taken(slots: dict[str, int] = slots) -> None:
            assert met == slots

        await eventually(all_taken)
    gate.open()
    await running.events.told("job.completed", times=90)
    assert busy.most["one"] == 1
    assert busy.most["two"] <= 2
    assert busy.most["all"] <= 5
    await running.stream_is_empty()


@pytest.mark.parametrize("kinds", [("flood", "rare"), ("rare", "flood")], ids=["first", "last"])
@pytest.mark.parametrize(("concurrency", "seconds"), [(1, 0.02), (10, 0.005)], ids=["one slot", "many"])
async def test_a_flood_of_one_kind_does_not_starve_another(
    client: JobClient,
    rows: Rows,
    make_settings: MakeSettings,
    start: StartWorker,
    *,
    kinds: tuple[str, str],
    concurrency: int,
    seconds: float,
) -> None:
    busy = Busy(seconds)
    flood = int(3.0 * concurrency / seconds)
    settings = make_settings(concurrency=concurrency)
    await client.enqueue_many("flood", [{}] * flood)
    await client.enqueue_many("rare", [{}] * 20)

    async def all_are_published() -> None:
        await client.publish_pending()
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 0

    await eventually(all_are_published)
    await start(*(scripted(busy.process, kind=kind) for kind in kinds), with_settings=settings)

    async def all_started() -> None:
        assert busy.order.count("rare") == 20

    await eventually(all_started)
    assert len(busy.order) < flood / 2


async def test_a_kind_has_its_place_in_the_line_beside_a_flood(
    client: JobClient, make_settings: MakeSettings, start: StartWorker
) -> None:
    gate = Gate()
    running = await start(
        scripted(gate.process, kind="flood"),
        scripted(echo, kind="rare"),
        with_settings=make_settings(concurrency=1, heartbeat_interval=20.0),  # later, some are handed back
    )
    flood, rare = running.worker._components.pipeline.consumers
    assert (flood.room(), rare.room()) == (1, 1)
    running.expects_short_runs("flood")
    assert (flood.room(), rare.room()) == (21, 1)  # twenty more fall free within a fifth of a second
    await client.enqueue_many("flood", [{}] * 50)
    await gate.met()

    async def full() -> None:
        assert flood.room() == 0

    await eventually(full)
    assert rare.room() == 1
    gate.open()


async def test_what_a_worker_has_no_room_for_goes_on_to_another_at_once(
    client: JobClient, rows: Rows, js: JetStreamContext, make_settings: MakeSettings, start: StartWorker
) -> None:
    """Each kind pulls for all free slots, so together they may ask for more than there are."""
    settings = make_settings(concurrency=2, ack_wait=600.0)
    gate = Gate()
    kinds = ("a", "b", "c")
    full = await start(*(scripted(gate.process, kind=kind) for kind in kinds), with_settings=settings)
    jobs = [await client.enqueue(kind, {}) for kind in kinds for _ in range(4)]
    for _ in range(2):
        await gate.met()
    other = await start(*(scripted(echo, kind=kind) for kind in kinds), with_settings=settings)
    await other.events.told("job.completed", times=len(jobs) - 2)
    assert len(full.worker._context.in_flight.runs) == 2
    assert gate.waiting == 0
    gate.open()
    for job in jobs:
        await rows.becomes(job.id, "completed")
    await full.stream_is_empty()
    assert full.events.names().count("job.started") == 2


async def test_workers_take_only_the_kinds_that_they_know(
    client: JobClient, rows: Rows, start: StartWorker
) -> None:
    left, right = await start(scripted(echo, kind="left")), await start(scripted(echo, kind="right"))
    jobs = {kind: [await client.enqueue(kind, {}) for _ in range(5)] for kind in ("left", "right", "nobodys")}
    for kind in ("left", "right"):
        for job in jobs[kind]:
            await rows.becomes(job.id, "completed")
    for running, kind in ((left, "left"), (right, "right")):
        assert {event["kind"] for event in running.events.of("job.started")} == {kind}
    for job in jobs["nobodys"]:
        assert (await rows.job(job.id))["status"] == "queued"


async def test_overdue_claims_go_back_when_no_slot_falls_free(
    client: JobClient, rows: Rows, make_settings: MakeSettings, start: StartWorker
) -> None:
    """Runs that were short turn out to be long: others may do what waits here."""
    gate = Gate()
    running = await start(scripted(gate.process, kind="now-slow"), with_settings=make_settings(concurrency=1))
    running.expects_short_runs("now-slow")
    await client.enqueue("now-slow", {})
    await gate.met()
    waiting = await client.enqueue("now-slow", {})
    await running.events.told("job.claimed", times=2)
    [told] = await running.events.told("job.released")
    assert told["job_id"] == str(waiting.id)
    assert told["reason"] == "claimed ahead, but no job slot fell free"
    row = await rows.job(waiting.id)
    assert row["errors"] == row["stalls"] == 0
    gate.open()
    await rows.becomes(waiting.id, "completed")


class NoProcessor:
    kind = "a"


class Same(JobProcessor):
    kind = "same"

    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


class Twin(Same):
    kind = "same"


class Heir(Same):
    """It has a kind of its own: a class inherits everything but that."""


class TakesTwo(JobProcessor):
    async def process(self, _job: Job[Any], _context: Any) -> None:  # type: ignore[override]
        raise AssertionError


class TakesNothing(JobProcessor):
    def process(self) -> None:  # type: ignore[override]
        raise AssertionError


class TakesMore(JobProcessor):
    """Fine: what it takes beside the job has a default."""

    async def process(self, _job: Job[Any], *_more: Any, _other: int = 0) -> None:
        raise AssertionError


class Yields(JobProcessor):
    async def process(self, _job: Job[Any]) -> Any:
        yield 1


def driven(process: Callable[..., Any]) -> Callable[..., Any]:
    """Make a coroutine function of a generator function."""

    @functools.wraps(process)
    async def drive(*arguments: Any) -> list[Any]:
        return list(process(*arguments))

    return drive


class IsDriven(JobProcessor):
    """Fine: what is called does not yield."""

    @driven
    def process(self, _job: Job[Any]) -> Any:
        yield 1


class YieldsPlainly(JobProcessor):
    def process(self, _job: Job[Any]) -> Any:
        yield 1


if TYPE_CHECKING:

    class SeenByTypeCheckers(BaseModel):
        """No more than a name when the program runs."""


class Dangling(JobProcessor["SeenByTypeCheckers"]):
    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


class Connection:
    """What has no JSON form."""


class ReturnsNoJson(JobProcessor):
    async def process(self, _job: Job[Any]) -> Connection:
        raise AssertionError


class Opaque(JobProcessor[Connection]):
    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


class OpaqueWithin(JobProcessor[dict[str, list[Connection]]]):
    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


class ForgetsTheError(JobProcessor):
    async def on_failed(self, _job: Job[Any]) -> None:  # type: ignore[override]
        raise AssertionError

    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


class YieldsInSetup(JobProcessor):
    async def setup(self) -> AsyncIterator[None]:  # type: ignore[override]
        yield

    async def process(self, _job: Job[Any]) -> None:
        raise AssertionError


RULE = "must be a pydantic model, a dataclass, a TypedDict or a type that pydantic knows"
NO_JSON = rf"<class '{__name__}\.Connection'> {RULE}"


@pytest.mark.parametrize(
    ("processors", "line"),
    [
        ([], "a worker needs at least one processor"),
        ([NoProcessor()], "NoProcessor .* is no JobProcessor"),
        (Same, r"^processors must be a list, even of one: \[Same\]$"),
        (Same(), r"^processors must be a list, even of one: \[Same\]$"),
        ([Same, Same], rf"^kind same: its processor {__name__}:Same is given twice$"),
        (
            [Same, Twin],
            rf"^kind same has two processors, {__name__}:Same and {__name__}:Twin: give one of them ",
        ),
        (
            [TakesTwo],
            r"^TakesTwo.process must take the job alone, as process\(self, job\): missing .* '_context'$",
        ),
        (
            [TakesNothing],
            r"^TakesNothing.process must take the job alone, .*: too many positional arguments$",
        ),
        ([Yields], "^Yields.process is a generator: it must return its result, not yield$"),
        ([YieldsPlainly], "^YieldsPlainly.process is a generator"),
        (
            [ForgetsTheError],
            r"^ForgetsTheError.on_failed must be async def on_failed\(self, job, error\): too many",
        ),
        ([YieldsInSetup], r"^YieldsInSetup.setup must be async def setup\(self\), and not yield$"),
        (
            [Dangling],
            "^the payload type of Dangling cannot be used: .*: name 'SeenByTypeCheckers' is not defined$",
        ),
        ([ReturnsNoJson], f"^the return type of ReturnsNoJson cannot be used: {NO_JSON}$"),
        ([Opaque], f"^the payload type of Opaque cannot be used: {NO_JSON}$"),
        ([OpaqueWithin], f"^the payload type of OpaqueWithin cannot be used: {NO_JSON}$"),
    ],
)
def test_what_is_no_set_of_processors_is_refused_in_one_line(
    make_settings: MakeSettings, processors: Any, line: str
) -> None:
    with pytest.raises(InvalidTarget, match=line) as refusal:
        Worker(processors, make_settings())
    assert "\n" not in str(refusal.value)


def test_a_subclass_has_a_kind_of_its_own(make_settings: MakeSettings) -> None:
    assert (Same.kind, Heir.kind) == ("same", "heir")
    Worker([Same, Heir, TakesMore, IsDriven], make_settings())
