"""Natural batching: what gathers, who is told, and how long the first one waits."""

import asyncio
import contextvars
import time
from collections.abc import Sequence
from typing import Any

import pytest

from jsworker.core import batching
from jsworker.core.batching import Batcher
from tests.support.polling import eventually

submitter = contextvars.ContextVar("submitter", default="nobody")


class Door:
    """What a batcher writes through: keeps its batches, and waits while it is shut."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.deaths: list[tuple[str, BaseException]] = []
        self.opened = asyncio.Event()
        self.opened.set()
        self.broken: Exception | None = None

    async def write(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.opened.wait()
        if self.broken is not None:
            raise self.broken
        return [-item for item in items]

    def batcher(self, most: int = 3, **options: Any) -> Batcher[int, int]:
        return Batcher(
            "numbers", self.write, limit=most, died=lambda *death: self.deaths.append(death), **options
        )


@pytest.fixture
async def door() -> Door:
    return Door()


async def test_a_lone_item_waits_for_nothing_and_a_flood_gathers(door: Door) -> None:
    door.opened.clear()
    batcher = door.batcher()
    answers = [batcher.submit(1)]
    await asyncio.sleep(0)
    answers += [batcher.submit(item) for item in range(2, 6)]
    door.opened.set()
    assert await asyncio.gather(*answers) == [-1, -2, -3, -4, -5]
    assert door.batches == [[1], [2, 3, 4], [5]]


async def test_a_write_that_returns_nothing_answers_each_item_with_none() -> None:
    async def write(_: Sequence[int]) -> None:
        return

    batcher: Batcher[int, None] = Batcher("numbers", write, limit=3, died=lambda *_: None)
    taken: list[None] = []
    batcher.post(1, taken.append)
    assert set(await asyncio.gather(batcher.submit(2), batcher.submit(3))) == {None}
    assert taken == [None]


async def test_a_batch_is_written_in_the_context_of_none_of_its_submitters() -> None:
    seen: list[str] = []

    async def write(items: Sequence[int]) -> Sequence[int]:
        seen.append(submitter.get())
        return items

    batcher = Batcher("numbers", write, limit=3, died=lambda *_: None)

    async def submit() -> None:
        submitter.set("a job")
        await batcher.submit(1)

    await asyncio.create_task(submit())
    assert seen == ["nobody"]


async def _posted_by_turn(batcher: Batcher[int, int], *counts: int, blocking_seconds: float = 0.0) -> None:
    for count in counts:
        for number in range(count):
            batcher.post(number)
        await asyncio.sleep(0)
        time.sleep(blocking_seconds)  # noqa: ASYNC251 -- a turn of the event loop in which jobs compute
    await batcher.flush()


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let turns of the event loop take as long as they may take beside other work."""
    monkeypatch.setattr(batching, "_GROWING_SECONDS", 60.0)


@pytest.mark.usefixtures("slow_machine")
async def test_a_batch_that_grows_with_every_turn_waits_for_the_next(door: Door) -> None:
    await _posted_by_turn(door.batcher(most=500), 20, 20, 20, 20)
    assert [len(batch) for batch in door.batches] == [80]


@pytest.mark.usefixtures("slow_machine")
async def test_a_batch_that_grows_is_written_when_it_is_full(door: Door) -> None:
    await _posted_by_turn(door.batcher(most=50), 20, 20, 20)
    assert [len(batch) for batch in door.batches] == [50, 10]


@pytest.mark.usefixtures("slow_machine")
async def test_a_batch_that_grows_no_more_is_written_with_the_next_turn(door: Door) -> None:
    batcher = door.batcher(most=500)
    for number in range(20):
        batcher.post(number)
    for _ in range(3):
        await asyncio.sleep(0)
    assert [len(batch) for batch in door.batches] == [20]
    await batcher.flush()


@pytest.mark.usefixtures("slow_machine")
async def test_what_waits_when_all_tasks_are_cancelled_is_written_by_flush(door: Door) -> None:
    batcher = door.batcher(most=500)
    for number in range(20):
        batcher.post(number)
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    assert (batcher.is_busy, door.batches) == (True, [])
    await batcher.flush()
    assert (batcher.is_busy, [len(batch) for batch in door.batches]) == (False, [20])


async def test_a_few_items_wait_for_no_further_ones(door: Door) -> None:
    await _posted_by_turn(door.batcher(most=500), 3, 3)
    assert [len(batch) for batch in door.batches] == [3, 3]


