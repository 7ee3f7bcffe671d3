"""A stall is the job's only when nothing else can have silenced its owner."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions import reset
from jsworker.ownership.transitions.reset import Suspect, TakenBack
from jsworker.ownership.upgrading import upgrade_database
from tests.support.polling import eventually
from tests.support.servers import THROWAWAY_SETTINGS, ThrowawayPostgres, new_servers_folder
from tests.worker.lives import Lives
from tests.worker.processors import echo, scripted
from tests.worker.rows import Rows, open_rows
from tests.worker.running import StartWorker

LONG_SECONDS, SHORT_SECONDS = 5.0, 0.3


pytestmark = pytest.mark.usefixtures("nothing_is_left")


async def two_silent_jobs_are_taken_back(lives: Lives, rows: Rows) -> dict[str, tuple[bool, int, int]]:
    """Wait for the resets of two jobs; return whether each was counted, its stalls and its attempts."""
    # One owner each: a cause is looked for within the longest threshold of an owner's jobs.
    patient = await lives.hold("patient", stale_after=LONG_SECONDS, silent_for=60)
    strict = await lives.hold("strict", stale_after=SHORT_SECONDS, silent_for=60)
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

    monkeypatch.setattr(reset, "reset_stale", noted)
    up_for = "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8"

    async def the_database_is_no_cause() -> None:
        assert await rows.value(up_for) > LONG_SECONDS

    await eventually(the_database_is_no_cause)
    running = await start(scripted(echo))
    heartbeat = running.worker._components.heartbeat

    async def beats() -> None:
        assert heartbeat.heard_for() > 0

    await eventually(beats)
    assert not heartbeat.had_a_gap_within(1e6)  # a start is none
    with psycopg.connect(settings.database_dsn()) as holder:
        holder.execute("SELECT FROM jsworker.workers FOR UPDATE")
        await running.events.told("heartbeat.failed")
        holder.rollback()
    taken = await two_silent_jobs_are_taken_back(Lives(database, rows, settings), rows)
    # The short one began to be late after the gap was over.
    assert taken == {"patient": (False, 0, 0), "strict": (True, 1, 1)}
    # A claim straight from the owner always counts the stall: it was not offered where it is none.
    assert given_free[False] == set()
    assert len(given_free[True]) == 1


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


@pytest.mark.usefixtures("patient")
async def test_a_stall_after_a_restart_of_the_database_is_not_counted(
    young_postgres: ThrowawayPostgres, start: StartWorker, make_settings: Callable[..., Settings]
) -> None:
    url = young_postgres.create_database("young")
    upgrade_database(url)
    young_postgres.stop()
    young_postgres.start()
    settings = make_settings(database_url=url)
    database = Database(url, statement_timeout=5.0)
    rows = await open_rows(settings)
    running = await start(scripted(echo), with_settings=settings)
    taken = await two_silent_jobs_are_taken_back(Lives(database, rows, settings), rows)
    assert taken == {"patient": (False, 0, 0), "strict": (True, 1, 1)}
    assert not running.worker._components.heartbeat.had_a_gap_within(LONG_SECONDS)
    await running.worker.close()
    await rows.connection.close()
    await database.close()
