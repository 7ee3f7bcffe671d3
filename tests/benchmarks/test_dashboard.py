"""The measure of the dashboard, small: that each page answers and viewers see something, and not how fast."""

import pytest

from benchmarks.measures import dashboard


@pytest.mark.slow
def test_pages_viewers_and_a_worker_beside_them() -> None:
    small = {"rows": 2_000, "failed": 200, "requests": 2, "viewers": 3, "jobs": 200}
    figures = dashboard.measure(1, lambda _: None, **small, seconds=3.0)
    assert all(figure.values for figure in figures)
    pages = {figure.system for figure in figures if figure.name == "page beside 2,000 jobs: p99"}
    assert {"/", "/jobs", "/jobs of a kind", "/jobs/{id}", "/failures", "/workflows/{id}"} < pages
    [ratio] = [figure for figure in figures if figure.name == "no-op jobs, 3 viewers ÷ no viewer"]
    assert ratio.median > 0
