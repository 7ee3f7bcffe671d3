"""The page of figures is made of the results and of nothing else."""

from pathlib import Path

from benchmarks import document, report
from benchmarks.figures import JSWORKER, RAW, Figure

FACTS = {
    "machine": {"cpus": 2, "cpu_model": "Model", "architecture": "x86_64", "memory_gib": 24.0},
    "python": "3.11.7",
    "versions": {"PostgreSQL": "18.4", "nats-server": "2.15.1"},
}


def test_a_table_a_note_and_a_failure(tmp_path: Path) -> None:
    figures = [
        Figure("a", "no-op", JSWORKER, "jobs/s", (150.0, 50.0), note="default settings"),
        Figure("a", "no-op", RAW, "jobs/s", (200.0, 100.0)),
        Figure("a", "no-op", "broken", "jobs/s", (), note="failed: it broke"),
        Figure("a", "memory", JSWORKER, "MB", (85.0,), more_is_better=False),
    ]
    results = tmp_path / "results.json"
    report.merge(results, "a", figures, title="throughput", rounds=2, facts=FACTS)
    page = document.document(report.read(results))
    assert "## (a) throughput" in page
    assert "| no-op | median | min – max | × raw loop |" in page
    assert f"| {JSWORKER} | 100 jobs/s | 50.0 – 150 | 0.62 |" in page
    assert f"| {RAW} | 150 jobs/s | 100 – 200 | 1.00 |" in page
    assert f"| memory | median | min – max |\n|---|---|---|\n| {JSWORKER} | 85.0 MB | 85.0 – 85.0 |" in page
    assert f"- {JSWORKER}: default settings" in page
    assert "- **broken: failed: it broke**" in page
