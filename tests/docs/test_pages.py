"""The guides, docs/transactions.md and docs/tracing.md: code, excerpts, numbers and links are right."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
import yaml
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from jsworker import JobClient, Settings
from jsworker.doctor.checks import CHECKS
from jsworker.testing import assert_enqueued, work_until_empty
from tests.docs.conftest import Project
from tests.docs.pages import DOCS, FOLDERS, commands_of, files_of
from tests.ownership.guards import TRANSITIONS, flips
from tests.state_machine.mutants import FLOW_MUTANTS, MUTANTS
from tests.support.servers import TestServers

ROOT = DOCS.parent
PAGES = sorted(str(page.relative_to(DOCS)) for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))
EXCERPTS = ["contributing/add-a-transition.md", "operate/capacity.md"]


def sqlalchemy_url(settings: Settings) -> str:
    return settings.database_dsn().replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.mark.parametrize("page", [*PAGES, "transactions.md", "tracing.md"])
def test_its_code_and_its_links(page: str) -> None:
    words = (DOCS / page).read_text()
    for name, code in files_of(page).items():
        if page not in EXCERPTS:
            compile(code, name, "exec")
    links = re.findall(r"\]\(([^)#:]+\.md)", re.sub(r"(?ms)^```.*?^```", "", words))
    assert [link for link in links if not (DOCS / page).parent.joinpath(link).is_file()] == []


def test_no_page_is_long_but_references() -> None:
    long = [page for page in DOCS.rglob("*.md") if len(page.read_text().splitlines()) > 250]
    assert sorted(page.name for page in long) == ["cli.md", "performance.md", "sql.md"]


@pytest.mark.parametrize("page", EXCERPTS)
def test_its_excerpts_stand_in_their_files(page: str) -> None:
    found = re.findall(r'(?ms)^```\w+ title="([\w/]+/\w+\.py)"\n(.*?)^```', (DOCS / page).read_text())
    assert found
    assert [name for name, excerpt in found if excerpt not in (ROOT / name).read_text()] == []


def test_the_numbers_of_what_is_proven() -> None:
    words = " ".join((DOCS / "concepts" / "what-is-proven.md").read_text().split())
    model = runpy.run_path(str(ROOT / "model" / "check.py"))
    passing, failing = len(model["PROTOCOL"]), len(model["ABLATIONS"])
    assert f"{passing} variants must pass. {failing} must **fail**" in words
    assert f"There are {len(TRANSITIONS)} guarded statements" in words
    assert f"of each guard, {len(list(flips()))} in all" in words
    assert f"{len(MUTANTS) + len(FLOW_MUTANTS)} faults are put" in words


def test_the_capacity_model_prints_what_the_page_shows(project: Project, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    project("operate/capacity.md")
    words = (DOCS / "operate" / "capacity.md").read_text()
    [command] = commands_of(words)
    _, *arguments = command.line.split()
    printed = subprocess.check_output([sys.executable, *arguments], cwd=tmp_path, text=True)
    assert printed == words[command.start : command.end]


def test_pages_that_repeat_a_figure_repeat_the_measured_one() -> None:
    pages = ("figures.md", "start/when-not.md", "operate/capacity.md", "scale-out.md")
    figures, when_not, capacity, scale_out = ((DOCS / page).read_text() for page in pages)
    rates = re.search(r"(?m)^\| no-op jobs a second, one worker process.*? \| ([\d,]+) \| ([\d,]+) ", figures)
    starts = re.search(r"the start, 20 jobs/s, median / p99 \| ([\d.]+) / ([\d.]+) ", figures)
    costs = re.search(r'BATCHED = \{"postgresql": ([\d.]+)e-3, "nats": ([\d.]+)e-3', capacity)
    wal = re.search(r"WAL_BYTES = (\d+)", capacity)
    assert rates
    assert starts
    assert costs
    assert wal
    ours, loop = (int(rate.replace(",", "")) for rate in rates.groups())
    assert f"{ours:,} jobs a second" in when_not
    assert (round(loop / ours), "about five times as fast" in when_not) == (5, True)
    assert f"starts {starts[1]} ms" in when_not
    assert f"{starts[2]} ms at the 99th" in when_not
    assert f"| CPU of PostgreSQL | {costs[1]} ms |" in capacity
    assert f"| CPU of nats-server | {costs[2]} ms |" in capacity
    assert f"needs {costs[2]} ms for each job can handle {1000 / float(costs[2]):,.0f} jobs/s" in capacity
    assert f"took {costs[2]} ms of CPU a job" in scale_out
    assert f"write {int(wal[1]) / 1000:.1f} MB/s, or {int(wal[1]) * 0.0864:.0f} GB a day" in scale_out


def test_the_tests_of_the_concepts_pass(tmp_path: Path, servers: TestServers) -> None:
    for page in ("concepts/fencing.md", "concepts/at-least-once.md"):
        for name, content in files_of(page).items():
            (tmp_path / name).write_text(content)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\npythonpath = .\nasyncio_default_fixture_loop_scope = function\n"
    )
    given = {"JSWORKER_TEST_DATABASE_URL": servers.postgres.url, "JSWORKER_TEST_NATS_URL": servers.nats.url}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        | given
        | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 passed" in result.stdout


async def test_fences(project: Project, job_client: JobClient, jsworker_settings: Settings) -> None:
    module = project("concepts/fencing.md")
    ship, store = module("ship"), module("fenced_store")
    engine = create_engine(sqlalchemy_url(jsworker_settings))
    job = uuid4()
    with engine.begin() as connection:
        connection.execute(store.CREATE)
        connection.execute(text("CREATE TABLE orders (id integer, shipped integer DEFAULT 0)"))
        connection.execute(text("INSERT INTO orders VALUES (7)"))
        for token in (1, 2, 2):
            store.write_report(connection, job, token, f"by {token}")
        with pytest.raises(store.Fenced):
            store.write_report(connection, job, 1, "by a zombie")
        assert connection.execute(text("SELECT content FROM reports")).scalar() == "by 2"
    await job_client.enqueue(ship.Ship, {"order": 7})
    await work_until_empty([ship.Ship])
    with engine.connect() as connection:
        assert connection.execute(text("SELECT shipped FROM orders")).scalar() == 1
    engine.dispose()


async def test_transactions(project: Project, job_client: JobClient, jsworker_settings: Settings) -> None:
    module = project("transactions.md")
    enqueueing, completing, own = module("enqueueing"), module("completing"), module("own_session")
    columns = "id integer, confirmed integer DEFAULT 0, shipped boolean, archived boolean"
    with psycopg.connect(jsworker_settings.database_dsn()) as connection:
        connection.execute(f"CREATE TABLE orders ({columns})".encode())
    engine = create_async_engine(sqlalchemy_url(jsworker_settings))
    async with async_sessionmaker(engine)() as session:
        await enqueueing.place(session, job_client, 7)
    await engine.dispose()
    sync_engine = create_engine(sqlalchemy_url(jsworker_settings))
    with Session(sync_engine) as plain:
        enqueueing.place_sync(plain, 8)
    sync_engine.dispose()
    await assert_enqueued("confirm", {"order": 8}, due_within=60)
    await job_client.enqueue(own.Archive, {"order": 7})
    done = await work_until_empty([completing.Confirm, completing.Ship, own.Archive])
    assert done.completed == {"confirm": 1, "ship": 1, "archive": 1}
    with psycopg.connect(jsworker_settings.database_dsn()) as connection:
        row = connection.execute("SELECT confirmed, shipped, archived FROM orders WHERE id = 7").fetchone()
    assert row == (1, True, True)


async def test_tracing(project: Project, job_client: JobClient, monkeypatch: pytest.MonkeyPatch) -> None:
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    receipts: Any = project("tracing.md")("receipts")
    await job_client.enqueue(receipts.WriteReceipt, {"order": 7})
    await work_until_empty([receipts.WriteReceipt])
    names = {span.name.partition(" ")[0] for span in exporter.get_finished_spans()}
    words = (DOCS / "tracing.md").read_text()
    assert names == {"render", *re.findall(r"(?m)^\| `(\w+) jobs\.write-receipt`", words)}
    assert len({span.context.trace_id for span in exporter.get_finished_spans() if span.context}) == 1
    provider.shutdown()


async def test_the_application_of_the_tutorial(project: Project, jsworker_settings: Settings) -> None:
    module = project("tutorial/1-outbox.md")
    app, receipts = module("app").app, module("receipts")
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as http,
    ):
        assert (await http.post("/orders", json={"item": "nothing", "cents": 0})).status_code == 422
        placed = (await http.post("/orders", json={"item": "tea", "cents": 250})).json()
        await assert_enqueued(receipts.WriteReceipt, count=1)
        await work_until_empty([receipts.WriteReceipt])
        shown = (await http.get(f"/orders/{placed['order']}")).json()
    assert shown == {"item": "tea", "receipt": "tea: 2.50"}


def test_the_tutorial_shows_every_check_of_doctor() -> None:
    _, _, printed = (
        (DOCS / "tutorial" / "3-watch.md").read_text().partition("$ jsworker dev -- jsworker doctor\n")
    )
    areas = re.findall(r"(?m)^(\w+)\n((?:  .*\n)+)", printed.partition("```")[0])
    levels = re.compile(r"(?m)^  (?:ok|info|warning) +(\w+) ")
    assert [f"{area.lower()}.{name}" for area, lines in areas for name in levels.findall(lines)] == [*CHECKS]


def test_the_overlay_of_the_tutorial_changes_what_there_is() -> None:
    words = (DOCS / "tutorial" / "4-deploy.md").read_text()
    [written] = re.findall(r'(?ms)^```yaml title="[^"]*"\n(.*?)^```', words)
    overlay = yaml.safe_load(written)
    base = ROOT / "deploy" / "kubernetes" / "base"
    [image] = overlay["images"]
    changed = {
        "StatefulSet": yaml.safe_load((base / "statefulset.yaml").read_text()),
        "Job": yaml.safe_load((base / "migration.yaml").read_text()),
    }
    for patch in overlay["patches"]:
        found = changed[patch["target"]["kind"]]
        assert found["metadata"]["name"] == patch["target"]["name"]
        [operation] = yaml.safe_load(patch["patch"])
        [container] = found["spec"]["template"]["spec"]["containers"]
        assert operation["path"] == "/spec/template/spec/containers/0/args"
        assert container["image"].partition(":")[0] == image["name"]
        assert len(operation["value"]) == len(container["args"])
