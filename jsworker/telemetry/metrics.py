"""Figures for Prometheus: counted from a worker's events, or read from it when they are collected."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jsworker.core.events import Event, Events
from jsworker.telemetry.logs import lines_dropped
from jsworker.telemetry.worker_status import Fleet, KindLabels, Observed, WorkerStatus

_OUTCOMES: Final = {
    "job.completed": "completed",
    "job.error": "error",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
    "job.released": "released",
    "job.lost": "lost",
}
_SERVERS: Final = ("postgresql", "nats")
_CAUSES: Final = ("stale", "crashed", "dead", "crashed in quarantine")
_OPERATOR: Final = "operator"
STALLS: Final = (
    "jsworker_stalls",
    "Runs that were taken back: from owners that fell silent or had ended, or by an operator.",
    ("kind", "cause", "counted"),
)
"""Name, documentation and labels of the figure that workers and their supervisor share."""
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 28_800)
"""Jobs take from milliseconds to hours."""


class Metrics:
    """Figures of one worker process.

    ``Metrics(registry).watch(worker)`` is all that an application needs which runs a ``Worker`` itself. Names
    follow the conventions of Prometheus: a unit or ``total`` at the end, few values for each label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every counter, so that it is there, at zero, before anything happens."""

        def counter(name: str, documentation: str, *labels: str) -> Counter:
            return Counter(f"jsworker_{name}", documentation, labels, registry=registry)

        def gauge(name: str, documentation: str, *labels: str) -> Gauge:
            return Gauge(f"jsworker_{name}", documentation, labels, registry=registry)

        def seconds(name: str, documentation: str) -> Histogram:
            return Histogram(
                f"jsworker_{name}_seconds", documentation, ["kind"], buckets=_SECONDS, registry=registry
            )

        self._registry = registry
        self._watched = False
        self._kinds = KindLabels()
        self._stalled = Counter(*STALLS, registry=registry)
        self._ended = counter("runs_ended", "Runs that ended in this process.", "kind", "outcome")
        self._fenced = counter(
            "runs_fenced", "Runs that this process stopped because its heartbeats were not answered.", "kind"
        )
        self._late = counter(
            "late_writes_rejected",
            "Outcomes that came from runs which owned their job no more; nothing was written.",
            "kind",
        )
        self._skipped = counter(
            "claims_refused",
            "Messages whose job could not be claimed, by the status that stood against it.",
            "kind",
            "reason",
        )
        self._republished = counter("messages_republished", "Messages that were proven to be gone.")
        self._dead = counter("messages_dead", "Messages that nobody could use.")
        self._refused = counter(
            "rows_refused",
            "Rows whose writing PostgreSQL refused to this process for the first time.",
            "attempted",
        )
        self._pruned = counter("jobs_pruned", "Ended jobs that this process deleted, by their retention.")
        self._unanswered = counter("heartbeats_failed", "Heartbeats that the database did not answer.")
        self._waited = seconds(
            "queue_wait", "From the moment at which a job became due to its claim, by PostgreSQL's clock."
        )
        self._ran = seconds(
            "run_duration", "From the claim of a job to the end of its run, however that ended."
        )
        self._fired = seconds(
            "schedule_delay", "From the instant of a schedule to the moment at which its job was enqueued."
        )
        self._left_out = counter(
            "schedule_instants_skipped", "Instants of schedules that got no job, by their policy.", "kind"
        )
        self._unfired = counter(
            "schedules_refused", "Schedules that could not be read, or whose job PostgreSQL refused.", "kind"
        )
        self._publishing_refused = gauge(
            "publishing_refused", "1 while JetStream stores no messages, and jobs are claimed from the table."
        )
        self._degraded = gauge("degraded", "1 while a server cannot be reached.", "server")
        for server in _SERVERS:
            self._degraded.labels(server).set(0)

    def watch(self, worker: Observed) -> None:
        """Count a worker's events, and read its status whenever its registry is collected, from any thread.

        Raises:
            ValueError: another worker is watched; each wants a registry of its own.
        """
        if self._watched:
            raise ValueError(
                "these metrics watch a worker already: make others, with a registry of their own"
            )
        self._watched = True
        self.listen(worker.events)
        self._registry.register(_Gauges(worker, self._kinds))

    def listen(self, events: Events) -> None:
        """Count these events."""
        events.on("worker.started", self._begin)
        for name, outcome in _OUTCOMES.items():
            events.on(name, partial(self._end, outcome))
        events.on("job.claimed", self._claim)
        events.on("job.lost", self._lose)
        events.on("job.stalled", self._stall)
        events.on("job.cleared", self._clear)
        events.on("job.fenced", lambda event: self._fenced.labels(self._kind(event)).inc())
        events.on("job.skipped", self._skip)
        events.on("message.republished", lambda event: self._republished.inc(event.fields["jobs"]))
        events.on("message.dead", lambda event: self._dead.inc(event.fields["messages"]))
        events.on("row.refused", self._refuse)
        events.on("schedule.fired", self._fire)
        events.on("schedule.skipped", lambda event: self._left_out.labels(self._kind(event)).inc())
        events.on("schedule.refused", lambda event: self._unfired.labels(self._kind(event)).inc())
        events.on("jobs.pruned", lambda event: self._pruned.inc(event.fields["jobs"]))
        events.on("heartbeat.failed", lambda _: self._unanswered.inc())
        events.on("worker.degraded", lambda event: self._set_degraded(event, 1))
        events.on("worker.restored", lambda event: self._set_degraded(event, 0))

    def _begin(self, event: Event) -> None:
        """Show as zero what has not happened yet: Prometheus sees no increase in what was not there."""
        for kind in dict.fromkeys(map(self._kinds.label, event.fields["kinds"])):
            for outcome in _OUTCOMES.values():
                self._ended.labels(kind, outcome)
            for cause in _CAUSES:
                self._stalled.labels(kind, cause, "true")
            self._stalled.labels(kind, _OPERATOR, "false")
            self._fenced.labels(kind)
            self._late.labels(kind)

    def _claim(self, event: Event) -> None:
        waited = event.fields.get("waited")
        if waited is not None:
            self._waited.labels(self._kind(event)).observe(waited)

    def _fire(self, event: Event) -> None:
        self._fired.labels(self._kind(event)).observe(event.fields["seconds_late"])

    def _end(self, outcome: str, event: Event) -> None:
        seconds = event.fields.get("seconds")
        if seconds is None:  # emitted by a sweep, or of an error in a hook: no run has ended here
            return
        self._ended.labels(self._kind(event), outcome).inc()
        self._ran.labels(self._kind(event)).observe(seconds)

    def _lose(self, event: Event) -> None:
        if event.fields.get("late_write"):
            self._late.labels(self._kind(event)).inc()

    def _stall(self, event: Event) -> None:
        counted = "true" if event.fields["counted"] else "false"
        self._stalled.labels(self._kind(event), event.fields["cause"], counted).inc()

    def _clear(self, event: Event) -> None:
        if event.fields["cause"] == _OPERATOR:  # all others were counted as stalls before
            self._stalled.labels(self._kind(event), _OPERATOR, "false").inc()

    def _skip(self, event: Event) -> None:
        self._skipped.labels(self._kind(event), str(event.fields["status"])).inc()

    def _refuse(self, event: Event) -> None:
        attempted = str(event.fields.get("attempted", "other"))
        self._refused.labels(attempted).inc(event.fields.get("jobs", 1))

    def _set_degraded(self, event: Event, value: int) -> None:
        if event.fields["what"] in _SERVERS:
            self._degraded.labels(event.fields["what"]).set(value)
        elif event.fields["what"] == "publishing":
            self._publishing_refused.set(value)

    def _kind(self, event: Event) -> str:
        return self._kinds.label(str(event.fields.get("kind", "")))


class _Gauges(Collector):
    """Reads a worker's status whenever its registry is collected."""

    def __init__(self, worker: Observed, kinds: KindLabels) -> None:
        self._worker = worker
        self._kinds = kinds

    def collect(self) -> Iterator[Metric]:
        """Yield the worker's status, and what its last survey found."""
        yield of_logs()
        status, fleet = self._worker.status(), self._worker.fleet()
        if status is not None:
            yield from _of_worker(status, self._kinds)
        if fleet is not None:
            yield from of_fleet(fleet)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: what there is depends on the worker."""
        return ()


def of_logs() -> Metric:
    """Return how many of this process's log lines were dropped."""
    return CounterMetricFamily(
        "jsworker_log_lines_dropped", "Log lines that nobody read in time.", value=lines_dropped()
    )


def _of_worker(status: WorkerStatus, kinds: KindLabels) -> Iterator[Metric]:
    in_flight = _gauge("runs_in_flight", "Runs in hand: waiting for a slot, running or settling.", "kind")
    by_label: dict[str, int] = {}
    for kind, runs in status.in_flight.items():
        label = kinds.label(kind)
        by_label[label] = by_label.get(label, 0) + runs
    for label, runs in by_label.items():
        in_flight.add_metric([label], runs)
    yield in_flight
    yield _single(
        "heartbeat_lag_seconds",
        "Seconds since the start of the last heartbeat that PostgreSQL answered.",
        status.heartbeat_lag,
    )
    yield _single(
        "event_loop_lag_seconds",
        "Longest delay of the event loop within the last half minute.",
        status.event_loop_lag,
    )
    recovery = _gauge("recovery_enabled", "1 while jobs are taken back by this rule of recovery.", "rule")
    for rule, is_on in status.recovers_by.items():
        recovery.add_metric([rule], is_on)
    yield recovery
    in_use = _gauge("database_connections_in_use", "Connections to PostgreSQL that are lent.", "pool")
    limit = _gauge("database_connections_limit", "Connections that may be lent at once.", "pool")
    for name, pool in status.pools.items():
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
