"""Many jobs are made without passes of the garbage collector; whoever turned it off finds it off."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.client import job_client, publishing
from jsworker.client.enqueueing import JobOptions, chunks_of_new_jobs, new_jobs
from jsworker.core import garbage
from jsworker.core.garbage import collect_less_often, fewer_collections, no_collection
from tests.support.polling import eventually


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    kept = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*kept)


def test_it_is_on_again_after_the_block_and_after_an_error() -> None:
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="in between"), no_collection():
        raise ValueError("in between")
    assert gc.isenabled()


def test_a_process_that_is_forked_meanwhile_has_it_on() -> None:
    with no_collection():
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_application_that_does_without_it_goes_on_so() -> None:
    gc.disable()
    with no_collection():
        pass
    assert not gc.isenabled()


def test_thousands_of_jobs_are_made_without_a_pass() -> None:
    passes: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            passes.append(info["generation"])

    payloads = [{"n": n} for n in range(20_000)]
    keys: list[str | None] = [None] * len(payloads)
    gc.callbacks.append(note)
    try:
        jobs = new_jobs("kind", payloads, keys, JobOptions.of(1_000, {}))
        made_without = len(passes) <= 12  # a few follow each 5,000; there would be more than fifty
    finally:
        gc.callbacks.remove(note)
    assert len(jobs) == len(payloads)
    assert made_without


@pytest.mark.parametrize(("before", "after"), [(700, 10_000), (2_000, 10_000), (50_000, 50_000), (0, 0)])
def test_collect_less_often_raises_what_is_lower(before: int, after: int) -> None:
    gc.set_threshold(before, 10, 10)
    collect_less_often()
    assert gc.get_threshold() == (after, 10, 10)


@pytest.mark.parametrize(("before", "within"), [(700, 10_000), (50_000, 50_000), (0, 0)])
def test_an_application_gets_its_number_back_at_the_end_of_the_last_block(before: int, within: int) -> None:
    gc.set_threshold(before, 11, 12)
    with fewer_collections():
        with fewer_collections():
            assert gc.get_threshold() == (within, 11, 12)
        assert gc.get_threshold() == (within, 11, 12)
    assert gc.get_threshold() == (before, 11, 12)


def test_a_number_that_is_set_within_the_block_stays() -> None:
    with fewer_collections():
        gc.set_threshold(1_234, 10, 10)
    assert gc.get_threshold() == (1_234, 10, 10)


@contextmanager
def in_a_thread(block: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Let another thread be within a block meanwhile."""
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with block():
            inside.set()
            leave.wait(60)

    other = threading.Thread(target=stay)
    other.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        leave.set()
        other.join()


def test_blocks_of_several_threads_end_with_the_last_of_them() -> None:
    gc.set_threshold(700, 10, 10)
    with in_a_thread(fewer_collections):
        with fewer_collections():
            pass
        assert gc.get_threshold()[0] == 10_000
    assert gc.get_threshold()[0] == 700


def test_a_process_that_is_forked_meanwhile_waits_for_no_other_thread_and_has_its_number_back() -> None:
    gc.set_threshold(700, 10, 10)
    with fewer_collections(), in_a_thread(lambda: garbage._busy_lock):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # the lock's holder does not exist here
            numbers = [gc.get_threshold()[0]]
            with fewer_collections():
                numbers.append(gc.get_threshold()[0])
            numbers.append(gc.get_threshold()[0])
            os._exit(0 if numbers == [700, 10_000, 700] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_block_that_ends_within_the_lock_of_another_waits_for_nobody() -> None:
    gc.set_threshold(700, 10, 10)
    given_up = fewer_collections()
    given_up.__enter__()
    with garbage._busy_lock:  # as a pass of the collector there, which ends an abandoned coroutine's block
        given_up.__exit__(None, None, None)
    assert gc.get_threshold()[0] == 700


async def test_a_client_collects_less_often_until_what_it_enqueued_is_published(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.set_threshold(700, 10, 10)
    numbers: dict[str, list[int]] = {"made": [], "marked": []}

    def chunks(*args: Any) -> Any:
        numbers["made"].append(gc.get_threshold()[0])
        return chunks_of_new_jobs(*args)

    async def mark(*_: Any) -> int:
        numbers["marked"].append(gc.get_threshold()[0])
        return 0

    monkeypatch.setattr(job_client, "chunks_of_new_jobs", chunks)
    monkeypatch.setattr(publishing, "mark", mark)
    await client.enqueue_many("kind", [{"n": n} for n in range(2_000)])

    async def all_marked() -> None:
        assert len(numbers["marked"]) == 2
        assert gc.get_threshold() == (700, 10, 10)

    await eventually(all_marked)
    assert numbers == {"made": [10_000], "marked": [10_000] * 2}
    await client.publish_pending()
    assert gc.get_threshold() == (700, 10, 10)


async def test_a_client_that_publishes_for_long_collects_meanwhile(
    client: JobClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "_COLLECT_SECONDS", 0.01)
    gc.set_threshold(0)  # no pass by itself
    passes: list[int] = []
    go_on = asyncio.Event()

    def note(_phase: str, info: dict[str, int]) -> None:
        passes.append(info["generation"])

    async def mark(*_: Any) -> int:
        await go_on.wait()
        return 0

    monkeypatch.setattr(publishing, "mark", mark)
    gc.callbacks.append(note)
    try:
        await client.enqueue_many("kind", [{}] * 1_000)

        async def collected() -> None:
            assert passes

        await eventually(collected)
    finally:
        gc.callbacks.remove(note)
        go_on.set()
