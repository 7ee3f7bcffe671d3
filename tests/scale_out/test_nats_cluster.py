"""Three nats-servers, stream R3: nodes may go, one at a time."""

from pathlib import Path

import pytest

from tests.scale_out.nats_cluster import Cluster
from tests.scale_out.pods import SHORT
from tests.scale_out.scenarios import leader_killed, nodes_restarted

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.thorough]

RATE = 40.0
BETWEEN = 60
LONGEST_GAP = 15.0
"""Seconds. A leader is missed for 4 to 9 s before the next election; meanwhile workers look in the table."""


async def test_a_rolling_restart_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    figures = await nodes_restarted(
        cluster, tmp_path, timing=SHORT, rate=RATE, lame_duck=False, between=BETWEEN
    )
    outcome = figures.outcome
    assert (outcome.lost, outcome.twice) == (0, 0), f"{outcome}; {figures.log}"
    assert outcome.enqueued >= 4 * BETWEEN
    assert outcome.longest_gap() < LONGEST_GAP, figures.log
    assert figures.changes == []  # it is the database's history, not the stream's


async def test_the_leaders_death_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    figures = await leader_killed(cluster, tmp_path, timing=SHORT, rate=RATE, kills=1, between=BETWEEN)
    outcome = figures.outcome
    assert (outcome.lost, outcome.twice) == (0, 0), f"{outcome}; {figures.log}"
    assert outcome.longest_gap() < LONGEST_GAP, figures.log
    assert max(figures.seconds()) < LONGEST_GAP
