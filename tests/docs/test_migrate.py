"""docs/migrate: what stands there as "before" runs on the other libraries, what follows on jsworker."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import create_engine, text

from jsworker import JobClient, JobProcessor, Settings, SyncJobClient
from jsworker.testing import sync, work_until_empty
from tests.docs.conftest import Project
from tests.docs.pages import DOCS, files_of

T = TypeVar("T")

PAGES = sorted(f"migrate/{page.name}" for page in (DOCS / "migrate").glob("*.md"))

# What each "before" does, and what its bridge hands on. Celery, Dramatiq and RQ are installed for the test.
CELERY = """
import tasks
tasks.app.conf.task_always_eager = True
assert tasks.send_receipt.delay(7).get() == "receipt of order 7"
assert tasks.send_receipt.max_retries == 4 and tasks.send_receipt.acks_late
assert set(tasks.app.conf.beat_schedule) == {"nightly"} and "tasks.report" in tasks.app.tasks
import bridge
bridge.app.conf.task_always_eager = True
assert bridge.send_receipt.acks_late and bridge.send_receipt.reject_on_worker_lost
assert bridge.send_receipt.max_retries is None
for _ in range(2):
    bridge.send_receipt.apply((7,), task_id="the same")
bridge.jobs.close()
"""
DRAMATIQ = """
import dramatiq
def worked(broker):
    worker = dramatiq.Worker(broker, worker_timeout=100)
    worker.start()
    broker.join("default", timeout=30000)
    worker.join()
    worker.stop()
import actors
actors.send_receipt.send(7)
worked(actors.broker)
assert actors.receipts == ["receipt of order 7"]
import bridge
assert any(isinstance(each, dramatiq.middleware.Retries) for each in bridge.broker.middleware)
assert bridge.send_receipt.options["max_retries"] is None
message = bridge.send_receipt.message(7)
for _ in range(2):
    bridge.broker.enqueue(message)
worked(bridge.broker)
bridge.jobs.close()
"""
RQ = """
import fakeredis, rq, tasks
redis = fakeredis.FakeStrictRedis()
assert tasks.order(redis, 7, at_once=True) == "receipt-7"
job = rq.job.Job.fetch("receipt-7", connection=redis)
assert job.return_value() == "receipt of order 7" and job.retry_intervals == [1, 2, 4, 8]
assert rq.job.Job.fetch(tasks.order_later(redis, 8), connection=redis).get_status() == "scheduled"
import bridge
for _ in range(2):
    rq.Queue(connection=redis, is_async=False).enqueue(bridge.send_receipt, 7, job_id="the-same")
bridge.jobs.close()
import waiting
queue = rq.Queue("drained", connection=redis)
first = queue.enqueue(tasks.send_receipt, 9)
queue.enqueue(tasks.send_receipt, 10, depends_on=first)
counts = waiting.waiting(redis)
assert counts == {"drained queued": 1, "drained deferred": 1, "default scheduled": 1}, counts
"""
PROCRASTINATE = """
import asyncio, procrastinate, tasks
async def main():
    async with tasks.app.open_async():
        await tasks.order(7)
        try:
            await tasks.order(7)
        except procrastinate.exceptions.AlreadyEnqueued:
            await tasks.app.run_worker_async(wait=False, listen_notify=False, install_signal_handlers=False)
        assert "receipt of order 7" in tasks.receipts
asyncio.run(main())
"""
STREAMS = """
import asyncio, subscriber, tasks
from faststream.nats import TestNatsBroker
async def main():
    assert await tasks.order(7) == "receipt of order 7"
    async with TestNatsBroker(subscriber.broker) as broker:
        await broker.publish({"order_id": 7}, "receipts", stream="shop")
    assert subscriber.receipts == ["receipt of order 7"]
    import bridge
    async with TestNatsBroker(bridge.broker) as broker:
        for _ in range(2):
            await broker.publish({"order_id": 7}, "receipts", stream="shop")
asyncio.run(main())
"""
INSTALLED = {"migrate/procrastinate.md": PROCRASTINATE, "migrate/faststream-taskiq.md": STREAMS}
OTHERS = {"migrate/celery.md": CELERY, "migrate/dramatiq.md": DRAMATIQ, "migrate/rq.md": RQ}


def run(code: str, folder: Path, *paths: Path) -> None:
    """Run code beside the files of a page, with the test's servers."""
    path = os.pathsep.join(map(str, [folder, *paths]))  # not what tests/conftest.py hides: taskiq wants it
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def receipts() -> list[Any]:
    """Return the payloads of the receipts that were enqueued."""
    with SyncJobClient.from_env() as client:
        return [client.get(job.id).payload for job in client.list(kind="send-receipt")]


def while_working(processors: Sequence[type[JobProcessor[Any]]], call: Callable[[], T]) -> T:
    """Return what a call returns that waits for jobs."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        while not future.done():
            sync.work_until_empty(processors)
            time.sleep(0.05)
        return future.result()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the libraries that no other test needs."""
    folder = tmp_path_factory.mktemp("others")
    requirements = Path(__file__).with_name("others.txt")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--requirement"]
    subprocess.run([*install, str(requirements)], check=True, timeout=280)
    return folder


