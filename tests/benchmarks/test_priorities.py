"""The measure of priorities, small: what passes what is asserted, and not how soon."""

from contextlib import nullcontext

import pytest

from benchmarks.measures import priorities
from benchmarks.servers import Servers


def test_high_jobs_pass_a_backlog_and_low_ones_go_on(bench: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priorities, "running_servers", lambda: nullcontext(bench))
    # Ten at a time and 0.1 s each: work for 25 seconds on any machine, and the high ones come in one of them.
    found = priorities.measure(normal=2_000, low=500, high=20, per_second=20.0, seconds=0.1)
    assert len(found.started) == 20
    high, normal, low = found.ended
    assert found.left[0] > 0  # so each of the high ones passed others
    assert high >= 1
    assert normal > 0
    assert low * 12 >= high + normal + low
