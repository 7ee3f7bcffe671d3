"""Figures travel from children to their parent and come out as they were, one label richer."""

import base64
import zlib

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jsworker.telemetry.figures import (
    LONGEST_UNPACKED,
    exposition,
    merged,
    packed,
    unpacked,
)


def registry_of(runs: float) -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("a_runs", "Runs.", ["kind"], registry=registry).labels('k\n"é').inc(runs)
    Gauge("a_level", "Level.", registry=registry).set(-0.5)
    Histogram("a_seconds", "Time.", buckets=(1, 10), registry=registry).observe(2)
    return registry


@pytest.mark.parametrize("as_openmetrics", [False, True])
def test_samples_of_two_processes_stand_beside_each_other(*, as_openmetrics: bool) -> None:
    processes = {number: unpacked(packed(registry_of(runs))) for number, runs in (("1", 3), ("2", 4))}
    text, content_type = exposition(merged(processes), as_openmetrics=as_openmetrics)
    assert ("openmetrics" in content_type) == as_openmetrics
    lines = text.decode().splitlines()
    assert 'a_runs_total{kind="k\\n\\"é",process="1"} 3.0' in lines
    assert 'a_runs_total{kind="k\\n\\"é",process="2"} 4.0' in lines
    assert 'a_seconds_bucket{le="10.0",process="2"} 1.0' in lines
    assert 'a_level{process="1"} -0.5' in lines
    assert sum(line.startswith("# TYPE a_seconds ") for line in lines) == 1


def test_others_can_read_it() -> None:
    text, _ = exposition(merged({"1": unpacked(packed(registry_of(3)))}), as_openmetrics=True)
    families = list(text_string_to_metric_families(text.decode()))  # type: ignore[no-untyped-call]  # the library's own lack
    assert {family.name for family in families} == {"a_runs", "a_level", "a_seconds"}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "é",
        "not base64",
        base64.b64encode(b"not zlib").decode(),
        base64.b64encode(zlib.compress(b"[1]")).decode(),
        base64.b64encode(zlib.compress(b'[["a", "b", "gauge", [["a", 7, 1.0]]]]')).decode(),
        base64.b64encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b64encode(zlib.compress(b" " * (LONGEST_UNPACKED + 1))).decode(),
    ],
    ids=["empty", "unicode", "base64", "zlib", "shape", "labels", "deep", "bomb"],
)
def test_what_nobody_packed_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- every word of it
        unpacked(line)
