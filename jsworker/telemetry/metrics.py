"""Figures for Prometheus: counted from a worker's events, or read from the worker at each collection."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jsworker.core.clock import DURATION_BUCKETS
from jsworker.core.events import Event, EventName, Events, Listener
from jsworker.telemetry.logs import lines_dropped
from jsworker.telemetry.worker_status import OTHER_KINDS, Fleet, KindLabels, Observed, WorkerStatus

_ENDS: Final[tuple[EventName, ...]] = (
    "job.completed",
    "job.error",
    "job.failed",
    "job.cancelled",
    "job.released",
    "job.lost",
    "job.snoozed",
)
_OUTCOMES: Final = {name: name.removeprefix("job.") for name in _ENDS}
_SERVERS: Final = ("postgresql", "nats")
_CAUSES: Final = ("stale", "crashed", "dead", "crashed in quarantine", "crashed in isolation")
_OPERATOR: Final = "operator"
ISOLATED_ENDS: Final = (
    *("jobs", "memory", "files", "threads"),
    *("memory exceeded", "stop ignored", "silent", "not ready", "crashed"),
)
"""Why processes of isolated jobs end, apart from the end of their worker."""
STALLS: Final = (
    "jsworker_stalls",
    "Runs that were taken back: from owners that fell silent or had ended, or by an operator.",
    ("kind", "cause", "counted"),
)
"""Name, documentation and labels of the figure that both workers and their supervisor have."""
_OF_QUEUES: Final = (
    ("queue_oldest_seconds", "waiting.oldest_seconds", "For how long the job at the front has been queued."),
    ("queue_drift_jobs", "drift", "Jobs that expect a message in the stream minus messages there."),
    ("consumer_pending_messages", "pending", "Messages that were never delivered."),
    ("consumer_unacknowledged_messages", "unacknowledged", "Messages delivered and not answered."),
    (
        "schedule_lag_seconds",
        "waiting.schedule_lag_seconds",
        "For how long the first due schedule was not fired.",
    ),
)
"""Name, field of ``KindQueue`` and documentation of the gauges by kind."""
_OF_LIMITS: Final = (
    ("limit_running_jobs", "Running jobs of the key that is nearest to its limit."),
    ("limit_max_running_jobs", "How many jobs of that key may run."),
    ("limit_full_keys", "Keys of which as many jobs run as may."),
)
"""Names and documentation of the gauges of ``Waiting.limit``: one value per kind, not per key."""


class Metrics(Collector):
    """Figures of one worker process.

    An application that runs a ``Worker`` itself needs only ``Metrics(registry).watch(worker)``. Names follow
    the conventions of Prometheus: a unit or ``total`` at the end, few values for each label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every counter, so that it exists, at zero, before anything happens."""
        counter = partial(Counter, namespace="jsworker", registry=registry)
        gauge = partial(Gauge, namespace="jsworker", registry=registry)
        seconds = partial(
            Histogram, namespace="jsworker", labelnames=["kind"], buckets=DURATION_BUCKETS, registry=registry
        )
        self._registry = registry
        self._worker: Observed | None = None
        self._kinds = KindLabels()
        self._stalled = Counter(*STALLS, registry=registry)
        self._ended = counter("runs_ended", "Runs that ended in this process.", ["kind", "outcome"])
        self._fenced = counter("runs_fenced", "Runs stopped while heartbeats were not answered.", ["kind"])
        self._late = counter("late_writes_rejected", "Outcomes of runs that had lost their job.", ["kind"])
        self._skipped = counter("claims_refused", "Messages whose job was not claimed.", ["kind", "reason"])
        self._republished = counter("messages_republished", "Messages that were proven to be gone.")
        self._dead = counter("messages_dead", "Messages that could not be used.")
        self._refused = counter("rows_refused", "Rows that PostgreSQL refused, once each.", ["attempted"])
        self._pruned = counter("jobs_pruned", "Ended jobs that this process deleted, by their retention.")
        self._expired = counter("jobs_expired", "Jobs that were cancelled, not begun in time.", ["kind"])
        self._unanswered = counter("heartbeats_failed", "Heartbeats that the database did not answer.")
        self._waited = seconds("queue_wait_seconds", "From when a job was due to its claim.")
        self._ran = seconds("run_duration_seconds", "From the claim of a job to the end of its run.")
        self._fired = seconds("schedule_delay_seconds", "From a schedule's instant to its job.")
        self._left_out = counter("schedule_instants_skipped", "Instants without a job, by policy.", ["kind"])
        self._unfired = counter("schedules_refused", "Schedules that could not be fired.", ["kind"])
        self._workflows = counter("workflows_finished", "Workflows that this process finished.", ["outcome"])
        for outcome in ("completed", "failed", "cancelled"):
            self._workflows.labels(outcome)
        self._isolated = counter("isolated_processes_ended", "Child processes for isolated jobs.", ["cause"])
        for cause in ISOLATED_ENDS:
            self._isolated.labels(cause)
        self._publishing_refused = gauge("publishing_refused", "1 while JetStream stores no messages.")
        self._degraded = gauge(
            "degraded", "1 while a server cannot be reached, or PostgreSQL refuses a statement.", ["server"]
        )

    def watch(self, worker: Observed) -> None:
        """Count a worker's events, and read its status whenever its registry is collected, from any thread.

        Raises ValueError if a worker is watched already: each worker needs a registry of its own.
        """
        if self._worker is not None:
            raise ValueError("these metrics watch a worker already: make others, with their own registry")
        self._worker = worker
        self.listen(worker.events)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the watched worker's status, and what its last survey found."""
        yield of_logs()
        if self._worker is not None and (status := self._worker.status()) is not None:
            yield from _of_worker(status, self._kinds)
        if self._worker is not None and (fleet := self._worker.fleet()) is not None:
            yield from of_fleet(fleet)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the set of figures depends on the worker."""
        return ()

    def listen(self, events: Events) -> None:
        """Count these events."""
        for name, outcome in _OUTCOMES.items():
            events.on(name, partial(self._end, outcome))
        listeners: dict[EventName, Listener] = {
            "worker.started": self._begin,
            "job.claimed": self._claim,
            "job.lost": self._lose,
            "job.stalled": self._take_back,
            "job.cleared": self._take_back,
            "job.fenced": lambda event: self._fenced.labels(self._kind(event)).inc(),
            "job.skipped": self._skip,
            "message.republished": lambda event: self._republished.inc(event.fields["jobs"]),
            "message.dead": lambda event: self._dead.inc(event.fields["messages"]),
            "row.refused": self._refuse,
            "schedule.fired": self._fire,
            "schedule.skipped": lambda event: self._left_out.labels(self._kind(event)).inc(
                event.fields["instants"]
            ),
            "schedule.refused": lambda event: self._unfired.labels(self._kind(event)).inc(),
            "jobs.expired": lambda event: self._expired.labels(self._kind(event)).inc(event.fields["jobs"]),
            "workflow.finished": lambda event: self._workflows.labels(event.fields["outcome"]).inc(),
            "jobs.pruned": lambda event: self._pruned.inc(event.fields["jobs"]),
            "isolated.ended": lambda event: self._isolated.labels(event.fields["cause"]).inc(),
            "heartbeat.failed": lambda _: self._unanswered.inc(),
            "worker.degraded": self._set_degraded,
            "worker.restored": self._set_degraded,
        }
        for name, listener in listeners.items():
            events.on(name, listener)

    def _begin(self, event: Event) -> None:
        """Create what has labels at zero: Prometheus sees no increase of a counter that appears later.

        Until then a server is not shown as reached: that would end the alert for an outage of all workers.
        """
        for server in _SERVERS:
            self._degraded.labels(server)
        for kind in dict.fromkeys(map(self._kinds.label, event.fields["kinds"])):
            for outcome in _OUTCOMES.values():
                self._ended.labels(kind, outcome)
            for cause in _CAUSES:
                self._stalled.labels(kind, cause, "true")
            self._stalled.labels(kind, _OPERATOR, "false")
            self._fenced.labels(kind)
            self._late.labels(kind)

    def _claim(self, event: Event) -> None:
        if (waited := event.fields.get("waited")) is not None:
            self._waited.labels(self._kind(event)).observe(waited)

    def _fire(self, event: Event) -> None:
        self._fired.labels(self._kind(event)).observe(event.fields["seconds_late"])

    def _end(self, outcome: str, event: Event) -> None:
        seconds = event.fields.get("seconds")
        if seconds is None:  # the event of a sweep, or of an error in a hook: no run has ended here
            return
        self._ended.labels(self._kind(event), outcome).inc()
        self._ran.labels(self._kind(event)).observe(seconds)

    def _lose(self, event: Event) -> None:
        if event.fields.get("late_write"):
            self._late.labels(self._kind(event)).inc()

    def _take_back(self, event: Event) -> None:
        cause = event.fields["cause"]
        # Unless an operator cleared it, a cleared job had a job.stalled before: this figure includes it.
        if event.name == "job.stalled" or cause == _OPERATOR:
            counted = "true" if event.fields.get("counted") else "false"
            self._stalled.labels(self._kind(event), cause, counted).inc()

    def _skip(self, event: Event) -> None:
        self._skipped.labels(self._kind(event), str(event.fields["status"])).inc()

    def _refuse(self, event: Event) -> None:
        attempted = str(event.fields.get("attempted", "other"))
        self._refused.labels(attempted).inc(event.fields.get("jobs", 1))

    def _set_degraded(self, event: Event) -> None:
        what, is_degraded = event.fields["what"], event.name == "worker.degraded"
        if what == "start":  # PostgreSQL has no connection or no disk space left for a worker that starts
            what = "postgresql"
        if what in _SERVERS:
            self._degraded.labels(what).set(is_degraded)
        elif what == "publishing":
            self._publishing_refused.set(is_degraded)

    def _kind(self, event: Event) -> str:
        return self._kinds.label(str(event.fields.get("kind", "")))


def of_logs() -> Metric:
    """Return how many of this process's log lines were dropped."""
    return CounterMetricFamily(
        "jsworker_log_lines_dropped", "Log lines that were not read in time.", value=lines_dropped()
    )


