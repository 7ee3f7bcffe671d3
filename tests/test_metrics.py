"""Metrics are counted from events."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jsworker.events import Events
from jsworker.observe.metrics import Metrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def events(registry: CollectorRegistry) -> Events:
    told = Events()
    Metrics(registry).listen(told)
    return told


@pytest.mark.parametrize(
    ("event", "fields", "sample", "labels"),
    [
        ("job.completed", {}, "jsworker_runs_ended", {"kind": "k", "outcome": "completed"}),
        ("job.error", {}, "jsworker_runs_ended", {"kind": "k", "outcome": "error"}),
        ("job.lost", {}, "jsworker_runs_ended", {"kind": "k", "outcome": "lost"}),
        (
            "job.stalled",
            {"cause": "crashed", "counted": True},
            "jsworker_stalls",
            {"kind": "k", "cause": "crashed", "counted": "true"},
        ),
        (
            "job.stalled",
            {"cause": "dead", "counted": False},
            "jsworker_stalls",
            {"kind": "k", "cause": "dead", "counted": "false"},
        ),
        ("job.fenced", {}, "jsworker_runs_fenced", {"kind": "k"}),
        (
            "job.skipped",
            {"status": "completed"},
            "jsworker_claims_refused",
            {"kind": "k", "status": "completed"},
        ),
        ("message.dead", {}, "jsworker_messages_dead", {}),
        ("heartbeat.failed", {}, "jsworker_heartbeats_failed", {}),
    ],
)
def test_each_event_counts_once(
    registry: CollectorRegistry,
    events: Events,
    *,
    event: str,
    fields: dict[str, Any],
    sample: str,
    labels: dict[str, str],
) -> None:
    events.emit(event, kind="k", **fields)
    events.emit(event, kind="k", **fields)
    assert registry.get_sample_value(f"{sample}_total", labels) == 2


def test_republished_messages_are_counted_by_their_number(
    registry: CollectorRegistry, events: Events
) -> None:
    events.emit("message.republished", jobs=3)
    assert registry.get_sample_value("jsworker_messages_republished_total") == 3


def test_a_server_that_is_away_shows_until_it_is_back(registry: CollectorRegistry, events: Events) -> None:
    labels = {"server": "nats"}
    assert registry.get_sample_value("jsworker_degraded", labels) == 0
    events.emit("worker.degraded", what="nats")
    events.emit("worker.degraded", what="job 1")
    assert registry.get_sample_value("jsworker_degraded", labels) == 1
    events.emit("worker.restored", what="nats")
    assert registry.get_sample_value("jsworker_degraded", labels) == 0
    assert registry.get_sample_value("jsworker_degraded", {"server": "job 1"}) is None


def test_what_is_shown_can_be_read_by_others(registry: CollectorRegistry, events: Events) -> None:
    events.emit("job.completed", kind="k")
    shown = generate_latest(registry).decode()  # type: ignore[no-untyped-call] # the library's own lack
    families = text_string_to_metric_families(shown)  # type: ignore[no-untyped-call] # likewise
    names = {family.name for family in families}
    assert {"jsworker_runs_ended", "jsworker_stalls", "jsworker_degraded"} <= names
