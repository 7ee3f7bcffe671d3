"""Many jobs are made without passes of the garbage collector; whoever turned it off finds it off."""

import gc
import os
from collections.abc import Iterator

import pytest

from jsworker.client.enqueueing import JobOptions, new_jobs
from jsworker.core.garbage import collect_less_often, no_collection


@pytest.fixture(autouse=True)
def _on_again() -> Iterator[None]:
    yield
    gc.enable()


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
    kept = gc.get_threshold()
    try:
        gc.set_threshold(before, 10, 10)
        collect_less_often()
        assert gc.get_threshold() == (after, 10, 10)
    finally:
        gc.set_threshold(*kept)
