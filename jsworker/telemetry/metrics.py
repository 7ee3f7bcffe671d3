"""Figures for Prometheus, counted from a worker's events."""

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jsworker.core.events import Event, Events
from jsworker.telemetry.gauges import Gauges
from jsworker.telemetry.kind_labels import KindLabels
from jsworker.telemetry.worker_status import Patient

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
    """Figures of one worker process: counted from its events, or read when somebody asks.

    ``Metrics(registry).watch(worker)`` is all that an application needs which runs a ``Worker`` itself. Names
    follow the conventions of Prometheus: a unit or ``total`` at the end, few values for each label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every counter, so that it is there, at zero, before anything happens.

        Args:
            registry: where they are collected from.
        """
        self._registry = registry
        self._watched = False
        self._kinds = KindLabels()
        self._ended = Counter(
            "jsworker_runs_ended", "Runs that ended in this process.", ["kind", "outcome"], registry=registry
        )
        self._stalled = Counter(*STALLS, registry=registry)
        self._fenced = Counter(
            "jsworker_runs_fenced",
            "Runs that this process stopped because its heartbeats were not answered.",
            ["kind"],
            registry=registry,
        )
        self._waited = Histogram(
            "jsworker_queue_wait_seconds",
            "From the moment at which a job became due to its claim, by PostgreSQL's clock.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._ran = Histogram(
            "jsworker_run_duration_seconds",
            "From the claim of a job to the end of its run, however that ended.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._late = Counter(
            "jsworker_late_writes_rejected",
            "Outcomes that came from runs which owned their job no more; nothing was written.",
            ["kind"],
            registry=registry,
        )
        self._skipped = Counter(
            "jsworker_claims_refused",
            "Messages whose job could not be claimed, by the status that stood against it.",
            ["kind", "reason"],
            registry=registry,
        )
        self._republished = Counter(
            "jsworker_messages_republished", "Messages that were proven to be gone.", registry=registry
        )
        self._dead = Counter("jsworker_messages_dead", "Messages that nobody could use.", registry=registry)
        self._refused = Counter(
            "jsworker_rows_refused",
            "Rows whose writing PostgreSQL refused to this process for the first time.",
            ["attempted"],
            registry=registry,
        )
        self._pruned = Counter(
            "jsworker_jobs_pruned",
            "Ended jobs that this process deleted, by their retention.",
            registry=registry,
        )
        self._unheard = Counter(
            "jsworker_heartbeats_failed", "Heartbeats that the database did not answer.", registry=registry
        )
        self._degraded = Gauge(
            "jsworker_degraded", "1 while a server cannot be reached.", ["server"], registry=registry
        )
        for server in _SERVERS:
            self._degraded.labels(server).set(0)
        self._publishing_refused = Gauge(
            "jsworker_publishing_refused",
            "1 while JetStream stores no messages, and jobs are claimed from the table.",
            registry=registry,
        )

    def watch(self, worker: Patient) -> None:
        """Count what happens to a worker, and show how it is whenever somebody asks, from whichever thread.

        Raises:
            ValueError: another worker is watched; each wants a registry of its own.
        """
        if self._watched:
            raise ValueError(
                "these metrics watch a worker already: make others, with a registry of their own"
            )
        self._watched = True
        self.listen(worker.events)
        self._registry.register(Gauges(worker, self._kinds))

    def listen(self, events: Events) -> None:
        """Count what these events tell."""
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
        events.on("jobs.pruned", lambda event: self._pruned.inc(event.fields["jobs"]))
        events.on("heartbeat.failed", lambda _: self._unheard.inc())
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

    def _end(self, outcome: str, event: Event) -> None:
        seconds = event.fields.get("seconds")
        if seconds is None:  # the job's, told by a sweep, or an error in a hook: no run has ended here
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
        if event.fields["cause"] == _OPERATOR:  # all others were told, and counted, as stalls before
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
