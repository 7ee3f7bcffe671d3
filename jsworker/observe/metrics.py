"""Figures for Prometheus, counted from a worker's events."""

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from jsworker.events import Event, Events

_OUTCOMES: Final = {
    "job.completed": "completed",
    "job.error": "error",
    "job.failed": "failed",
    "job.cancelled": "cancelled",
    "job.released": "released",
    "job.lost": "lost",
}
_SERVERS: Final = ("postgresql", "nats")


class Metrics:
    """Counters of one worker process.

    Names follow the conventions of Prometheus: a unit or ``total`` at the end, few values for each label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register every counter, so that it is there, at zero, before anything happens.

        Args:
            registry: where they are collected from.
        """
        self._ended = Counter(
            "jsworker_runs_ended", "Runs that ended in this process.", ["kind", "outcome"], registry=registry
        )
        self._stalled = Counter(
            "jsworker_stalls",
            "Runs that this process took back from owners that fell silent or had ended.",
            ["kind", "cause", "counted"],
            registry=registry,
        )
        self._fenced = Counter(
            "jsworker_runs_fenced",
            "Runs that this process stopped because its heartbeats were not answered.",
            ["kind"],
            registry=registry,
        )
        self._skipped = Counter(
            "jsworker_claims_refused",
            "Messages whose job could not be claimed, by the status it had.",
            ["kind", "status"],
            registry=registry,
        )
        self._republished = Counter(
            "jsworker_messages_republished", "Messages that were proven to be gone.", registry=registry
        )
        self._dead = Counter("jsworker_messages_dead", "Messages that nobody could use.", registry=registry)
        self._unheard = Counter(
            "jsworker_heartbeats_failed", "Heartbeats that the database did not answer.", registry=registry
        )
        self._degraded = Gauge(
            "jsworker_degraded", "1 while a server cannot be reached.", ["server"], registry=registry
        )
        for server in _SERVERS:
            self._degraded.labels(server).set(0)

    def listen(self, events: Events) -> None:
        """Count what these events tell."""
        for name, outcome in _OUTCOMES.items():
            events.on(name, partial(self._end, outcome))
        events.on("job.stalled", self._stall)
        events.on("job.fenced", lambda event: self._fenced.labels(_kind(event)).inc())
        events.on("job.skipped", self._skip)
        events.on("message.republished", lambda event: self._republished.inc(event.fields["jobs"]))
        events.on("message.dead", lambda _: self._dead.inc())
        events.on("heartbeat.failed", lambda _: self._unheard.inc())
        events.on("worker.degraded", lambda event: self._set_degraded(event, 1))
        events.on("worker.restored", lambda event: self._set_degraded(event, 0))

    def _end(self, outcome: str, event: Event) -> None:
        self._ended.labels(_kind(event), outcome).inc()

    def _stall(self, event: Event) -> None:
        counted = "true" if event.fields["counted"] else "false"
        self._stalled.labels(_kind(event), event.fields["cause"], counted).inc()

    def _skip(self, event: Event) -> None:
        self._skipped.labels(_kind(event), event.fields["status"]).inc()

    def _set_degraded(self, event: Event, value: int) -> None:
        if event.fields["what"] in _SERVERS:
            self._degraded.labels(event.fields["what"]).set(value)


def _kind(event: Event) -> str:
    return str(event.fields.get("kind", ""))