def _of_worker(status: WorkerStatus, kinds: KindLabels) -> Iterator[Metric]:
    in_flight: Tally[str] = Tally()
    for kind, runs in status.in_flight.items():
        in_flight[kinds.label(kind)] += runs
    yield gauge_by("kind", "runs_in_flight", "Runs that wait for a slot, run or are settled.", in_flight)
    lag, loop_lag = status.heartbeat_lag, status.event_loop_lag
    yield gauge("heartbeat_lag_seconds", "Since the start of the last heartbeat that was answered.", lag)
    yield gauge("event_loop_lag_seconds", "Longest delay within the last half minute.", loop_lag)
    yield CounterMetricFamily(
        "jsworker_events_dropped",
        "Events for plain subscribers of NATS that were not sent.",
        value=status.events_dropped,
    )
    recovers_by = status.recovers_by
    yield gauge_by("rule", "recovery_enabled", "1 while jobs are taken back by this rule.", recovers_by)
    in_use = {name: lent for name, (lent, _) in status.pools.items()}
    yield gauge_by("pool", "database_connections_in_use", "Connections to PostgreSQL that are lent.", in_use)
    processes = {"busy": status.isolated.busy, "idle": status.isolated.idle}
    yield gauge_by("state", "isolated_processes", "Child processes for isolated jobs.", processes)
    limits = {name: limit for name, (_, limit) in status.pools.items()}
    yield gauge_by("pool", "database_connections_limit", "Connections that may be lent at once.", limits)


