"""Probes and metrics of a real ``jsworker run``: of workers that work, hang, lose their servers, and end."""

import asyncio
import os
import signal
import socket
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from jsworker import JobClient
from jsworker.core.settings import Settings
from tests.ownership.rows import Sql, read_events
from tests.supervisor.conftest import Supervise
from tests.supervisor.parent_process import ParentProcess
from tests.supervisor.test_deaths import SLOW_RULES
from tests.support.polling import eventually
from tests.support.proxy import proxied

pytestmark = pytest.mark.hurried


async def base_of(parent: ParentProcess) -> str:
    [line] = await parent.tells("http.listening")
    return f"http://127.0.0.1:{line['port']}"


def ask(url: str, accept: str = "text/plain") -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})  # noqa: S310 -- a server of this test
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 -- likewise
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


async def answers(url: str, status: int, *words: str, seconds: float = 60.0) -> str:
    """Wait until a path answers like this, and return the answer."""

    async def answered() -> str:
        found, body = await asyncio.to_thread(ask, url)
        assert found == status, body
        for word in words:
            assert word in body, body
        return body

    return await eventually(answered, seconds=seconds)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample by its name and labels, read as OpenMetrics demands."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]  # the library's own lack
        for sample in family.samples
    }


async def test_a_fleet_that_works(supervise: Supervise, client: JobClient, sql: Sql) -> None:
    parent = supervise("Nap", processes=2, http_port=0)
    base = await base_of(parent)
    await answers(f"{base}/startupz", HTTPStatus.OK)
    await answers(f"{base}/livez", HTTPStatus.OK)
    await answers(
        f"{base}/readyz", HTTPStatus.OK, "postgresql: ok", "nats: ok", "migration: 0", "pulling: ok"
    )
    for _ in range(20):
        await client.enqueue("nap", {"seconds": 0.0})

    async def counted() -> None:
        status, text = await asyncio.to_thread(
            ask, f"{base}/metrics", "application/openmetrics-text; version=1.0.0"
        )
        assert status == HTTPStatus.OK
        found = samples(text)
        by_process = [
            found.get(
                (
                    "jsworker_runs_ended_total",
                    (("kind", "nap"), ("outcome", "completed"), ("process", number)),
                ),
                0.0,
            )
            for number in ("1", "2")
        ]
        assert sum(by_process) == 20
        names = {name for name, _ in found}
        assert {
            "jsworker_queue_wait_seconds_bucket",
            "jsworker_run_duration_seconds_bucket",
            "jsworker_runs_in_flight",
            "jsworker_heartbeat_lag_seconds",
            "jsworker_event_loop_lag_seconds",
            "jsworker_database_connections_in_use",
            "jsworker_degraded",
            "jsworker_publishing_refused",
            "jsworker_processes_ready",
        } <= names
        fleet = {name: value for (name, labels), value in found.items() if ("process", "1") in labels}
        assert fleet.get("jsworker_outbox_jobs") == 0, "not yet counted"
        assert fleet.get("jsworker_queue_drift_jobs") == 0
        assert fleet.get("jsworker_dead_messages") == 0
        assert ("jsworker_outbox_jobs", (("process", "2"),)) not in found  # one process asks for all

    await eventually(counted)

    # Kinds that nobody works on take no room: one INSERT can bring more of them than a report may name.
    sql.execute("""
        INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, stream_seq, queued_at)
        SELECT gen_random_uuid(), 'junk-' || n, '{}', 'queued', 1, 1, now()
        FROM generate_series(1, 20000) AS n
    """)
    told = 'jsworker_jobs{kind="_other",process="1",status="queued"} 20000.0'
    text = await answers(f"{base}/metrics", HTTPStatus.OK, told, 'jsworker_report_age_seconds{process="1"}')
    assert "junk" not in text
    assert 'jsworker_runs_ended_total{kind="nap"' in text
    await answers(f"{base}/readyz", HTTPStatus.OK)
    assert parent.lines("report.failed") == []


