"""What the supervisor answers to Kubernetes and Prometheus, from its children's reports.

No answer touches a server or waits for a child: a child that hangs cannot fake health, and a client that asks
too often costs nothing but the parent's own time.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

import jsworker
from jsworker.supervisor.children import DEATHS, FleetView, PlaceView
from jsworker.telemetry.figures import exposition, merged, unpacked, wants_openmetrics
from jsworker.telemetry.http import Response, Route
from jsworker.telemetry.metrics import STALLS, of_logs
from jsworker.telemetry.worker_status import Readiness

FRESH_SECONDS: Final = 5.0
"""An older report does not count."""
FRESH_FIGURES_SECONDS: Final = 60.0
"""Older figures are not shown: none are better than wrong ones."""

_OK: Final = "ok"
_SUPERVISOR: Final = "supervisor"
"""Its place among the processes, in figures that all of them have."""
_REBUILT_AFTER_SECONDS: Final = 1.0


class Probes:
    """The paths of the HTTP port."""

    def __init__(self, look: Callable[[], FleetView]) -> None:
        """Answer from what ``look`` returns."""
        self._look = look
        self._shown: dict[bool, tuple[float, Response]] = {}
        self._building = asyncio.Lock()

    def routes(self) -> dict[str, Route]:
        """Return the answers by path."""
        return {
            "/livez": lambda _: livez(self._look()),
            "/readyz": lambda _: readyz(self._look()),
            "/startupz": lambda _: startupz(self._look()),
            "/metrics": self._metrics,
        }

    async def _metrics(self, accept: str) -> Response:
        as_openmetrics = wants_openmetrics(accept)
        async with self._building:  # requests that come meanwhile get the same answer
            view = self._look()
            kept_at, kept = self._shown.get(as_openmetrics, (0.0, None))
            if kept is not None and 0 <= view.now - kept_at < _REBUILT_AFTER_SECONDS:
                return kept
            # In a thread: the figures of many kinds take longer than the event loop may be held up.
            answer = await asyncio.to_thread(_exposition, view, as_openmetrics=as_openmetrics)
            self._shown[as_openmetrics] = (view.now, answer)
            return answer


def livez(view: FleetView) -> Response:
    """Answer whether the supervisor does its work: a child that hangs is killed in time.

    A child that is being restarted, or one that cannot reach its servers, is no reason to kill the pod.
    """
    lines = [
        f"process {place.number}: its event loop has not come round for {place.silent_seconds:.0f} s, "
        f"although the supervisor kills after {place.limit:g} s"
        for place in view.places
        if place.silent_seconds > 2 * place.limit
    ]
    return _answer(lines)


def startupz(view: FleetView) -> Response:
    """Answer whether every child has worked once."""
    return _answer([f"process {place.number}: starting" for place in view.places if not place.was_ready])


def readyz(view: FleetView) -> Response:
    """Answer whether at least one child can do everything; what the others cannot is named as well."""
    if view.stopping:
        return _answer(["draining"])
    complaints = {place.number: list(complaints_of(place)) for place in view.places}
    lines = [f"process {number}: {what}" for number, found in complaints.items() for what in found]
    lines += [f"process {place.number}: {what}" for place in view.places for what in remarks_on(place)]
    able = any(not found for found in complaints.values())
    return _answer(lines, able=able) if lines else _all_well(view)


def complaints_of(place: PlaceView) -> Iterator[str]:
    """Yield what a child cannot do."""
    if not place.ready:
        yield "starting"
    elif place.readiness is None or place.report_seconds is None:
        yield "no report yet"
    elif place.report_seconds > FRESH_SECONDS and not place.quiet:
        silent = place.silent_seconds
        since = f"its event loop has not come round for {silent:.0f} s"
        yield since if silent > FRESH_SECONDS else f"no report for {place.report_seconds:.0f} s"
    else:
        yield from _degraded(place.readiness)


def remarks_on(place: PlaceView) -> Iterator[str]:
    """Yield what is not as it should be with a child that can do its work all the same."""
    readiness = place.readiness
    if readiness is not None and readiness.nats and not readiness.publishing:
        yield "publishing: JetStream stores no messages; jobs are claimed from the table"


def families(view: FleetView) -> list[Metric]:
    """Return the figures of all children, and the supervisor's own."""
    processes = {
        str(place.number): _unpacked(place.figures)
        for place in view.places
        if place.figures_seconds < FRESH_FIGURES_SECONDS
    }
    stalls = CounterMetricFamily(STALLS[0], STALLS[1], labels=STALLS[2])
    for (kind, counted), runs in view.stalls.items():
        stalls.add_metric([kind, "dead", "true" if counted else "false"], runs)
    processes[_SUPERVISOR] = [of_logs(), stalls]
    wanted = GaugeMetricFamily("jsworker_processes", "Worker processes that there should be.")
    wanted.add_metric([], len(view.places))
    ready = GaugeMetricFamily("jsworker_processes_ready", "Worker processes that work.")
    ready.add_metric([], sum(place.ready for place in view.places))
    age = GaugeMetricFamily(
        "jsworker_report_age_seconds",
        "Seconds since a worker process that works told its figures.",
        labels=["process"],
    )
    for place in view.places:
        if place.ready and not place.quiet:
            age.add_metric([str(place.number)], place.figures_seconds)
    deaths = CounterMetricFamily(
        "jsworker_process_deaths", "Worker processes that ended and were not told to.", labels=["how"]
    )
    for how in DEATHS:
        deaths.add_metric([how], view.deaths.get(how, 0))
    build = GaugeMetricFamily(
        "jsworker_build_info", "Always 1; its label is the version.", labels=["version"]
    )
    build.add_metric([jsworker.__version__], 1)
    return [*merged(processes), wanted, ready, age, deaths, build]


def _exposition(view: FleetView, *, as_openmetrics: bool) -> Response:
    return Response(200, *exposition(families(view), as_openmetrics=as_openmetrics))


def _degraded(readiness: Readiness) -> Iterator[str]:
    if readiness.misfit is not None:
        yield f"migration: {readiness.misfit}"
    if not readiness.postgresql:
        yield "postgresql: no answer; nothing is pulled, finished outcomes are kept until it is back"
    if not readiness.nats:
        yield "nats: no connection; jobs are claimed from the table"
    elif not readiness.pulling and not readiness.ailing:
        yield "not pulling"
    yield from readiness.ailing


def _all_well(view: FleetView) -> Response:
    reported = [place.readiness for place in view.places if place.readiness is not None]
    migrations = sorted({readiness.migration for readiness in reported if readiness.migration is not None})
    lines = ["postgresql: ok", "nats: ok", f"migration: {' '.join(migrations)}", "pulling: ok"]
    return _answer(lines, able=True)


def _unpacked(figures: str) -> list[Metric]:
    try:
        return unpacked(figures) if figures else []
    except ValueError:  # of a child whose memory is broken; its siblings' figures are shown all the same
        return []


def _answer(lines: Sequence[str], *, able: bool = False) -> Response:
    well = able or not lines
    head = _OK if well else "not ok"
    return Response(200 if well else 503, "".join(f"{line}\n" for line in [head, *lines]).encode())