async def test_a_batch_waits_for_one_turn_that_takes_long(door: Door) -> None:
    await _posted_by_turn(door.batcher(most=500), 20, 20, 20, 20, blocking_seconds=0.05)
    assert [len(batch) for batch in door.batches] == [40, 40]


async def test_who_posts_is_told_if_it_wants_to_be(door: Door) -> None:
    told: list[int] = []
    batcher = door.batcher()
    batcher.post(1, told.append)
    batcher.post(2)
    assert batcher.is_busy
    await batcher.flush()
    assert (told, door.batches, batcher.is_busy) == ([-1], [[1, 2]], False)


@pytest.mark.parametrize("where", ["write", "answer"])
async def test_an_error_kills_nothing_but_its_batch(door: Door, where: str) -> None:
    batcher = door.batcher()
    told: list[int] = []

    def break_down(_: int) -> None:
        raise ValueError(where)

    if where == "write":
        door.broken = ValueError(where)
        batcher.post(1, told.append)
    else:
        batcher.post(1, break_down)
    await batcher.flush()
    [(name, error)] = door.deaths
    assert (name, str(error), told) == ("numbers", where, [])
    door.broken = None
    assert await batcher.submit(2) == -2


async def test_what_is_closed_answers_nobody(door: Door) -> None:
    door.opened.clear()
    batcher = door.batcher()
    told: list[int] = []
    waiting = batcher.submit(1)
    batcher.post(2, told.append)
    await asyncio.sleep(0)
    await batcher.close()
    assert (waiting.cancelled(), told) == (True, [])


async def test_what_is_closed_takes_nothing_more(door: Door) -> None:
    batcher = door.batcher()
    await batcher.close()
    told: list[int] = []
    batcher.post(1, told.append)
    late = batcher.submit(2)
    assert (batcher.is_busy, late.cancelled()) == (False, True)
    assert len(asyncio.all_tasks()) == 1
    await batcher.flush()
    assert (door.batches, told) == ([], [])


async def test_the_first_item_lingers_for_others_until_somebody_flushes(door: Door) -> None:
    batcher = door.batcher(linger=3600.0)
    batcher.post(1)
    await asyncio.sleep(0)
    batcher.post(2)
    await asyncio.sleep(0)
    assert door.batches == []
    await batcher.flush()
    assert door.batches == [[1, 2]]
    batcher.post(3)
    await asyncio.sleep(0)
    assert door.batches == [[1, 2]]
    await batcher.close()


async def test_what_comes_while_a_batch_is_written_lingers_in_its_turn(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = door.batcher(linger=3600.0)
    lingers = 0

    async def linger() -> bool:
        nonlocal lingers
        lingers += 1
        return True

    monkeypatch.setattr(batcher, "_linger_unless_hurried", linger)
    door.opened.clear()
    batcher.post(1)
    await asyncio.sleep(0)
    assert door.batches == [[1]]
    batcher.post(2)
    door.opened.set()
    await batcher.flush()
    assert (lingers, door.batches) == (2, [[1], [2]])


async def test_what_comes_while_a_batch_is_written_fills_the_next_one(door: Door) -> None:
    batcher = door.batcher()
    door.opened.clear()
    for item in range(1, 5):
        batcher.post(item)
    await asyncio.sleep(0)
    assert door.batches == [[1, 2, 3]]
    for item in range(5, 8):
        batcher.post(item)
    door.opened.set()
    await batcher.flush()
    assert door.batches == [[1, 2, 3], [4, 5, 6], [7]]


async def test_what_comes_while_others_linger_lingers_as_long(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = door.batcher(linger=3600.0)
    coming = [2, 3]

    async def linger() -> bool:
        if coming:
            batcher.post(coming.pop(0))
        return True

    monkeypatch.setattr(batcher, "_linger_unless_hurried", linger)
    batcher.post(1)
    await batcher.flush()
    assert door.batches == [[1], [2], [3]]


async def test_and_not_for_ever(door: Door) -> None:
    door.batcher(linger=0.05).post(1)

    async def written() -> None:
        assert door.batches == [[1]]

    await eventually(written)


async def test_a_taker_that_raises_keeps_no_other_from_its_answer(door: Door) -> None:
    told: list[int] = []

    def broken(_answer: int) -> None:
        raise ValueError("mine")

    batcher = door.batcher()
    batcher.post(1, broken)
    batcher.post(2, told.append)
    await batcher.flush()
    assert told == [-2]
    [(name, error)] = door.deaths
    assert (name, type(error)) == ("numbers", ValueError)