async def test_a_hung_child_is_not_ready_then_killed_and_one_that_asked_for_it_is_counted_apart(
    supervise: Supervise, client: JobClient
) -> None:
    parent = supervise(
        "Stubborn", "Blocks", http_port=0, watchdog_timeout=8.0, stale_threshold=30.0, ack_wait=60.0
    )
    base = await base_of(parent)
    await answers(f"{base}/readyz", HTTPStatus.OK)
    await client.enqueue("stubborn", {})
    await parent.tells("child.stop_ignored")
    asked = 'jsworker_process_deaths_total{how="stop_ignored"} 1.0'
    await answers(f"{base}/metrics", HTTPStatus.OK, asked)
    await answers(f"{base}/readyz", HTTPStatus.OK)  # its successor
    await client.enqueue("blocks", {})
    await answers(f"{base}/readyz", HTTPStatus.SERVICE_UNAVAILABLE, "has not come round for")
    await answers(f"{base}/livez", HTTPStatus.OK)  # the supervisor kills it: no reason to kill the pod
    await parent.tells("child.hung")
    hung = 'jsworker_process_deaths_total{how="hung"} 1.0'
    await answers(f"{base}/metrics", HTTPStatus.OK, hung, asked)
    await answers(f"{base}/readyz", HTTPStatus.OK)


def stalls(text: str, cause: str) -> dict[str, float]:
    """Return how many counted stalls of one cause each process has told."""
    return {
        dict(labels)["process"]: value
        for (name, labels), value in samples(text).items()
        if name == "jsworker_stalls_total" and {("cause", cause), ("counted", "true")} <= set(labels)
    }


