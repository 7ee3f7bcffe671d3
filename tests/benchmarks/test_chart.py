"""The chart of the JSON file."""

from pathlib import Path
from typing import Any

from benchmarks import chart, report
from benchmarks.figures import JSWORKER, RAW, Figure
from benchmarks.measures.latency import figure_name

FACTS: dict[str, Any] = {
    "machine": {"cpus": 2, "cpu_model": "A processor", "memory_gib": 7.8},
    "python": "3.11.7",
    "versions": {"PostgreSQL": "18.1", "nats-server": "2.15.0"},
    "postgresql_settings": {"fsync": "on"},
}


def test_panels_hold_the_best_first(tmp_path: Path) -> None:
    throughput, enqueueing, latency = chart.panels(_held(tmp_path))

    assert [(bar.system, bar.words) for bar in throughput.bars] == [
        (RAW, "30,000"),
        (JSWORKER, "21,000  (0.70)"),
        ("FastStream", "8,000  (0.27)"),
    ]
    assert [bar.owned for bar in throughput.bars] == [True, True, False]
    assert enqueueing.remark.startswith("50,000 in one call")
    assert [(bar.system, bar.length, bar.far, bar.words) for bar in latency.bars] == [
        (JSWORKER, 2.4, 5.25, "2.4 / 5.2")
    ]


def test_who_failed_is_no_gap(tmp_path: Path) -> None:
    held = _held(tmp_path)
    held["measures"]["a"]["failures"] = ["awa: failed: exit code 1"]

    assert [bar.words for bar in chart.panels(held)[0].bars if bar.system == "awa"] == ["failed"]


def test_the_footer_tells_machine_and_date(tmp_path: Path) -> None:
    held = _held(tmp_path)
    held["measures"]["a"]["date"] = "2030-01-02"

    words = chart.footer(held)

    assert words.startswith("2 cores (A processor) and 7.8 GiB")
    assert "fsync on" in words
    assert words.endswith("2030-01-02")


def test_svg_and_png_are_drawn_and_the_same_each_time(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in chart.draw(_held(tmp_path), tmp_path / "first")]
    svg, png = [path.read_bytes() for path in chart.draw(_held(tmp_path), tmp_path / "second")]

    assert [svg, png] == first
    assert b"<svg" in svg
    assert png.startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    assert chart.draw({}, tmp_path / "chart") == []
    assert not (tmp_path / "chart").exists()


def _held(folder: Path) -> dict[str, Any]:
    path = folder / "bench.json"
    _merge(path, "a", "no-op", "jobs/s", {JSWORKER: 21_000, RAW: 30_000, "FastStream": 8_000})
    _merge(path, "c", "50,000 in one call", "jobs/s", {JSWORKER: 80_000})
    start = {"p50": 2.4, "p99": 5.25}
    figures = [
        Figure("d", figure_name("start", 20, name), JSWORKER, "ms", (value,), more_is_better=False)
        for name, value in start.items()
    ]
    report.merge(path, "d", figures, title="d", rounds=1, facts=FACTS)
    return report.read(path)


def _merge(path: Path, letter: str, name: str, unit: str, values: dict[str, float]) -> None:
    figures = [
        Figure(letter, name, system, unit, (value,), note="no ownership" if system == "FastStream" else "")
        for system, value in values.items()
    ]
    report.merge(path, letter, figures, title=letter, rounds=1, facts=FACTS)
