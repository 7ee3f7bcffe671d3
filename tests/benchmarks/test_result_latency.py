"""The measure of what waiting for a result adds, run for a moment."""

import re
from contextlib import nullcontext

import pytest

from benchmarks import result_latency
from benchmarks.servers import Servers


def test_it_prints_two_percentiles(
    bench: Servers, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_latency, "running_servers", lambda: nullcontext(bench))
    result_latency.main(["--jobs", "5", "--rate", "50"])
    assert re.fullmatch(r"result\(\) added \d+\.\d ms p50, \d+\.\d ms p99\n", capsys.readouterr().out)