async def test_what_a_lone_child_leaves_is_told_and_counted_by_the_parent(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Poison", http_port=0, max_stalls=3, recover_on_start=False, **SLOW_RULES)
    base = await base_of(parent)

    async def all_told(dead: float, quarantined: float) -> None:
        accepts = "application/openmetrics-text; version=1.0.0"
        _, text = await asyncio.to_thread(ask, f"{base}/metrics", accepts)
        assert stalls(text, "dead").get("supervisor") == dead, text
        assert sum(stalls(text, "dead").values()) == dead
        assert sum(stalls(text, "crashed in quarantine").values()) == quarantined

    await answers(f"{base}/readyz", HTTPStatus.OK)
    await eventually(lambda: all_told(0, 0))  # there before anything has happened
    job_id = (await client.enqueue("poison", {})).id
    await eventually(lambda: all_told(2, 1), seconds=60.0)
    resets = [event for event in read_events(sql, job_id) if event["event"] == "reset"]
    assert [event["detail"]["counted"] for event in resets] == [True, True]
    by_parent = [line for line in parent.lines("job.stalled") if line["cause"] == "dead"]
    assert [line["stalls"] for line in by_parent] == [1, 2]
    assert {line["job_id"] for line in by_parent} == {str(job_id)}
    assert {line["worker_id"].startswith("supervisor-") for line in by_parent} == {True}
    assert [line["to"] for line in parent.lines("job.cleared")] == ["queued", "scheduled"]


async def test_figures_of_hundreds_of_kinds_arrive_and_outages_are_still_told(
    supervise: Supervise, settings: Settings, tmp_path: Path
) -> None:
    kinds = [f"a-kind-with-a-rather-long-name-of-its-own-{number}" for number in range(150)]
    source = "from jsworker import Job, JobProcessor\n"
    for number, kind in enumerate(kinds):
        source += (
            f"class K{number}(JobProcessor):\n    kind = {kind!r}\n"
            "    async def process(self, job: Job) -> None: ...\n"
        )
    (tmp_path / "many_kinds.py").write_text(source)
    async with proxied(settings.nats_url) as (nats, nats_url):
        targets = [f"many_kinds:K{number}" for number in range(len(kinds))]
        parent = supervise(*targets, http_port=0, nats_url=nats_url)
        base = await base_of(parent)
        await answers(f"{base}/readyz", HTTPStatus.OK, seconds=60.0)
        await answers(f"{base}/metrics", HTTPStatus.OK, *(f'kind="{kind}"' for kind in kinds))
        nats.cut()
        await answers(f"{base}/readyz", HTTPStatus.SERVICE_UNAVAILABLE, "nats: no connection")
    assert parent.lines("report.failed") == []


async def test_servers_that_are_away_are_named_and_so_is_draining(
    supervise: Supervise, client: JobClient, settings: Settings
) -> None:
    async with (
        proxied(settings.database_url) as (postgresql, database_url),
        proxied(settings.nats_url) as (nats, nats_url),
    ):
        parent = supervise(
            "Nap", http_port=0, shutdown_timeout=20.0, database_url=database_url, nats_url=nats_url
        )
        base = await base_of(parent)
        await answers(f"{base}/readyz", HTTPStatus.OK)
        postgresql.cut()
        await answers(f"{base}/readyz", HTTPStatus.SERVICE_UNAVAILABLE, "postgresql: PostgreSQL at ")
        await answers(
            f"{base}/metrics", HTTPStatus.OK, 'jsworker_degraded{process="1",server="postgresql"} 1.0'
        )
        postgresql.restore()
        await answers(f"{base}/readyz", HTTPStatus.OK)
        nats.cut()
        await answers(f"{base}/readyz", HTTPStatus.SERVICE_UNAVAILABLE, "nats: no connection")
        await answers(f"{base}/livez", HTTPStatus.OK)
        await answers(f"{base}/startupz", HTTPStatus.OK)
        nats.restore()
        await answers(f"{base}/readyz", HTTPStatus.OK)
        await client.enqueue("nap", {"seconds": 3600})
        running = 'jsworker_runs_in_flight{kind="nap",process="1"} 1.0'
        await answers(f"{base}/metrics", HTTPStatus.OK, running)
        parent.send(signal.SIGTERM)
        await answers(f"{base}/readyz", HTTPStatus.SERVICE_UNAVAILABLE, "draining")
        await answers(f"{base}/livez", HTTPStatus.OK)
        parent.send(signal.SIGTERM)
        assert await parent.ends() == 0


@pytest.mark.parametrize("server", ["postgresql", "nats"])
async def test_a_process_that_starts_in_an_outage_does_not_show_the_server_as_reached(
    supervise: Supervise, settings: Settings, server: str
) -> None:
    of_server = {"postgresql": "database_url", "nats": "nats_url"}[server]
    async with proxied(getattr(settings, of_server)) as (proxy, url):
        through = settings.model_copy(update={of_server: url})
        parent = supervise("Nap", http_port=0, database_url=through.database_url, nats_url=through.nats_url)
        base = await base_of(parent)
        gauge = f'jsworker_degraded{{process="1",server="{server}"}}'
        await answers(f"{base}/metrics", HTTPStatus.OK, f"{gauge} 0.0")
        proxy.cut()
        await answers(f"{base}/metrics", HTTPStatus.OK, f"{gauge} 1.0")
        [first] = await parent.tells("child.started")
        os.kill(first["pid"], signal.SIGKILL)
        shown: list[str] = []

        async def told_by_its_successor() -> None:
            _, text = await asyncio.to_thread(ask, f"{base}/metrics")
            shown.append(text)
            told = [line for line in parent.lines("worker.degraded") if line["what"] == server]
            assert len(told) > 1
            assert f"{gauge} 1.0" in text

        await eventually(told_by_its_successor, seconds=120.0)
        assert not [text for text in shown if f"{gauge} 0.0" in text]
        proxy.restore()
        await answers(f"{base}/metrics", HTTPStatus.OK, f"{gauge} 0.0")


@pytest.mark.parametrize("port", ["70000", "http"])
async def test_a_wrong_port_is_a_wrong_setting(supervise: Supervise, port: str) -> None:
    parent = supervise("Nap", options=("--http-port", port))
    assert await parent.ends() == 2
    assert "JSWORKER_HTTP_PORT=" in parent.log
    assert port in parent.log
    assert len(parent.log.splitlines()) == 1


async def test_a_port_that_is_taken_ends_in_one_line(supervise: Supervise) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        parent = supervise("Nap", http_port=port)
        assert await parent.ends() == 1
    [last] = parent.log.splitlines()
    assert last.endswith(
        f"JSWORKER_HTTP_PORT={port} on JSWORKER_HTTP_HOST=127.0.0.1 cannot be "
        "listened to: Address already in use"
    )
