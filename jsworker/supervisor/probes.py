"""The supervisor's answers to Kubernetes and Prometheus, made from its children's reports.

No answer asks a server or waits for a child: a child that hangs cannot appear healthy, and a client that asks
too often takes only the parent's own time.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, Metric

import jsworker
from jsworker.supervisor.child_process import Death
from jsworker.supervisor.children import FleetView, PlaceView
from jsworker.telemetry.figures import exposition, merged, unpacked
from jsworker.telemetry.http import Response, Route
from jsworker.telemetry.metrics import STALLS, gauge, gauge_by, of_logs

FRESH_SECONDS: Final = 5.0
"""An older report is ignored."""
FRESH_FIGURES_SECONDS: Final = 60.0
"""Older figures are not shown: missing figures are better than wrong ones."""

_ON_OPEN_CONNECTIONS: Final = "jobs go on over the connections that are open"
_SUPERVISOR: Final = "supervisor"
"""The supervisor's value of the label ``process``, in figures that all processes have."""
_REBUILT_AFTER_SECONDS: Final = 1.0


def routes(look: Callable[[], FleetView]) -> dict[str, Route]:
    """Return the function that answers each path; ``look`` returns the present state."""
    shown: dict[bool, tuple[float, Response]] = {}
    building = asyncio.Lock()

    async def metrics(accept: str) -> Response:
        as_openmetrics = "application/openmetrics-text" in accept  # the header's other content is ignored
        async with building:  # concurrent requests get the same answer
            view = look()
            kept_at, kept = shown.get(as_openmetrics, (0.0, None))
            if kept is not None and 0 <= view.now - kept_at < _REBUILT_AFTER_SECONDS:
                return kept
            # In a thread: the figures of many kinds would block the event loop for too long.
            found = await asyncio.to_thread(lambda: exposition(families(view), as_openmetrics=as_openmetrics))
            shown[as_openmetrics] = view.now, Response(200, *found)
            return shown[as_openmetrics][1]

    return {
        "/livez": lambda _: livez(look()),
        "/readyz": lambda _: readyz(look()),
        "/startupz": lambda _: startupz(look()),
        "/metrics": metrics,
    }


def livez(view: FleetView) -> Response:
    """Answer whether the supervisor works: a child that hangs is killed in time.

    A child that is being restarted or cannot reach its servers is no reason to kill the pod.
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
    """Answer whether at least one child can do all its work; name what the others cannot do."""
    if view.stopping:
        return _answer(["draining"])
    complaints = {place.number: list(_complaints_of(place)) for place in view.places}
    lines = [f"process {number}: {what}" for number, found in complaints.items() for what in found]
    reported = [(place.number, place.readiness) for place in view.places if place.readiness is not None]
    # A child whose messages are not stored can still do its work.
    lines += [
        f"process {number}: publishing: JetStream stores no messages; jobs are claimed from the table"
        for number, readiness in reported
        if readiness.nats and not readiness.publishing
    ]
    # An operator wants it: no roll-out may wait for this child.
    lines += [
        f"process {number}: drained by an operator" for number, readiness in reported if readiness.drained
    ]
    if lines:
        return _answer(lines, able=not all(complaints.values()))
    migrations = sorted({readiness.migration for _, readiness in reported if readiness.migration is not None})
    lines = ["postgresql: ok", "nats: ok", f"migration: {' '.join(migrations)}", "pulling: ok"]
    return _answer(lines, able=True)


def _complaints_of(place: PlaceView) -> Iterator[str]:
    silent = place.silent_seconds
    blocked = f"its event loop has not come round for {silent:.0f} s" if silent > FRESH_SECONDS else None
    if not place.ready:
        yield "starting"
    elif (readiness := place.readiness) is None or place.report_seconds is None:
        yield blocked or "no report yet"
    elif place.report_seconds > FRESH_SECONDS and not place.quiet:
        yield blocked or f"no report for {place.report_seconds:.0f} s"
    else:
        if readiness.schema_mismatch is not None:
            yield f"migration: {readiness.schema_mismatch}"
        if readiness.refusal is not None:
            yield f"postgresql refuses a statement: {readiness.refusal}; jsworker doctor names the cause"
        elif not readiness.postgresql:
            why = readiness.silence or "no answer"
            stopped = "nothing is pulled, finished outcomes are kept until it is back"
            yield f"postgresql: {why}; {_ON_OPEN_CONNECTIONS if readiness.answered else stopped}"
        if not readiness.nats:
            yield "nats: no connection; jobs are claimed from the table"
        elif not readiness.pulling and not readiness.problems:
            yield "not pulling"
        yield from readiness.problems


def families(view: FleetView) -> list[Metric]:
    """Return the figures of all children, and the supervisor's own."""
    processes: dict[str, list[Metric]] = {}
    for place in view.places:
        if place.figures and place.figures_seconds < FRESH_FIGURES_SECONDS:
            with suppress(ValueError):  # a child with corrupt memory; those of the others are still shown
                processes[str(place.number)] = unpacked(place.figures)
    stalls = CounterMetricFamily(STALLS[0], STALLS[1], labels=STALLS[2])
    for (kind, counted), runs in view.stalls.items():
        stalls.add_metric([kind, "dead", "true" if counted else "false"], runs)
    processes[_SUPERVISOR] = [of_logs(), stalls]
    deaths = CounterMetricFamily(
        "jsworker_process_deaths", "Worker processes that ended without a request to.", labels=["how"]
    )
    for how in get_args(Death):
        deaths.add_metric([how], view.deaths.get(how, 0))
    works = {str(place.number): place for place in view.places if place.ready}
    ages = {number: place.figures_seconds for number, place in works.items() if not place.quiet}
    return [
        *merged(processes),
        gauge("processes", "Worker processes that there should be.", len(view.places)),
        gauge("processes_ready", "Worker processes that work.", len(works)),
        gauge_by(
            "process", "report_age_seconds", "Seconds since the last report of a working process.", ages
        ),
        deaths,
        gauge_by("version", "build_info", "Always 1; its label is the version.", {jsworker.__version__: 1}),
    ]


def _answer(lines: Sequence[str], *, able: bool = False) -> Response:
    status, head = (200, "ok") if able or not lines else (503, "not ok")
    return Response(status, "".join(f"{line}\n" for line in [head, *lines]).encode())
