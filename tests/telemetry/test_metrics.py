"""Metrics are counted from events."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jsworker.core.events import EventName, Events
from jsworker.telemetry.metrics import Metrics
from jsworker.telemetry.worker_status import MOST_KINDS, OTHER_KINDS


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
        ("job.completed", {"seconds": 1.0}, "jsworker_runs_ended", {"kind": "k", "outcome": "completed"}),
        ("job.error", {"seconds": 1.0}, "jsworker_runs_ended", {"kind": "k", "outcome": "error"}),
        ("job.lost", {"seconds": 1.0}, "jsworker_runs_ended", {"kind": "k", "outcome": "lost"}),
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
        (
            "job.cleared",
            {"cause": "operator", "to": "queued"},
            "jsworker_stalls",
            {"kind": "k", "cause": "operator", "counted": "false"},
        ),
        ("job.fenced", {}, "jsworker_runs_fenced", {"kind": "k"}),
        ("job.lost", {"late_write": True}, "jsworker_late_writes_rejected", {"kind": "k"}),
        (
            "job.skipped",
            {"status": "completed"},
            "jsworker_claims_refused",
            {"kind": "k", "reason": "completed"},
        ),
        ("message.dead", {"messages": 1}, "jsworker_messages_dead", {}),
        ("row.refused", {"attempted": "mark"}, "jsworker_rows_refused", {"attempted": "mark"}),
        ("row.refused", {"job_id": None}, "jsworker_rows_refused", {"attempted": "other"}),
        ("heartbeat.failed", {}, "jsworker_heartbeats_failed", {}),
        ("isolated.ended", {"cause": "memory"}, "jsworker_isolated_processes_ended", {"cause": "memory"}),
    ],
)
def test_each_event_counts_once(
    registry: CollectorRegistry,
    events: Events,
    *,
    event: EventName,
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


def test_dead_messages_are_counted_by_their_number(registry: CollectorRegistry, events: Events) -> None:
    events.emit("message.dead", messages=3, subject="jobs.k", stream_seq=7, reason="not JSON")
    assert registry.get_sample_value("jsworker_messages_dead_total") == 3


def test_pruned_jobs_are_counted_by_their_number(registry: CollectorRegistry, events: Events) -> None:
    events.emit("jobs.pruned", jobs=3, entries=9)
    assert registry.get_sample_value("jsworker_jobs_pruned_total") == 3


def test_a_server_that_is_away_shows_until_it_is_back(registry: CollectorRegistry, events: Events) -> None:
    labels = {"server": "nats"}
    assert registry.get_sample_value("jsworker_degraded", labels) is None
    events.emit("worker.started", worker_id="w", kinds=["k"])
    assert registry.get_sample_value("jsworker_degraded", labels) == 0
    events.emit("worker.degraded", what="nats")
    events.emit("worker.degraded", what="job 1")
    assert registry.get_sample_value("jsworker_degraded", labels) == 1
    events.emit("worker.restored", what="nats")
    assert registry.get_sample_value("jsworker_degraded", labels) == 0
    assert registry.get_sample_value("jsworker_degraded", {"server": "job 1"}) is None


def test_a_start_for_which_postgresql_has_no_room_shows_it_as_away(
    registry: CollectorRegistry, events: Events
) -> None:
    shown = []
    for name in ("worker.degraded", "worker.restored"):
        events.emit(name, what="start")
        shown.append(registry.get_sample_value("jsworker_degraded", {"server": "postgresql"}))
    assert shown == [1, 0]
    assert registry.get_sample_value("jsworker_degraded", {"server": "nats"}) is None


def test_that_jetstream_refuses_shows_until_it_stores_again(
    registry: CollectorRegistry, events: Events
) -> None:
    shown = [registry.get_sample_value("jsworker_publishing_refused")]
    for name in ("worker.degraded", "worker.restored"):
        events.emit(name, what="publishing")
        shown.append(registry.get_sample_value("jsworker_publishing_refused"))
    assert shown == [0, 1, 0]
    assert registry.get_sample_value("jsworker_degraded", {"server": "publishing"}) is None


def test_what_ends_no_run_of_this_process_counts_as_none(registry: CollectorRegistry, events: Events) -> None:
    events.emit("worker.started", worker_id="w", kinds=["k"])
    events.emit("job.error", kind="k", error="in a hook: ValueError")
    events.emit("job.failed", kind="k", error="stalled too often", stalls=3)
    events.emit("job.released", job_id="1", fencing_token=1, reason="orphaned claim")
    ended = [
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "jsworker_runs_ended_total"
    ]
    assert set(ended) == {0.0}


@pytest.mark.parametrize(
    ("sample", "labels"),
    [
        ("jsworker_runs_ended_total", {"outcome": "failed"}),
        ("jsworker_stalls_total", {"cause": "dead", "counted": "true"}),
        ("jsworker_stalls_total", {"cause": "operator", "counted": "false"}),
        ("jsworker_runs_fenced_total", {}),
        ("jsworker_late_writes_rejected_total", {}),
    ],
)
def test_what_has_not_happened_to_a_kind_is_zero_from_the_start(
    registry: CollectorRegistry, events: Events, *, sample: str, labels: dict[str, str]
) -> None:
    assert registry.get_sample_value(sample, {"kind": "k", **labels}) is None
    events.emit("worker.started", worker_id="w", kinds=["k"])
    assert registry.get_sample_value(sample, {"kind": "k", **labels}) == 0


def test_a_loss_that_was_known_before_the_end_is_no_late_write(
    registry: CollectorRegistry, events: Events
) -> None:
    events.emit("job.lost", kind="k", late_write=False)
    assert registry.get_sample_value("jsworker_late_writes_rejected_total", {"kind": "k"}) is None


@pytest.mark.parametrize(
    ("event", "field", "histogram"),
    [
        ("job.claimed", "waited", "jsworker_queue_wait_seconds"),
        ("job.completed", "seconds", "jsworker_run_duration_seconds"),
        ("job.error", "seconds", "jsworker_run_duration_seconds"),
    ],
)
def test_durations_fall_into_buckets(
    registry: CollectorRegistry, events: Events, *, event: EventName, field: str, histogram: str
) -> None:
    events.emit(event, kind="k", **{field: 0.02})
    events.emit(event, kind="k", **{field: 40.0})
    assert registry.get_sample_value(f"{histogram}_bucket", {"kind": "k", "le": "0.025"}) == 1
    assert registry.get_sample_value(f"{histogram}_sum", {"kind": "k"}) == pytest.approx(40.02)


def test_what_is_shown_can_be_read_by_others(registry: CollectorRegistry, events: Events) -> None:
    events.emit("job.completed", kind="k", seconds=1.0)
    shown = generate_latest(registry).decode()  # type: ignore[no-untyped-call] # the library's own lack
    families = text_string_to_metric_families(shown)  # type: ignore[no-untyped-call] # likewise
    names = {family.name for family in families}
    assert {"jsworker_runs_ended", "jsworker_stalls", "jsworker_degraded"} <= names


def test_kinds_that_are_too_many_are_counted_together(registry: CollectorRegistry, events: Events) -> None:
    """Sweeps take back jobs of whatever kinds producers invent."""
    events.emit("worker.started", kinds=["mine"])
    for number in range(2 * MOST_KINDS):
        events.emit("job.stalled", kind=f"junk-{number}", cause="stale", counted=True)
    events.emit("job.fenced", kind="mine")
    stalls = {
        sample.labels["kind"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "jsworker_stalls_total" and sample.labels["cause"] == "stale"
    }
    assert len(stalls) == MOST_KINDS + 1
    assert sum(stalls.values()) == 2 * MOST_KINDS
    assert stalls[OTHER_KINDS] == MOST_KINDS + 1
    assert registry.get_sample_value("jsworker_runs_fenced_total", {"kind": "mine"}) == 1