@pytest.mark.parametrize("page", INSTALLED)
def test_before_and_its_bridge(
    page: str, project: Project, tmp_path: Path, jsworker_settings: Settings
) -> None:
    project(page)
    run(INSTALLED[page], tmp_path)
    assert receipts() == ([{"order_id": 7}] if "bridge.py" in files_of(page) else [])


@pytest.mark.thorough
@pytest.mark.parametrize("page", OTHERS)
def test_before_and_its_bridge_of_libraries_that_are_installed_for_it(
    page: str, project: Project, tmp_path: Path, jsworker_settings: Settings, others: Path
) -> None:
    project(page)
    run(OTHERS[page], tmp_path, others)
    [payload] = receipts()
    assert payload["order_id"] == 7


def test_every_guide_is_tested() -> None:
    assert sorted([*INSTALLED, *OTHERS]) == PAGES


def test_after_celery(project: Project, jsworker_settings: Settings) -> None:
    module = project("migrate/celery.md")
    jobs, clients, totals = module("jobs"), module("clients"), module("totals")
    job = clients.jobs.enqueue(jobs.SendReceipt, jobs.Receipt(order_id=7))
    assert while_working([jobs.SendReceipt, jobs.Report], lambda: job.result(60)) == "receipt of order 7"
    lost = clients.jobs.enqueue(jobs.SendReceipt, jobs.Receipt(order_id=-1))
    sync.work_until_empty([jobs.SendReceipt], raise_failures=False)
    assert clients.jobs.get(lost.id).failure_reason == "permanent"
    assert [schedule["name"] for schedule in clients.jobs.schedules.list()] == ["report"]
    counting = [totals.Count, totals.Total]
    assert while_working(counting, lambda: totals.total(clients.jobs, ["to be", "or not to be"])) == 6


def test_after_dramatiq(project: Project, jsworker_settings: Settings) -> None:
    module = project("migrate/dramatiq.md")
    jobs, functions, callers, pages = map(module, ("jobs", "functions", "callers", "pages"))
    at_once, later = callers.order(7), callers.order_later(8)
    callers.jobs.enqueue(functions.send_reminder, functions.Reminder(order_id=9))
    sync.work_until_empty([jobs.SendReceipt, functions.send_reminder])
    assert callers.jobs.get(at_once).result == "receipt of order 7"
    assert callers.jobs.get(later).status == "scheduled"
    counting = [pages.Fetch, pages.Count]
    assert while_working(counting, lambda: pages.count(callers.jobs, "a")) == 4


def test_after_rq(project: Project, jsworker_settings: Settings) -> None:
    module = project("migrate/rq.md")
    jobs, reports = module("jobs"), module("reports")
    ids = jobs.order(7), jobs.order(7), jobs.order_later(8)
    assert ids[0] == ids[1] != ids[2]
    sync.work_until_empty([jobs.SendReceipt])
    assert [jobs.jobs.get(each).status for each in ids] == ["completed", "completed", "scheduled"]
    counting = [reports.Count, reports.Report]
    assert while_working(counting, lambda: reports.report(jobs.jobs, ["ab", "c"])) == 3


async def test_after_procrastinate(project: Project, job_client: JobClient) -> None:
    jobs = project("migrate/procrastinate.md")("jobs")
    assert [await jobs.order(job_client, 7), await jobs.order(job_client, 7)] == [True, False]
    done = await work_until_empty([jobs.SendReceipt, jobs.Report])
    assert done.completed == {"send-receipt": 1}


def test_what_waits_in_procrastinate_is_moved(project: Project, jsworker_settings: Settings) -> None:
    import procrastinate  # noqa: PLC0415 -- takes a while
    from procrastinate.schema import SchemaManager  # noqa: PLC0415

    move = project("migrate/procrastinate.md")("move").move
    dsn = jsworker_settings.database_dsn()
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    with engine.begin() as connection:
        connection.exec_driver_sql(SchemaManager.get_schema().replace("%", "%%"))
    app = procrastinate.App(connector=procrastinate.SyncPsycopgConnector(conninfo=dsn))
    with app.open():
        for number in range(3):
            app.configure_task("send_receipt").defer(order_id=number)
        app.configure_task("send_receipt", schedule_in={"hours": 1}).defer(order_id=3)
        app.configure_task("other").defer()
    assert [move(engine, "send_receipt", "send-receipt") for _ in range(2)] == [4, 0]
    with engine.connect() as connection:
        left = connection.execute(text("SELECT task_name FROM procrastinate_jobs")).scalars().all()
    engine.dispose()
    assert left == ["other"]
    assert sorted(payload["order_id"] for payload in receipts()) == [0, 1, 2, 3]
    with SyncJobClient.from_env() as client:
        assert [job.status for job in client.list(kind="send-receipt")].count("scheduled") == 1


async def test_after_faststream_and_taskiq(project: Project, job_client: JobClient) -> None:
    module = project("migrate/faststream-taskiq.md")
    jobs, mail = module("jobs"), module("mail")
    receipt = await job_client.enqueue(jobs.send_receipt, jobs.Receipt(order_id=7))
    await job_client.enqueue("send-mail", {"to": "a@example.org"})
    await work_until_empty([jobs.send_receipt, mail.send_mail])
    assert await receipt.result(timeout=30) == "receipt of order 7"
    assert mail.send_mail.mailer.sent == ["a@example.org"]
