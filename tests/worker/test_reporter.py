"""A child's reports to its parent, from beside its event loop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from jsworker.supervisor.child_link import ChildLink
from jsworker.supervisor.child_reports import Reporter
from jsworker.telemetry.worker_status import Readiness
from jsworker.worker.worker import Worker
from tests.support.polling import eventually
from tests.worker.processors import echo, scripted
from tests.worker.running import StartWorker


class Parent:
    def __init__(self, *, takes_figures: bool = True) -> None:
        self.figures: list[str | None] = []
        self._takes_figures = takes_figures

    def report(self, readiness: Readiness | None, figures: str | None) -> bool:
        assert readiness is not None
        self.figures.append(figures)
        return self._takes_figures or figures is None


@contextmanager
def reporting(worker: Worker, parent: Parent) -> Iterator[None]:
    reporter = Reporter(worker, cast("ChildLink", parent))
    reporter.start()
    yield
    reporter.stop()


async def test_figures_are_packed_beside_the_event_loop_and_rest_afterwards(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing: list[threading.Thread] = []

    def slowly_packed(_: CollectorRegistry) -> str:
        packing.append(threading.current_thread())
        time.sleep(0.1)  # as those of many kinds
        return "figures"

    monkeypatch.setattr("jsworker.supervisor.child_reports.packed", slowly_packed)
    monkeypatch.setattr("jsworker.supervisor.child_reports._SECONDS", 0.02)
    monkeypatch.setattr("jsworker.supervisor.child_reports._REST", 10_000)
    running = await start(scripted(echo))
    parent = Parent()
    with reporting(running.worker, parent):

        async def told() -> None:
            assert "figures" in parent.figures
            assert parent.figures[-3:] == [None, None, None]

        await eventually(told)
    assert parent.figures.count("figures") == 1
    [thread] = packing
    assert thread is not threading.main_thread()


async def test_figures_that_cannot_be_packed_hold_back_no_report(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_packed(_: CollectorRegistry) -> str:
        raise ValueError("of a collector")

    monkeypatch.setattr("jsworker.supervisor.child_reports.packed", not_packed)
    running = await start(scripted(echo))
    parent = Parent()
    with reporting(running.worker, parent):

        async def told() -> None:
            assert parent.figures == [None]

        await eventually(told)


@pytest.mark.parametrize("remind_seconds", [3_600.0, 0.0])
async def test_figures_that_are_too_long_are_told_now_and_then(
    start: StartWorker, monkeypatch: pytest.MonkeyPatch, remind_seconds: float
) -> None:
    monkeypatch.setattr("jsworker.supervisor.child_reports._REMIND_SECONDS", remind_seconds)
    monkeypatch.setattr("jsworker.supervisor.child_reports._SECONDS", 0.02)
    monkeypatch.setattr("jsworker.supervisor.child_reports._REST", 0)
    running = await start(scripted(echo))
    parent = Parent(takes_figures=False)
    monkeypatch.setattr("jsworker.supervisor.child_reports.own_logger", structlog.get_logger)
    with capture_logs() as lines, reporting(running.worker, parent):

        async def refused_twice() -> None:
            assert len([figures for figures in parent.figures if figures is not None]) >= 2

        await eventually(refused_twice)
    told = [(line["log_level"], line["reason"]) for line in lines if line["event"] == "report.failed"]
    assert set(told) == {("error", "the figures of so many kinds are too long")}
    assert (len(told) == 1) == (remind_seconds > 0.0)
