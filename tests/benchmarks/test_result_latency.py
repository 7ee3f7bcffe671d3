"""The measure of what waiting for a result adds, run for a moment."""

import re

import pytest

from benchmarks import result_latency


def test_it_prints_two_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    result_latency.main(["--jobs", "5", "--rate", "50"])
    assert re.fullmatch(r"result\(\) added \d+\.\d ms p50, \d+\.\d ms p99\n", capsys.readouterr().out)
