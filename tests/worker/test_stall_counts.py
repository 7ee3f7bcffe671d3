"""A stall is the job's only when nothing else can have silenced its owner."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.reset import Lateness, Suspect, TakenBack
from jsworker.ownership.upgrading import upgrade_database
from tests.support.polling import eventually
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, new_servers_folder
from tests.worker.lives import Lives
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows, open_rows
from tests.worker.running import Running, StartWorker

LONG_SECONDS, SHORT_SECONDS = 600.0, 0.3


pytestmark = pytest.mark.usefixtures("nothing_is_left")


@pytest.fixture
def settings(make_settings: Callable[..., Settings]) -> Settings:
    """On a busy machine there is no gap between heartbeats but the test's own."""
    return make_settings(heartbeat_interval=1.0)


async def two_silent_jobs_are_taken_back(
    lives: Lives, rows: Rows, running: Running
) -> dict[str, tuple[bool, int, int]]:
    """Wait for the resets of two jobs; return whether each was counted, its stalls and its attempts."""
    # One owner each: a cause is looked for within the longest threshold of an owner's jobs.
    patient = await lives.hold("patient", stale_after=LONG_SECONDS, silent_for=2 * LONG_SECONDS)
    strict = await lives.hold("strict", stale_after=SHORT_SECONDS, silent_for=60)
    late = running.worker._components.late

    async def is_taken_back() -> None:
        if (sighting := late._seen.get(patient)) is not None:
            sighting.at = -math.inf  # it has been watched for a third of its threshold
        assert (await rows.job(patient))["status"] == "queued"

    await eventually(is_taken_back)
    found: dict[str, tuple[bool, int, int]] = {}
    for name, job_id in (("patient", patient), ("strict", strict)):
        row = await rows.becomes(job_id, "queued")
        [reset] = await rows.timeline(job_id)
        assert reset["detail"]["cause"] == "stale"
        found[name] = (reset["detail"]["counted"], row["stalls"], row["attempts"])
    return found


async def test_a_stall_after_a_gap_in_ones_own_heartbeats_is_not_counted(
    start: StartWorker,
    rows: Rows,
    database: Database,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reset_stale, given_free = reset.reset_stale, dict[bool, set[UUID]]()

    async def noted(*arguments: Any, counted: bool, stale: Sequence[Suspect], **rest: Any) -> TakenBack:
        proven = running.worker._components.late.proven
        given_free.setdefault(counted, set()).update(row.id for row in stale if row.id in proven)
        return await reset_stale(*arguments, counted=counted, stale=stale, **rest)

    look_for_late = reset.look_for_late

    async def of_an_old_database(*arguments: Any, **named: Any) -> Lateness:
        found = await look_for_late(*arguments, **named)
        return found._replace(database_up_for=2 * LONG_SECONDS)

    monkeypatch.setattr(reset, "reset_stale", noted)
    monkeypatch.setattr(reset, "look_for_late", of_an_old_database)
    running = await start(scripted(echo))
    heartbeat = running.worker._components.heartbeat

    async def beats() -> None:
        assert heartbeat.answered_for() > 0

    await eventually(beats)
    assert not heartbeat.had_a_gap_within(1e6)  # a start is none
    with psycopg.connect(settings.database_dsn()) as holder:
        holder.execute("SELECT FROM jsworker.workers FOR UPDATE")
        await running.events.told("worker.degraded")
        holder.rollback()
    taken = await two_silent_jobs_are_taken_back(Lives(database, rows, settings), rows, running)
    # The short one began to be late after the gap was over.
    assert taken == {"patient": (False, 0, 0), "strict": (True, 1, 1)}
    # A claim straight from the owner always counts the stall: it was not offered where it is none.
    assert given_free[False] == set()
    assert len(given_free[True]) == 1
    assert await crashes_are_counted(Lives(database, rows, settings), rows) == [False, True, True]


async def crashes_are_counted(lives: Lives, rows: Rows) -> list[bool]:
    """Return whether stalls are counted of owners that fell silent before the gap, and of one after it.

    The first has a job that is taken back for the first time, the second one that was before.
    """
    counted = []
    for owner, silent_for, cleared in (
        ("before", 600.0, False),
        ("before-again", 600.0, True),
        ("after", 0.0, False),
    ):
        await lives.add(owner, answers=True, job=False, hostname="elsewhere", boot_id="another")
        job_id = await lives.hold(
            owner, silent_for=silent_for, stale_after=None, crash_after=2.5, cleared=cleared
        )
        await rows.becomes(job_id, "queued")
        [reset] = await rows.timeline(job_id)
        assert reset["detail"]["cause"] == "crashed"
        counted.append(reset["detail"]["counted"])
    return counted


@pytest.fixture
def young_postgres() -> Iterator[ThrowawayPostgres]:
    folder = new_servers_folder()
    server = ThrowawayPostgres(folder / "postgres", settings=THROWAWAY_SETTINGS)
    try:
        server.start()
        yield server
    finally:
        server.discard()
        folder.rmdir()


async def test_a_stall_after_a_restart_of_the_database_is_not_counted(
    young_postgres: ThrowawayPostgres, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    url = young_postgres.create_database("young")
    upgrade_database(url)
    young_postgres.stop()
    young_postgres.start()
    settings = make_settings(database_url=url, heartbeat_interval=1.0)
    database = Database(url, statement_timeout=5.0)
    rows = await open_rows(settings)
    running = await start(scripted(echo), with_settings=settings)
    taken = await two_silent_jobs_are_taken_back(Lives(database, rows, settings), rows, running)
    assert taken == {"patient": (False, 0, 0), "strict": (True, 1, 1)}
    assert not running.worker._components.heartbeat.had_a_gap_within(LONG_SECONDS)
    await running.worker.close()
    await rows.connection.close()
    await database.close()