def of_fleet(fleet: Fleet) -> Iterator[Metric]:
    """Yield the gauges of the whole installation, which are the same in every pod."""
    waiting = {kind: queue.waiting for kind, queue in fleet.queues.items()}
    jobs = {kind: each.jobs for kind, each in waiting.items()}
    yield _by_kind_and("status", "jobs", "Live jobs in the table.", jobs)
    held = {kind: each.held for kind, each in waiting.items()}
    documentation = "Jobs that wait for an event, not for a time; counted up to 10,000."
    yield _by_kind_and("held_by", "held_jobs", documentation, held)
    held_for = {kind: each.held_oldest_seconds for kind, each in waiting.items()}
    documentation = "For how long the first of them has been held."
    yield _by_kind_and("held_by", "held_oldest_seconds", documentation, held_for)
    for name, field, documentation in _OF_QUEUES:
        read = attrgetter(field)
        values = {kind: read(queue) for kind, queue in fleet.queues.items()}
        yield gauge_by("kind", name, documentation, values)
    # Kinds that use neither high nor low priority have no figures.
    lanes = {kind: {lane: use[0] for lane, use in each.lanes.items()} for kind, each in waiting.items()}
    yield _by_kind_and("priority", "queue_lane_jobs", "Queued jobs of high or low priority.", lanes)
    oldest_of = {kind: {lane: use[1] for lane, use in each.lanes.items()} for kind, each in waiting.items()}
    documentation = "For how long the oldest of them has been queued."
    yield _by_kind_and("priority", "queue_lane_oldest_seconds", documentation, oldest_of)
    paused = {kind: int(each.is_paused) for kind, each in waiting.items() if kind != OTHER_KINDS}
    yield gauge_by("kind", "kind_paused", "1 while a whole kind is paused.", paused)
    limits = {kind: each.limit for kind, each in waiting.items()}
    for place, (name, documentation) in enumerate(_OF_LIMITS):
        uses = {kind: limit[place] for kind, limit in limits.items() if limit is not None}
        yield gauge_by("kind", name, documentation, uses)
    oldest, refused = fleet.outbox_oldest_seconds, fleet.refused_rows
    yield gauge("outbox_jobs", "Queued jobs whose message is still to be sent.", fleet.outbox_jobs)
    yield gauge("outbox_oldest_seconds", "For how long the oldest of them has been queued.", oldest)
    yield gauge_by("attempted", "refused_rows", "Jobs whose row PostgreSQL refuses: set aside.", refused)
    yield gauge("dead_messages", "Messages kept because they could not be used.", fleet.dead_messages)
    yield gauge(
        "workflows_left_seconds",
        "For how long a batch or workflow was not finished although all its jobs have ended.",
        fleet.workflows_left_seconds,
    )


def gauge(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    """Return a gauge of one value."""
    return GaugeMetricFamily(f"jsworker_{name}", documentation, value=value)


def gauge_by(
    label: str, name: str, documentation: str, values: Mapping[str, float | None]
) -> GaugeMetricFamily:
    """Return a gauge with one value for each value of a label; unknown values, None, are left out."""
    family = GaugeMetricFamily(f"jsworker_{name}", documentation, labels=[label])
    for key, value in values.items():
        if value is not None:
            family.add_metric([key], value)
    return family


def _by_kind_and(
    label: str, name: str, documentation: str, values: Mapping[str, Mapping[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"jsworker_{name}", documentation, labels=["kind", label])
    for kind, of_kind in values.items():
        for key, value in of_kind.items():
            family.add_metric([kind, key], value)
    return family
