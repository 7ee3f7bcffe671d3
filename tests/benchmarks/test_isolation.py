"""A short real run of measure n."""

import pytest

from benchmarks.measures import isolation


@pytest.mark.slow
def test_jobs_that_compute_beside_a_pool() -> None:
    figures = isolation.measure(1, lambda _: None, jobs=150, processes=1)
    rate, pooled, share, p50, p99, beats = (figure.median for figure in figures)
    assert share == rate / pooled
    assert 0 <= p50 <= p99
    assert beats >= 0
