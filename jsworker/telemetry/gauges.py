"""Gauges of a worker, read at the moment somebody asks."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jsworker.telemetry.kind_labels import KindLabels
from jsworker.telemetry.logs import lines_dropped
from jsworker.telemetry.worker_status import Fleet, Patient, WorkerStatus


class Gauges(Collector):
    """Looks at a worker whenever its registry is collected."""

    def __init__(self, patient: Patient, kinds: KindLabels) -> None:
        self._patient = patient
        self._kinds = kinds

    def collect(self) -> Iterator[Metric]:
        """Yield what the worker knows of itself, and what its last survey found."""
        yield of_logs()
        vitals, fleet = self._patient.vitals(), self._patient.fleet()
        if vitals is not None:
            yield from of_worker(vitals, self._kinds)
        if fleet is not None:
            yield from of_fleet(fleet)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: what there is depends on the worker."""
        return ()


def of_logs() -> Metric:
    """Return what became of this process's log lines."""
    return CounterMetricFamily(
        "jsworker_log_lines_dropped", "Log lines that nobody read in time.", value=lines_dropped()
    )


def of_worker(vitals: WorkerStatus, kinds: KindLabels) -> Iterator[Metric]:
    """Yield the gauges of one process."""
    in_flight = _gauge("runs_in_flight", "Runs in hand: waiting for a slot, running or settling.", "kind")
    by_label: dict[str, int] = {}
    for kind, runs in vitals.in_flight.items():
        label = kinds.label(kind)
        by_label[label] = by_label.get(label, 0) + runs
    for label, runs in by_label.items():
        in_flight.add_metric([label], runs)
    yield in_flight
    yield _single(
        "heartbeat_lag_seconds",
        "Seconds since the start of the last heartbeat that PostgreSQL answered.",
        vitals.heartbeat_lag,
    )
    yield _single(
        "event_loop_lag_seconds",
        "Longest delay of the event loop within the last half minute.",
        vitals.event_loop_lag,
    )
    recovery = _gauge("recovery_enabled", "1 while jobs are taken back by this rule of recovery.", "rule")
    for rule, is_on in vitals.recovers_by.items():
        recovery.add_metric([rule], is_on)
    yield recovery
    in_use = _gauge("database_connections_in_use", "Connections to PostgreSQL that are lent.", "pool")
    limit = _gauge("database_connections_limit", "Connections that may be lent at once.", "pool")
    for name, pool in vitals.pools.items():
        in_use.add_metric([name], pool.in_use)
        limit.add_metric([name], pool.limit)
    yield from (in_use, limit)


def of_fleet(fleet: Fleet) -> Iterator[Metric]:
    """Yield the gauges of the whole installation, which every pod shows alike."""
    jobs = _gauge("jobs", "Live jobs in the table.", "kind", "status")
    oldest = _gauge("queue_oldest_seconds", "For how long the job at the front has been queued.", "kind")
    drift = _gauge(
        "queue_drift_jobs", "Jobs that expect a message in the stream minus messages there.", "kind"
    )
    pending = _gauge("consumer_pending_messages", "Messages that were never delivered.", "kind")
    waiting = _gauge("consumer_unacknowledged_messages", "Messages delivered and not answered.", "kind")
    for kind, queue in fleet.queues.items():
        for status, number in queue.jobs.items():
            jobs.add_metric([kind, status], number)
        oldest.add_metric([kind], queue.oldest_seconds)
        for family, value in (
            (drift, queue.drift),
            (pending, queue.pending),
            (waiting, queue.unacknowledged),
        ):
            if value is not None:
                family.add_metric([kind], value)
    yield from (jobs, oldest, drift, pending, waiting)
    yield _single("outbox_jobs", "Queued jobs whose message is still to be sent.", fleet.outbox_jobs)
    yield _single(
        "outbox_oldest_seconds",
        "For how long the oldest job of the outbox has been queued.",
        fleet.outbox_oldest_seconds,
    )
    refused = _gauge("refused_rows", "Jobs set aside because PostgreSQL refuses their row.", "attempted")
    for attempted, number in fleet.refused_rows.items():
        refused.add_metric([attempted], number)
    yield refused
    yield _single("dead_messages", "Messages kept because nobody could use them.", fleet.dead_messages)


def _gauge(name: str, documentation: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jsworker_{name}", documentation, labels=labels)


def _single(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"jsworker_{name}", documentation, value=value)
