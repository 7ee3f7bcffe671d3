"""The metrics that jsworker exports, as Prometheus names them, each with its labels, and those of others."""

import re
from collections.abc import Iterator

PER_PROCESS = {
    "jsworker_runs_ended_total": {"kind", "outcome"},
    "jsworker_stalls_total": {"kind", "cause", "counted"},
    "jsworker_runs_fenced_total": {"kind"},
    "jsworker_late_writes_rejected_total": {"kind"},
    "jsworker_claims_refused_total": {"kind", "reason"},
    "jsworker_messages_republished_total": set[str](),
    "jsworker_messages_dead_total": set[str](),
    "jsworker_rows_refused_total": {"attempted"},
    "jsworker_jobs_pruned_total": set[str](),
    "jsworker_jobs_expired_total": {"kind"},
    "jsworker_heartbeats_failed_total": set[str](),
    "jsworker_log_lines_dropped_total": set[str](),
    "jsworker_events_dropped_total": set[str](),
    "jsworker_queue_wait_seconds_bucket": {"kind", "le"},
    "jsworker_run_duration_seconds_bucket": {"kind", "le"},
    "jsworker_runs_in_flight": {"kind"},
    "jsworker_degraded": {"server"},
    "jsworker_publishing_refused": set[str](),
    "jsworker_heartbeat_lag_seconds": set[str](),
    "jsworker_event_loop_lag_seconds": set[str](),
    "jsworker_database_connections_in_use": {"pool"},
    "jsworker_database_connections_limit": {"pool"},
    "jsworker_recovery_enabled": {"rule"},
    "jsworker_schedule_delay_seconds_bucket": {"kind", "le"},
    "jsworker_schedule_instants_skipped_total": {"kind"},
    "jsworker_schedules_refused_total": {"kind"},
    "jsworker_workflows_finished_total": {"outcome"},
    "jsworker_isolated_processes": {"state"},
    "jsworker_isolated_processes_ended_total": {"cause"},
}
FLEET_WIDE = {
    "jsworker_jobs": {"kind", "status"},
    "jsworker_held_jobs": {"kind", "held_by"},
    "jsworker_held_oldest_seconds": {"kind", "held_by"},
    "jsworker_outbox_jobs": set[str](),
    "jsworker_outbox_oldest_seconds": set[str](),
    "jsworker_queue_oldest_seconds": {"kind"},
    "jsworker_queue_drift_jobs": {"kind"},
    "jsworker_queue_lane_jobs": {"kind", "priority"},
    "jsworker_queue_lane_oldest_seconds": {"kind", "priority"},
    "jsworker_consumer_pending_messages": {"kind"},
    "jsworker_consumer_unacknowledged_messages": {"kind"},
    "jsworker_refused_rows": {"attempted"},
    "jsworker_dead_messages": set[str](),
    "jsworker_schedule_lag_seconds": {"kind"},
    "jsworker_kind_paused": {"kind"},
    "jsworker_limit_running_jobs": {"kind"},
    "jsworker_limit_max_running_jobs": {"kind"},
    "jsworker_limit_full_keys": {"kind"},
    "jsworker_workflows_left_seconds": set[str](),
}
"""The same from every pod: to be read by their maximum, never by their sum."""
SUPERVISORS = {
    "jsworker_processes": set[str](),
    "jsworker_processes_ready": set[str](),
    "jsworker_report_age_seconds": {"process"},
    "jsworker_process_deaths_total": {"how"},
    "jsworker_build_info": {"version"},
}

FROM_PROMETHEUS = {"namespace", "pod"}
LABELS = {
    **{name: labels | FROM_PROMETHEUS | {"process"} for name, labels in (PER_PROCESS | FLEET_WIDE).items()},
    **{name: labels | FROM_PROMETHEUS for name, labels in SUPERVISORS.items()},
}
OF_OTHERS: dict[str, dict[str, set[str]]] = {
    # Of Prometheus: whether a pod answers, and what fires. The job is the PodMonitor, NAMESPACE/NAME.
    "up": {"job": {".+/jsworker"}},
    "ALERTS": {"alertname": {"JsworkerDatabaseAway"}, "alertstate": {"firing"}},
    # Of kube-state-metrics. KEDA names the autoscaler after its ScaledObject.
    "kube_statefulset_replicas": {"statefulset": {"jsworker.*"}},
    "kube_statefulset_status_replicas_ready": {"statefulset": {"jsworker.*"}},
    "kube_statefulset_status_replicas_updated": {"statefulset": {"jsworker.*"}},
    "kube_horizontalpodautoscaler_status_condition": {
        "horizontalpodautoscaler": {"keda-hpa-jsworker.*"},
        "condition": {"ScalingActive"},
        "status": {"false"},
    },
}
"""Metrics of others, and what alerts may ask of their labels, besides ``FROM_PROMETHEUS``."""
VALUES = {
    "outcome": {"completed", "error", "failed", "cancelled", "released", "lost", "snoozed"},
    "cause": {"stale", "crashed", "dead", "operator", "crashed in quarantine", "crashed in isolation"},
    "held_by": {"limit", "rate", "paused", "needs"},
    "counted": {"true", "false"},
    "server": {"postgresql", "nats"},
    "status": {"scheduled", "queued", "processing"},
    "priority": {"high", "low"},
    "rule": {"supervisor", "start", "crashed", "stale"},
    "how": {"killed", "hung", "exited"},
    "le": {"60.0", "+Inf"},
}
"""Labels whose values are known beforehand."""


def selectors(expression: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each metric of a PromQL expression, with what it asks of labels."""
    for name, matchers in re.findall(r"\b(jsworker_\w+|kube_\w+|up\b)(?:\{([^}]*)\})?", expression):
        yield name, dict(re.findall(r'(\w+)\s*=~?\s*"([^"]*)"', matchers))


def grouping_labels(expression: str) -> set[str]:
    """The labels that an expression groups or matches by."""
    return set(
        re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on|without|ignoring) \(([^)]*)\)", expression)))
    )
