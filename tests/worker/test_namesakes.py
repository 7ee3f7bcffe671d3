"""A worker id that was set belongs to one live worker; the next one after a crash is not kept waiting."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jsworker import JobClient
from jsworker.core.errors import SettingsError
from jsworker.core.settings import Settings, variable_of
from jsworker.ownership.database import Database
from tests.conftest import FAST
from tests.support.fleet import PATIENT, Fleet, fleet_of
from tests.support.polling import eventually
from tests.worker.lives import Lives, ended_pid
from tests.worker.processors import Gate, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import Running, StartWorker, new_worker

NAME = "only-one"
ELSEWHERE: dict[str, Any] = {"hostname": "elsewhere", "boot_id": "another", "pid_namespace": "pid:[1]"}


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def named(make_settings: Callable[..., Settings]) -> Settings:
    """With heartbeats so rare that no busy machine makes a live worker look gone."""
    return make_settings(worker_id=NAME, heartbeat_interval=3.0)


@pytest.fixture
def silent_soon(named: Settings) -> Settings:
    return named.model_copy(update={"heartbeat_interval": FAST["heartbeat_interval"]})


@pytest.fixture
def fleet(named: Settings, tmp_path: Path) -> Iterator[Fleet]:
    with fleet_of(named, tmp_path) as running:
        yield running


@pytest.fixture
def lives(database: Database, rows: Rows, silent_soon: Settings) -> Lives:
    return Lives(database, rows, silent_soon)


async def states(rows: Rows) -> dict[str, str]:
    found = await rows.query("SELECT id, state FROM jsworker.workers")
    return {row["id"]: row["state"] for row in found}


async def test_a_second_live_worker_of_one_name_is_refused_and_harms_nobody(
    client: JobClient, named: Settings, start: StartWorker, rows: Rows
) -> None:
    first = await start(scripted(echo), with_settings=named)
    second = new_worker(scripted(echo), settings=named)
    with pytest.raises(SettingsError) as refused:
        await second.worker.start()
    assert str(refused.value) == (
        f"JSWORKER_WORKER_ID={NAME} must be another one: worker {first.worker.id} has it and is alive, "
        f"pid {os.getpid()} on host {lives_hostname(first)}"
    )
    assert await states(rows) == {first.worker.id: "running", second.worker.id: "stopped"}
    job = await client.enqueue("scripted", {"n": 1})
    await rows.becomes(job.id, "completed")
    # Other names, also longer ones, are nobody's business.
    other = named.model_copy(update={"worker_id": f"{NAME}-2"})
    await start(scripted(echo), with_settings=other)
    # A name is free again as soon as its worker has stopped in order.
    await first.worker.close()
    async with asyncio.timeout(60):
        await start(scripted(echo), with_settings=named)


def lives_hostname(running: Running) -> str:
    return running.worker._me.hostname


async def test_the_command_of_a_second_live_worker_ends_with_exit_code_2(
    named: Settings, start: StartWorker
) -> None:
    values: dict[str, Any] = {name: getattr(named, name) for name in named.model_fields_set}
    environment = {variable_of(name): str(value) for name, value in values.items()}
    # Each of a command's processes has an id of its own.
    first = await start(scripted(echo), with_settings=named.model_copy(update={"worker_id": f"{NAME}-1"}))
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jsworker", "run", "tests.worker.perilous:Stubborn"),
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(30):
            output, errors = await command.communicate()
    finally:
        if command.returncode is None:
            command.kill()
            await command.wait()
    assert f"JSWORKER_WORKER_ID={NAME}-1 must be another one: worker {first.worker.id}" in errors.decode()
    assert (command.returncode, output) == (2, b"")


async def test_a_namesake_that_is_being_stopped_is_waited_for(
    client: JobClient, named: Settings, start: StartWorker, rows: Rows
) -> None:
    gate, patient = Gate(), named.model_copy(update={"shutdown_timeout": 60.0})
    first = await start(scripted(gate.process), with_settings=patient)
    await client.enqueue("scripted", {})
    await gate.met()
    first.worker.stop()

    async def drains() -> None:
        assert await states(rows) == {first.worker.id: "draining"}

    await eventually(drains)
    starting = asyncio.create_task(start(scripted(echo), with_settings=patient))

    async def has_looked() -> None:
        beaten = "SELECT bool_or(last_seen_at > started_at) FROM jsworker.workers WHERE id <> %s"
        assert starting.done() or await rows.value(beaten, first.worker.id)

    await eventually(has_looked)
    assert not starting.done()
    gate.open()
    second = await starting
    assert await states(rows) == {first.worker.id: "stopped", second.worker.id: "running"}


async def test_after_a_kill_the_next_of_its_name_starts_at_once(
    fleet: Fleet, start: StartWorker, named: Settings
) -> None:
    # By its silence alone it would be waited for half a minute.
    [victim] = await fleet.started(1, **PATIENT)
    victim.kill()
    async with asyncio.timeout(PATIENT["heartbeat_interval"]):
        await start(scripted(echo), with_settings=named)


async def test_a_silent_namesake_of_another_host_is_waited_for_and_passed(
    lives: Lives, start: StartWorker, named: Settings, rows: Rows
) -> None:
    await lives.add(f"{NAME}-01234567", pid=ended_pid(), **ELSEWHERE)
    running = await start(scripted(echo), with_settings=named)
    waited = await rows.value(
        "SELECT extract(epoch FROM clock_timestamp() - last_seen_at)::float8 FROM jsworker.workers"
        " WHERE id = %s",
        f"{NAME}-01234567",
    )
    patience = 3 * FAST["heartbeat_interval"]
    assert patience < waited < patience + 4
    assert await lives.kept() == {f"{NAME}-01234567"}  # its silence says nothing about its jobs
    assert (await states(rows))[running.worker.id] == "running"


async def test_a_silent_namesake_whose_heartbeat_lies_ahead_is_passed(
    lives: Lives, start: StartWorker, named: Settings, rows: Rows
) -> None:
    """The database's clock was ahead when it beat last, and is corrected."""
    dead = await lives.add(f"{NAME}-01234567", pid=ended_pid(), **ELSEWHERE)
    await rows.query("UPDATE jsworker.workers SET last_seen_at = last_seen_at + interval '1 h'")
    async with asyncio.timeout(60):
        await start(scripted(echo), with_settings=named)
    assert await lives.kept() == {dead.id}


