"""A standby takes over: with synchronous replication nothing is lost, without it what PostgreSQL lost."""

from pathlib import Path

import pytest

from tests.scale_out.lost_commits import lose_commits
from tests.scale_out.pods import SHORT
from tests.scale_out.scenarios import PODS, standby_promoted

pytestmark = pytest.mark.thorough

NO_ROW_SECONDS = 3.0
RATE = 40.0
BETWEEN = 80


@pytest.mark.parametrize("silent", [False, True], ids=["killed", "silent"])
async def test_a_synchronous_standby_has_everything(nats_url: str, tmp_path: Path, *, silent: bool) -> None:
    figures = await standby_promoted(
        tmp_path, nats_url, timing=SHORT, rate=RATE, between=BETWEEN, silent=silent
    )
    outcome = figures.outcome
    assert (outcome.lost, outcome.twice) == (0, 0), f"{outcome}; {figures.log}"
    assert outcome.enqueued >= 2 * BETWEEN
    told = [(line["level"], line["what"], line["was"], line["is"]) for line in figures.changes]
    assert told == [("warning", "timeline", 1, 2)] * PODS, figures.log


async def test_without_one_only_what_postgresql_lost_is_lost(nats_url: str, tmp_path: Path) -> None:
    after = await lose_commits(tmp_path, nats_url, timing=SHORT, no_row_seconds=NO_ROW_SECONDS)
    groups = after.groups
    told = [(line["what"], line["was"], line["is"]) for line in after.changes]
    assert told == [("timeline", 1, 2)] * PODS, after.log

    # Rows that were never copied are gone, their messages are put aside.
    assert not after.rows.keys() & set(groups.gone)
    assert after.dead >= set(groups.vanished_queued)

    # Every other job has ended, once in the history that counts.
    assert {after.rows[job][0] for job in groups.kept} == {"completed"}
    assert {after.completions[job] for job in groups.kept} == {1}

    # What was copied as ended or running is as it was; what went back has run again.
    runs = {name: {tuple(after.tokens.get(job, ())) for job in jobs} for name, jobs in vars(groups).items()}
    assert runs["ended"] == runs["lasting"] == {(1,)}, after.log
    assert runs["running"] == {(1, 2)}
    # The same token, given a second time by a database that does not know of the first.
    assert runs["unpublished"] == runs["queued"] == runs["claimed"] == {(1, 1)}
    assert runs["vanished"] == runs["vanished_running"] == {(1,)}
    assert runs["vanished_queued"] == {()}
    assert after.restarted == PODS  # no worker died of it
