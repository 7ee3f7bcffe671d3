"""The measure of priorities, small: what passes what is asserted, and not how soon."""

from benchmarks.measures import priorities


def test_high_jobs_pass_a_backlog_and_low_ones_go_on() -> None:
    found = priorities.measure(normal=4000, low=1000, high=10, per_second=20.0, seconds=0.01)
    assert len(found.started) == 10
    high, normal, low = found.ended
    assert found.left[0] > 0  # so each of the high ones passed others
    assert high >= 1
    assert normal > 0
    assert low * 12 >= high + normal + low