async def test_whoever_waits_for_a_namesake_is_alive_to_the_next_one(
    lives: Lives, start: StartWorker, named: Settings, rows: Rows
) -> None:
    before = await lives.add(f"{NAME}-01234567", pid=ended_pid(), heartbeat_interval=4.0, **ELSEWHERE)
    starting = asyncio.create_task(start(scripted(echo), with_settings=named))

    async def beats_while_it_waits() -> None:
        beaten = await rows.value(
            "SELECT max(extract(epoch FROM last_seen_at - started_at))::float8 FROM jsworker.workers"
            " WHERE id <> %s",
            before.id,
        )
        assert (beaten or 0.0) > 3 * FAST["heartbeat_interval"]
        assert not starting.done()

    await eventually(beats_while_it_waits)
    await rows.query("UPDATE jsworker.workers SET state = 'stopped' WHERE id = %s", before.id)
    await starting


@pytest.mark.parametrize("_round", range(2))
async def test_of_two_that_start_at_once_exactly_one_is_refused(
    named: Settings, rows: Rows, _round: int
) -> None:
    pair = [new_worker(scripted(echo), settings=named) for _ in range(2)]
    outcomes = await asyncio.gather(*(each.worker.start() for each in pair), return_exceptions=True)
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert [type(error) for error in refused] == [SettingsError], outcomes
    assert sorted((await states(rows)).values()) == ["running", "stopped"]
    for each in pair:
        await each.end()
