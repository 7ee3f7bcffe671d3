"""``kill_worker_during``: a real process dies at the moment asked for, and another one finishes the job."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import SecretStr

from jsworker import Job, JobProcessor, Settings
from jsworker.core.errors import InvalidPayload, InvalidTarget
from jsworker.testing import AfterSeconds, AtEnd, AtProgress, AtStep, kill_worker_during, sync
from tests.support.polling import eventually
from tests.test_contents import OLD, text_of_keys
from tests.testing.jobs_to_kill import (
    NAMED,
    Apart,
    Effects,
    InTransaction,
    Late,
    Quick,
    Slow,
    Stepwise,
    Stuck,
)

Lines = Callable[[], list[str]]


@pytest.fixture
def effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jsworker_settings: Settings) -> Lines:
    """Return what the jobs have done so far."""
    file = tmp_path / "effects"
    monkeypatch.setenv("EFFECTS", str(file))
    return lambda: file.read_text().splitlines()


async def test_killed_at_the_end_all_is_done_twice_and_an_encrypted_result_is_read(
    effects: Lines, jsworker_settings: Settings
) -> None:
    keys = SecretStr(text_of_keys(old=OLD))
    sealed = jsworker_settings.model_copy(update={"encryption_keys": keys})
    killed = await kill_worker_during(Effects, {}, settings=sealed)
    assert (killed.status, killed.result, killed.runs, killed.error) == ("completed", "result", 2, None)
    assert effects() == ["begun", "half", "done"] * 2
    assert "its worker was killed" in str(killed.timeline)


async def test_killed_at_a_step_only_that_one_is_called_twice(effects: Lines) -> None:
    killed = await kill_worker_during(Stepwise, {}, at=AtStep("second"))
    assert (killed.result, killed.runs) == (["first", "second", "third"], 2)
    assert effects() == ["first", "second", "second", "third"]


async def test_a_setting_that_is_none_is_not_set(
    effects: Lines, jsworker_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JSWORKER_CODEC", "not_there:CODEC")
    plain = jsworker_settings.model_copy(update={"codec": None, "nats_tls_ca": None})
    assert (await kill_worker_during(Effects, {}, settings=plain)).runs == 2


async def test_killed_at_a_progress(effects: Lines) -> None:
    assert (await kill_worker_during(Effects, {}, at=AtProgress(0.4))).runs == 2
    assert effects() == ["begun", "begun", "half", "done"]


async def test_killed_after_seconds_also_in_a_plain_function(effects: Lines) -> None:
    killed = await kill_worker_during(Slow, {}, at=AfterSeconds(2.0))
    assert (killed.runs, killed.result) == (2, "its worker was killed")
    assert effects() == ["begun", "begun"]


async def test_killed_behind_its_own_transaction_nothing_is_done_twice(effects: Lines) -> None:
    killed = await kill_worker_during(InTransaction, {})
    assert (killed.status, killed.result, killed.runs) == ("completed", "committed", 1)
    assert effects() == ["done"]


def test_an_instance_and_the_blocking_form(effects: Lines) -> None:
    assert sync.kill_worker_during(NAMED, {}).result == "an instance of named"
    assert effects() == ["an instance of named"] * 2


async def test_a_moment_that_does_not_come_is_told(effects: Lines) -> None:
    with pytest.raises(
        AssertionError, match=r"the job of kind quick ended before progress 0\.5: job\.completed"
    ):
        await kill_worker_during(Quick, {}, at=AtProgress(0.5))
    with pytest.raises(
        AssertionError,
        match=r"^the job of kind late ended before the end of process: job\.cancelled exp",
    ):
        await kill_worker_during(Late, {})
    with pytest.raises(
        AssertionError, match="the job of kind stuck did not come to the end of process within 3 s"
    ):
        await kill_worker_during(Stuck, {}, timeout=3)


async def test_cancelled_it_leaves_no_worker_behind(effects: Lines) -> None:
    async def started() -> psutil.Process:
        children = psutil.Process().children()
        workers = [each for each in children if "jsworker.testing.killed_worker" in each.cmdline()]
        assert workers
        return workers[0]

    killing = asyncio.create_task(kill_worker_during(Stuck, {}, timeout=30))
    worker = await eventually(started)
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert not worker.is_running()


async def test_what_another_process_cannot_make_is_refused(effects: Lines) -> None:
    class Local(JobProcessor):
        async def process(self, job: Job[dict[str, Any]]) -> None:
            await job.update_progress(progress=1.0)

    with pytest.raises(InvalidTarget, match="another process cannot make the processor of kind local"):
        await kill_worker_during(Local, {})
    with pytest.raises(InvalidPayload):
        await kill_worker_during(Quick, [1])
    with pytest.raises(TypeError, match="does not work for kind apart: with isolation its steps"):
        await kill_worker_during(Apart, {}, at=AtStep("second"))


@pytest.mark.parametrize("at", ["end", 0.5, None, AtEnd, ("second",)])
async def test_what_is_no_moment_is_refused_before_anything_starts(at: Any) -> None:
    rule = "must be AtEnd(), AtStep(…), AtProgress(…) or AfterSeconds(…)"
    with pytest.raises(TypeError, match=f"^{re.escape(f'at={at!r} {rule}')}$"):
        await kill_worker_during(Quick, {}, at=at)
