"""What the probes answer: from what children told, and from how long they have been silent."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from jsworker.supervisor.children import FleetView, PlaceView
from jsworker.supervisor.probes import livez, readyz, routes, startupz
from jsworker.telemetry.figures import packed
from jsworker.telemetry.http import Response, Route
from jsworker.telemetry.worker_status import Readiness

WELL = Readiness(postgresql=True, nats=True, migration="0001", pulling=True, draining=False, problems=())
WORKING = PlaceView(
    number=1,
    was_ready=True,
    ready=True,
    silent_seconds=0.1,
    limit=2.0,
    report_seconds=0.5,
    readiness=WELL,
)
STARTING = replace(WORKING, was_ready=False, ready=False, report_seconds=None, readiness=None)
DEAD = PlaceView(number=1, was_ready=True)


def view(*places: PlaceView, stopping: bool = False) -> FleetView:
    numbered = [replace(place, number=number) for number, place in enumerate(places, 1)]
    return FleetView(numbered, stopping, {"killed": 3}, 100.0)


def degraded(**changes: object) -> PlaceView:
    return replace(WORKING, readiness=replace(WELL, **changes))  # type: ignore[arg-type]  # any of its fields


def test_all_is_well() -> None:
    for probe in (livez, startupz):
        answer = probe(view(WORKING, WORKING))
        assert (answer.status, answer.body) == (200, b"ok\n")
    ready = readyz(view(WORKING, WORKING))
    assert ready.status == 200
    assert ready.body.decode().splitlines() == [
        "ok",
        "postgresql: ok",
        "nats: ok",
        "migration: 0001",
        "pulling: ok",
    ]


def test_a_starting_child_is_alive_and_not_ready() -> None:
    assert livez(view(STARTING)).status == 200
    assert startupz(view(WORKING, STARTING)).body == b"not ok\nprocess 2: starting\n"
    assert readyz(view(STARTING)).status == 503


def test_one_child_that_works_makes_ready_and_the_other_is_named() -> None:
    answer = readyz(view(WORKING, DEAD))
    assert (answer.status, answer.body) == (200, b"ok\nprocess 2: starting\n")
    assert startupz(view(WORKING, DEAD)).status == 200


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (degraded(postgresql=False), "postgresql: no answer; nothing is pulled"),
        (
            degraded(postgresql=False, silence="PostgreSQL at db:5432/app is read-only (SQLSTATE 25006)"),
            "postgresql: PostgreSQL at db:5432/app is read-only (SQLSTATE 25006); nothing is pulled",
        ),
        (
            degraded(postgresql=False, silence="PostgreSQL at db:5432/app is not available", answered=True),
            "postgresql: PostgreSQL at db:5432/app is not available; jobs go on over the connections",
        ),
        (
            degraded(postgresql=False, refusal="permission denied for table jobs (SQLSTATE 42501)"),
            "postgresql refuses a statement: permission denied for table jobs (SQLSTATE 42501); jsworker",
        ),
        (degraded(nats=False, pulling=False), "nats: no connection; jobs are claimed from the table"),
        (degraded(pulling=False, problems=("consumer nap is not pulled",)), "consumer nap is not pulled"),
        (replace(WORKING, report_seconds=60.0, silent_seconds=60.0), "has not come round for 60 s"),
        (replace(WORKING, report_seconds=60.0), "no report for 60 s"),
        (replace(WORKING, report_seconds=None, readiness=None), "no report yet"),
        (
            replace(WORKING, report_seconds=None, readiness=None, silent_seconds=20.0),
            "has not come round for 20 s",
        ),
    ],
)
def test_degraded_modes_are_named(place: PlaceView, says: str) -> None:
    answer = readyz(view(place))
    assert answer.status == 503
    assert says in answer.body.decode()
    assert livez(view(place)).status == (503 if place.silent_seconds > 4 else 200)


def test_a_child_that_cannot_publish_stays_ready_and_says_so() -> None:
    answer = readyz(view(degraded(publishing=False)))
    assert answer.status == 200
    says = "ok\nprocess 1: publishing: JetStream stores no messages; jobs are claimed from the table\n"
    assert answer.body.decode() == says


def test_a_drained_child_stays_ready_and_says_so() -> None:
    answer = readyz(view(degraded(drained=True)))
    assert (answer.status, answer.body.decode()) == (200, "ok\nprocess 1: drained by an operator\n")


def test_a_quiet_phase_is_no_silence() -> None:
    """During an announced quiet phase the supervisor counts no silence, though no report comes."""
    quiet = replace(WORKING, report_seconds=600.0, silent_seconds=0.0)
    assert readyz(view(replace(quiet, quiet=True))).status == 200
    assert readyz(view(quiet)).status == 503


def test_a_child_that_is_about_to_be_killed_is_not_the_pods_fault() -> None:
    assert livez(view(replace(WORKING, silent_seconds=3.9))).status == 200
    assert livez(view(replace(WORKING, silent_seconds=4.1))).status == 503


def test_a_child_that_starts_has_more_time_before_it_is_taken_for_hung() -> None:
    slow = replace(STARTING, silent_seconds=900.0, limit=600.0)
    assert livez(view(slow)).status == 200
    assert livez(view(replace(slow, silent_seconds=1300.0))).status == 503


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=²", "é", "application/openmetrics-text; version=9"]
)
async def test_what_a_client_accepts_cannot_break_the_answer(accept: str) -> None:
    answer = await metrics_of(routes(lambda: view(WORKING)), accept)
    assert answer.status == 200
    assert "²" not in answer.content_type
    assert "9" not in answer.content_type.replace("0.0.4", "")


def test_draining_is_not_ready_but_alive() -> None:
    assert readyz(view(WORKING, stopping=True)).body == b"not ok\ndraining\n"
    assert livez(view(WORKING, stopping=True)).status == 200


def figures_of(runs: int) -> str:
    registry = CollectorRegistry()
    Counter("jsworker_runs_ended", "Runs.", ["kind"], registry=registry).labels("nap").inc(runs)
    return packed(registry)


async def metrics_of(probes: dict[str, Route], accept: str = "") -> Response:
    answer = probes["/metrics"](accept)
    return answer if isinstance(answer, Response) else await answer


async def test_metrics_of_all_children_and_the_supervisor_itself() -> None:
    places = view(replace(WORKING, figures=figures_of(3)), replace(WORKING, figures=figures_of(4)), DEAD)
    answer = await metrics_of(routes(lambda: places))
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    runs = {sample.labels["process"]: sample.value for sample in families["jsworker_runs_ended"].samples}
    assert runs == {"1": 3, "2": 4}
    assert families["jsworker_processes"].samples[0].value == 3
    assert families["jsworker_processes_ready"].samples[0].value == 2
    deaths = {sample.labels["how"]: sample.value for sample in families["jsworker_process_deaths"].samples}
    assert deaths == {"hung": 0, "stop_ignored": 0, "killed": 3, "exited": 0}


async def test_broken_figures_of_one_child_hide_no_others() -> None:
    places = view(replace(WORKING, figures="nonsense"), replace(WORKING, figures=figures_of(4)))
    text = (await metrics_of(routes(lambda: places))).body.decode()
    assert 'jsworker_runs_ended_total{kind="nap",process="2"} 4.0' in text
    assert 'kind="nap",process="1"' not in text


async def test_a_child_that_works_and_tells_no_figures_is_told_by_their_age() -> None:
    silent = replace(WORKING, figures=figures_of(3), figures_seconds=61.0)
    fresh = replace(WORKING, figures=figures_of(4), figures_seconds=0.5)
    places = view(silent, fresh, replace(silent, quiet=True), replace(STARTING, figures_seconds=70.0), DEAD)
    lines = (await metrics_of(routes(lambda: places))).body.decode().splitlines()
    ages = [line for line in lines if line.startswith("jsworker_report_age_seconds{")]
    assert ages == [
        'jsworker_report_age_seconds{process="1"} 61.0',
        'jsworker_report_age_seconds{process="2"} 0.5',
    ]
    runs = [line for line in lines if line.startswith("jsworker_runs_ended_total")]
    assert runs == ['jsworker_runs_ended_total{kind="nap",process="2"} 4.0']


async def test_who_asks_often_gets_what_was_made_before() -> None:
    looks = iter([view(WORKING), replace(view(DEAD), now=100.9), replace(view(DEAD), now=101.1)])
    probes = routes(lambda: next(looks))
    first = await metrics_of(probes)
    assert await metrics_of(probes) is first
    assert b"jsworker_processes_ready 0.0" in (await metrics_of(probes)).body
