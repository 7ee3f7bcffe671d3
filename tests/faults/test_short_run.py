"""A short fault run on the real thing: parents, children, servers, network.

Everybody has the least rights that are shipped: what nobody may do is what no recovery may need.
"""

from pathlib import Path

import pytest

from tests.faults.campaign import Plan, run
from tests.security.least_rights import least_rights

NEMESES = (
    "sigkill_child",
    "sigkill_parent",
    "sigkill_both",
    "sigkill_not_restarted",
    "sigstop_past_threshold",
    "event_loop_block",
    "poison",
    "nats_store_deleted",
    "postgres_outage",
    "backends_terminated",
    "partition_both_black_hole",
    "connections_reset_both",
    "forged_messages",
    "producer_killed",
    "operator_pauses",
    "operator_retries",
)
SEED = 20_260
KILLS = 10


def logs_in(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.glob("pod-*.log"))


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_no_fault_of_a_short_run_loses_a_job_or_completes_one_twice(tmp_path: Path) -> None:
    plan = Plan(seed=SEED, kills=KILLS, only=NEMESES, rate=8.0, kill_seconds=2.4, slowed=3.0)
    access = least_rights(plan.times["ack_wait"])
    result = await run(plan, tmp_path, lambda _what, _share: None, access)
    print(f"seed {SEED}: {result}")  # noqa: T201 -- all that is known of a red run
    assert result["findings"] == {}
    assert result["process_kills"] >= KILLS
    assert (result["lost"], result["completed_twice"], result["false_resets"]) == (0, 0, 0)
    assert result["ended"] == result["jobs"] > 0
    assert min(result[name] for name in ("held", "instants", "workflows", "batches")) > 0
    logs = logs_in(tmp_path)
    assert "worker.started" in logs
    assert "permission denied" not in logs
