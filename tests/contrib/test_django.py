"""Django: jobs in its transactions, its settings, its commands, its tasks."""

import asyncio
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import nats
import pytest
from pydantic import SecretStr

from tests.support.djangos import closing, django_on  # first: it sets Django up

from asgiref.sync import sync_to_async  # isort: skip
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction
from django.test import Client, modify_settings, override_settings
from django.utils import timezone

try:
    from django.tasks import TaskContext, TaskResultStatus, default_task_backend, task
    from django.tasks.checks import check_tasks
    from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ImportError:  # before Django 6.0
    from django_tasks import TaskContext, TaskResultStatus, default_task_backend, task
    from django_tasks.checks import check_tasks
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.exceptions import TaskResultDoesNotExist
    from django_tasks.signals import task_enqueued, task_finished, task_started

from django_app.shop import jobs as shop_jobs
from django_app.shop.models import Order
from jsworker import JobClient, SyncJobClient
from jsworker.contrib.django import enqueue, fresh_connections, jobs_client
from jsworker.contrib.django.configuration import (
    check_configuration,
    environment,
    jsworker_settings,
    names_at_start,
    task_backends,
    url_of,
)
from jsworker.contrib.django.management.commands.jsworker_run import Command
from jsworker.contrib.django.models import StoredJob
from jsworker.contrib.django.tasks import DjangoTask
from jsworker.core.errors import Fail, InvalidPayload, JobFailed, TransitionRefused
from jsworker.core.job import Job
from jsworker.core.schedule_rules import Every
from jsworker.core.settings import Settings, load_settings
from jsworker.core.targets import load_processors
from tests.client.test_enqueue import Order as NumberedOrder
from tests.client.test_enqueue import ShipOrder
from tests.support.documents import Page
from tests.support.polling import eventually
from tests.support.servers import TEMPLATE, TestServers, copy_database, drop_database
from tests.test_contents import OLD, text_of_keys
from tests.worker.processors import KIND, echo, scripted
from tests.worker.rows import Rows
from tests.worker.running import StartWorker


@pytest.fixture(scope="module")
def migrated(servers: TestServers) -> str:
    """The name of a template that Django has migrated, too: that takes most of the time of a test."""
    name = f"django_{secrets.token_hex(4)}"
    with django_on(copy_database(servers.postgres, name, TEMPLATE)):
        return name


@pytest.fixture
def database_url(servers: TestServers, migrated: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    yield copy_database(servers.postgres, name, migrated)
    drop_database(servers.postgres, name)


@pytest.fixture(autouse=True)
def _django(database_url: str) -> Iterator[None]:
    # Tasks of this module are in an app.
    added = modify_settings(INSTALLED_APPS={"append": "tests.contrib"})
    with django_on(database_url, is_migrated=True), added:
        yield


@transaction.atomic
def rolled_back(call: Callable[..., Any], *arguments: Any) -> None:
    call(*arguments)
    raise RuntimeError


def django_settings_of(settings: Settings) -> dict[str, str]:
    """Return the ``JSWORKER`` with which Django publishes to the stream of a test."""
    return {name.upper(): getattr(settings, name) for name in ("nats_url", "stream", "subject_prefix")}


class TestEnqueue:
    """Within the transactions of Django."""

    def test_job_and_row_are_committed_together(self) -> None:
        with transaction.atomic():
            order = Order.objects.create(item="tea", cents=250)
            job = enqueue(ShipOrder, NumberedOrder(number=order.pk))
            assert job.created
        stored = StoredJob.objects.get()
        assert (stored.id, stored.kind, stored.payload["number"]) == (job.id, ShipOrder.kind, order.pk)

    def test_a_rollback_leaves_neither(self) -> None:
        def place() -> None:
            Order.objects.create(item="tea", cents=250)
            enqueue(KIND, {})

        with pytest.raises(RuntimeError):
            rolled_back(place)
        assert not StoredJob.objects.exists()
        assert not Order.objects.exists()

    def test_a_savepoint_that_is_rolled_back_takes_its_job_along(self) -> None:
        with transaction.atomic():
            kept = enqueue(KIND, {"n": 1})
            with pytest.raises(RuntimeError):
                rolled_back(enqueue, KIND, {"n": 2})
        assert [job.id for job in StoredJob.objects.all()] == [kept.id]

    def test_without_a_transaction_it_is_committed_at_once(self) -> None:
        job = enqueue(KIND, {})
        connections.close_all()
        assert StoredJob.objects.get().id == job.id

    @pytest.mark.parametrize(
        "terms",
        [
            {"unique_key": "order 7 % {}"},
            {"unique_key": "order-7", "unique": "waiting"},
            {"unique_key": "order-7", "unique_for": 3600},
            {"unique_key": "order-7", "debounce": timedelta(minutes=1), "debounce_max": 3600},
        ],
        ids=["live", "waiting", "window", "debounce"],
    )
    def test_of_a_key_there_is_one_by_every_rule(self, terms: dict[str, Any]) -> None:
        first, second = enqueue(KIND, {"n": 1}, **terms), enqueue(KIND, {"n": 2}, **terms)
        assert (first.created, second.created) == (True, False)
        assert first.id == second.id == StoredJob.objects.get().id

    def test_all_options_of_a_job_are_taken(self) -> None:
        enqueue(
            KIND,
            {"text": "100 % ☕ %s"},
            run_at=timezone.now() + timedelta(hours=1),
            expires_in=7200,
            priority="high",
            limit_key="acme",
            max_attempts=2,
        )
        job = StoredJob.objects.get()
        assert (job.status, job.priority, job.limit_key) == ("scheduled", 0, "acme")
        assert job.payload == {"text": "100 % ☕ %s"}

    def test_a_payload_that_does_not_fit_is_refused(self) -> None:
        with pytest.raises(InvalidPayload):
            enqueue(ShipOrder, {"number": "seven"})  # type: ignore[misc]
        with override_settings(JSWORKER={"MAX_PAYLOAD_BYTES": 10}), pytest.raises(InvalidPayload):
            enqueue(KIND, {"text": "longer than ten bytes"})

    def test_a_key_of_a_job_that_has_expired_is_refused_until_a_worker_has_cancelled_it(self) -> None:
        enqueue(KIND, {}, unique_key="a", expires_in=3600)
        with connection.cursor() as cursor:
            cursor.execute("UPDATE jsworker.jobs SET expires_at = now() - interval '1 s'")
        with pytest.raises(TransitionRefused, match="unique key 'a' of kind scripted is taken and freed"):
            enqueue(KIND, {}, unique_key="a", expires_in=3600)

    def test_without_autocommit_it_is_committed_with_what_the_application_commits(
        self, settings: Settings
    ) -> None:
        given = {name.upper(): getattr(settings, name) for name in ("nats_url", "stream", "subject_prefix")}
        with override_settings(JSWORKER=given):
            transaction.set_autocommit(False)
            try:
                enqueue(KIND, {"n": 1})
                transaction.rollback()
                job = enqueue(KIND, {"n": 2})
                transaction.commit()
            finally:
                transaction.set_autocommit(True)
        assert StoredJob.objects.get().id == job.id

    async def test_after_the_commit_it_is_published_once(
        self, settings: Settings, rows: Rows, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        published: list[int] = []
        publish = SyncJobClient.publish_pending
        monkeypatch.setattr(
            SyncJobClient, "publish_pending", lambda of, **given: published.append(publish(of, **given))
        )

        @transaction.atomic
        def place() -> list[Any]:
            before = published[:]
            found = [enqueue(KIND, {"n": n}).id for n in range(3)]
            assert published == before
            return found

        with override_settings(JSWORKER=django_settings_of(settings)):
            ids = await asyncio.to_thread(closing, place)
        assert published == [0]  # all three in the background

        async def marked() -> None:
            jobs = [await rows.job(each) for each in ids]
            assert [job["needs_publish"] for job in jobs] == [False] * 3
            assert len({job["stream_seq"] for job in jobs}) == 3

        await eventually(marked)
        await asyncio.to_thread(closing, place)  # nobody says where NATS is
        assert published == [0]

    async def test_a_request_leaves_to_workers_what_others_have_left(
        self, settings: Settings, rows: Rows
    ) -> None:
        await rows.query(
            "INSERT INTO jsworker.jobs"
            " (id, kind, payload, status, dispatch, needs_publish, publish_after, queued_at)"
            " SELECT uuidv7(), %s, '{}', 'queued', 1, true, due, due"
            " FROM generate_series(1, 20000), (SELECT now() - interval '1 minute') AS minute (due)",
            KIND,
        )
        place = transaction.atomic(lambda: enqueue(KIND, {}).id)
        with override_settings(JSWORKER=django_settings_of(settings)):
            own = await asyncio.to_thread(closing, place)

            async def marked() -> None:
                assert not (await rows.job(own))["needs_publish"]

            await eventually(marked)
        assert await rows.value("SELECT count(*) FROM jsworker.jobs WHERE needs_publish") == 20_000

    async def test_a_worker_runs_it(self, start: StartWorker, rows: Rows) -> None:
        await start(scripted(echo))
        job = await asyncio.to_thread(closing, enqueue, KIND, {"n": 7})
        assert (await rows.becomes(job.id, "completed"))["result"] == {"n": 7}


JOBS_OF_TESTS = """
import gc

from django.core.management import call_command
from django.db import connection
from django.test import TestCase, TransactionTestCase

from jsworker.contrib.django import enqueue, jobs_client
from jsworker.testing import run_job as awaited
from jsworker.testing.sync import run_job, work_until_empty
from shop.jobs import Greet
from shop.models import Order

gc.disable()  # it would close connections that nobody uses

class GreetInAsync(Greet):
    async def process(self, job):
        return (await Order.objects.aget(pk=job.payload.order)).item

class OneRun(TestCase):
    async def test_a_coroutine_sees_what_its_test_has_not_committed(self):
        order = await Order.objects.acreate(item="tea", cents=250)
        assert (await awaited(GreetInAsync, {"order": order.pk})).result == "tea"
        assert await Order.objects.aexists()

class Jobs(TransactionTestCase):
    def test_a_coroutine(self) -> None:
        order = Order.objects.create(item="tea", cents=250)
        assert run_job(GreetInAsync, {"order": order.pk}).result == "tea"

    def test_a_stream_that_is_given(self) -> None:
        settings = jobs_client().settings
        enqueue(Greet, {"order": Order.objects.create(item="tea", cents=250).pk})
        assert work_until_empty([Greet], settings=settings).completed == {"greet": 1}

    def test_another_one(self) -> None:
        assert enqueue("of-tests", {}, unique_key="one").created

    def test_one_begins_without_jobs_of_another(self) -> None:
        assert enqueue("of-tests", {}, unique_key="one").created

    def test_it(self) -> None:
        job = enqueue("of-tests", {})
        assert jobs_client().get(job.id).kind == "of-tests"
        assert jobs_client().settings.database_url.endswith("/" + connection.settings_dict["NAME"])
        call_command("jsworker", "enqueue", "of-tests")
"""


# No signal follows its end.
LAST_OF_TESTS = """
from django.conf import settings
from django.test import TransactionTestCase

from jsworker.testing.sync import work_until_empty
from shop.jobs import Greet

class Last(TransactionTestCase):
    available_apps = settings.INSTALLED_APPS

    def test_a_worker(self) -> None:
        assert not work_until_empty([Greet]).completed
"""


# Only DATABASES names the database, as in the documentation's example.
ONLY_DATABASES = """
import os
from django_app.settings import *
del os.environ["JSWORKER_DATABASE_URL"]
"""


async def _streams(settings: Settings) -> set[str | None]:
    connected = await nats.connect(settings.nats_url)
    try:
        return {info.config.name for info in await connected.jetstream().streams_info()}
    finally:
        await connected.close()


@pytest.mark.parametrize(
    ("module", "options", "count"),
    [("django_app.settings", ["test_last"], 9), ("only_databases", ["--parallel", "2"], 8)],
)
def test_djangos_tests_leave_the_database_and_the_streams_alone(
    settings: Settings, tmp_path: Path, module: str, options: list[str], count: int
) -> None:
    (tmp_path / "test_jobs.py").write_text(JOBS_OF_TESTS)
    (tmp_path / "test_last.py").write_text(LAST_OF_TESTS)
    page = dict(re.findall(r"(?s)```python\n# shop/(\w+)\.py\n(.*?)```", Page("docs/django.md").text))
    page["models"] = "from django_app.shop.models import Order"
    (tmp_path / "shop").mkdir()
    for name, text in page.items():
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    (tmp_path / "only_databases.py").write_text(ONLY_DATABASES)
    given = {
        "DJANGO_SETTINGS_MODULE": module,
        "JSWORKER_DATABASE_URL": settings.database_dsn(),
        "JSWORKER_NATS_URL": settings.nats_url,
        "JSWORKER_STREAM": settings.stream,
        "JSWORKER_SUBJECT_PREFIX": settings.subject_prefix,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), "examples", *sys.path]),
    }
    command = [sys.executable, "-m", "django_app.manage", "test", "--noinput"]
    command += ["test_jobs", "shop.tests", *options]
    before = asyncio.run(_streams(settings))
    ran = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert f"Ran {count} tests" in ran.stderr
    assert asyncio.run(_streams(settings)) == before
    assert "W001" not in ran.stderr
    assert not StoredJob.objects.exists()
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_database WHERE datname LIKE 'test_' || current_database()")
        assert cursor.fetchone() == (0,)
    with SyncJobClient(settings):  # refuses a stream that belongs to another database
        pass


# The runner replaces this database, but the variable names another one.
ANOTHER_DATABASE = """
from django_app.settings import *
DATABASES["default"]["NAME"] = "shop_beside_" + DATABASES["default"]["NAME"]
"""
TESTS_WITHOUT_JOBS = """
from django.test import TransactionTestCase

class Orders(TransactionTestCase):
    def test_nothing(self) -> None:
        pass
"""


@pytest.mark.parametrize(("behind", "left"), [("_x", 1), ("_2026_copy", 1), ("", 0), ("_2", 0)])
def test_a_flush_deletes_jobs_in_databases_of_tests_alone(
    servers: TestServers, migrated: str, monkeypatch: pytest.MonkeyPatch, behind: str, left: int
) -> None:
    at_start = f"shop{secrets.token_hex(4)}"
    name = f"test_{at_start}{behind}"
    monkeypatch.setitem(names_at_start, "default", at_start)
    with django_on(copy_database(servers.postgres, name, migrated), is_migrated=True):
        enqueue(KIND, {})
        call_command("flush", interactive=False, verbosity=0)
        assert StoredJob.objects.count() == left
    drop_database(servers.postgres, name)


def test_djangos_tests_delete_no_jobs_of_another_database(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "test_orders.py").write_text(TESTS_WITHOUT_JOBS)
    (tmp_path / "another_database.py").write_text(ANOTHER_DATABASE)
    with SyncJobClient(settings) as client:
        job = client.enqueue(KIND, {})
        given = {
            "DJANGO_SETTINGS_MODULE": "another_database",
            "JSWORKER_DATABASE_URL": settings.database_dsn(),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), "examples", *sys.path]),
        }
        command = [sys.executable, "-m", "django_app.manage", "test", "--noinput", "test_orders"]
        ran = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        assert client.get(job.id).status == "queued"


class TestConnections:
    """What ``fresh_connections`` leaves behind: nothing."""

    @pytest.mark.parametrize("plain", [True, False], ids=["plain function", "coroutine"])
    async def test_queries_of_a_job_leave_no_connection_open(
        self, start: StartWorker, client: JobClient, rows: Rows, *, plain: bool
    ) -> None:
        pids: list[int] = []

        def backend() -> str:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_backend_pid()")
                pids.extend(cursor.fetchone())
            return threading.current_thread().name

        def process_plain(job: Job[Any]) -> str:
            return backend()

        async def process(job: Job[Any]) -> str:
            first = await sync_to_async(backend)()
            assert first == await sync_to_async(backend)()
            return first

        await start(scripted(process_plain if plain else process, middleware=(fresh_connections,)))
        jobs = [await client.enqueue(KIND, {}) for _ in range(3)]
        for job in jobs:
            await rows.becomes(job.id, "completed")
        assert len(set(pids)) == 3
        left = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s)"
        for _ in range(600):
            if not await rows.value(left, pids):
                break
            await asyncio.sleep(0.1)
        assert await rows.value(left, pids) == 0

    async def test_a_job_that_fails_leaves_none_either(
        self, start: StartWorker, client: JobClient, rows: Rows
    ) -> None:
        seen: list[Any] = []

        def process(job: Job[Any]) -> None:
            Order.objects.count()
            seen.append(connections["default"])
            raise Fail("for good")

        await start(scripted(process, middleware=(fresh_connections,)))
        job = await client.enqueue(KIND, {})
        await rows.becomes(job.id, "failed")
        assert seen[0].connection is None


class TestSettings:
    """From ``JSWORKER``, the environment, and DATABASES."""

    def test_each_has_a_client_of_its_own(self) -> None:
        client = jobs_client()
        with override_settings(JSWORKER={"SUBJECT_PREFIX": "others"}):
            assert jobs_client() is not client
            assert jobs_client() is jobs_client()
        assert jobs_client() is client

    def test_a_secret_that_is_rotated_leaves_the_client(
        self, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "database-url"
        file.write_text(database_url)
        monkeypatch.delenv("JSWORKER_DATABASE_URL", raising=False)
        monkeypatch.setenv("JSWORKER_DATABASE_URL_FILE", str(file))
        client = jobs_client()
        file.write_text(database_url + "?connect_timeout=7")
        assert jobs_client() is client
        file.write_text("postgres")  # half of it is written
        assert enqueue(KIND, {}).created
        assert jobs_client() is client

    def test_the_database_is_that_of_django(self, database_url: str) -> None:
        assert jsworker_settings().database_dsn() == database_url

    def test_those_of_django_go_before_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JSWORKER_CONCURRENCY", "7")
        monkeypatch.setenv("JSWORKER_PROCESSES", "3")
        assert (jsworker_settings().concurrency, jsworker_settings().processes) == (4, 3)
        monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://other@db/jobs")
        assert jsworker_settings().database_dsn() == "postgresql://other@db/jobs"
        with override_settings(JSWORKER={"DATABASE_URL": "postgresql://third@db/jobs"}):
            assert jsworker_settings().database_dsn() == "postgresql://third@db/jobs"
            assert environment()["JSWORKER_DATABASE_URL"] == "postgresql://third@db/jobs"

    def test_none_is_not_set_for_workers_either(
        self, monkeypatch: pytest.MonkeyPatch, database_url: str
    ) -> None:
        inherited = {"POD_UID": "pod", "NATS_USER": "u", "DATABASE_URL": "postgresql://other@db/jobs"}
        for name, value in inherited.items():
            monkeypatch.setenv(f"JSWORKER_{name}", value)
        names = [*inherited, "CONTAINER", "ENCRYPTION_KEYS", "NATS_TLS_CA", "WORKER_ID", "RETENTION"]
        with override_settings(JSWORKER=dict.fromkeys(names)):
            here, variables = jsworker_settings(), environment()
        monkeypatch.setattr(os, "environ", variables)
        there = load_settings()
        assert here.database_dsn() == there.database_dsn() == database_url
        assert {getattr(there, name.lower()) for name in names if name != "DATABASE_URL"} == {None}

    @pytest.mark.parametrize("name", ["DATABASE_URL", "DATABASE_PASSWORD"])
    def test_what_a_file_holds_is_passed_on_without_the_file(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
    ) -> None:
        (tmp_path / "held").write_text({"DATABASE_URL": "postgresql://u@db/jobs"}.get(name, "secret"))
        monkeypatch.setenv(f"JSWORKER_{name}_FILE", str(tmp_path / "held"))
        monkeypatch.setitem(connections["default"].settings_dict, "PASSWORD", "")
        here = jsworker_settings()
        monkeypatch.setattr(os, "environ", environment())
        assert load_settings().database_dsn() == here.database_dsn()

    @pytest.mark.parametrize(
        ("given", "line"),
        [
            *(
                ({name: 4}, f"JSWORKER['{name}'] is no setting of jsworker: did you mean '{meant}'?")
                for name, meant in (
                    ("CONCURENCY", "CONCURRENCY"),
                    ("concurrency", "CONCURRENCY"),
                    ("JSWORKER_CONCURRENCY", "CONCURRENCY"),
                    ("HEARTBEAT_TIMEOUT", "WATCHDOG_TIMEOUT"),
                    ("TARGET", "TARGETS"),
                )
            ),
            ({"ZZZZZZ": 4}, "JSWORKER['ZZZZZZ'] is no setting of jsworker"),
            ({"CONCURRENCY": 0}, "JSWORKER_CONCURRENCY=0 must be from 1 to 10000"),
            ({"DATABASE": "jbos"}, "JSWORKER['DATABASE']='jbos' must be an entry of DATABASES: 'default'"),
            (
                {"DATABASE": ["default"]},
                "JSWORKER['DATABASE']=['default'] must be an entry of DATABASES: 'default'",
            ),
            ([], "JSWORKER must be a dictionary, not list"),
        ],
    )
    def test_what_is_wrong_is_told_by_djangos_check(self, given: Any, line: str) -> None:
        with override_settings(JSWORKER=given):
            with pytest.raises(ImproperlyConfigured) as refused:
                jsworker_settings()
            assert str(refused.value) == line
            [error] = check_configuration()
            assert (error.msg, error.id) == (line, "jsworker.E001")
        assert check_configuration() == []

    def test_an_entry_that_is_missing_is_told_also_beside_a_url(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JSWORKER_DATABASE_URL", "postgresql://other@db/jobs")
        with override_settings(JSWORKER={"DATABASE": "jbos"}):
            [error] = check_configuration()
            assert "'jbos' must be an entry" in error.msg
            with pytest.raises(ImproperlyConfigured, match="'jbos' must be an entry"):
                enqueue(KIND, {})

    @pytest.mark.parametrize("path", ["/jobs", "/jobs%20x?sslmode=require"])
    def test_a_url_of_another_database_is_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, database_url: str, path: str
    ) -> None:
        url = f"postgresql://u:secret@db:5433{path}"
        name = "jobs x" if "%" in path else "jobs"
        own = database_url.rpartition("/")[2]
        line = f"names the database '{name}', DATABASES['default'] '{own}': workers do not find"
        monkeypatch.setenv("JSWORKER_DATABASE_URL", url)
        [warning] = check_configuration()
        assert (warning.id, warning.is_serious()) == ("jsworker.W001", False)
        assert warning.msg.startswith(f"JSWORKER_DATABASE_URL {line}")
        with override_settings(JSWORKER={"DATABASE_URL": url}):
            [warning] = check_configuration()
        assert warning.msg.startswith(f"JSWORKER['DATABASE_URL'] {line}")
        assert "secret" not in str(warning)

    @pytest.mark.parametrize("place", ["worker@pooler:6432/{}?sslmode=require", "worker@db", "/{}?host=/x"])
    def test_a_url_may_lead_to_the_same_database_in_another_way(
        self, monkeypatch: pytest.MonkeyPatch, database_url: str, place: str
    ) -> None:
        own = database_url.rpartition("/")[2]
        monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://{place.format(own)}")
        assert check_configuration() == []

    def test_the_names_at_the_start_outlast_a_change_of_the_apps(self) -> None:
        before = dict(names_at_start)
        with modify_settings(INSTALLED_APPS={"append": "tests.client"}):
            assert names_at_start == before
        assert before["default"] != connections["default"].settings_dict["NAME"]

    @pytest.mark.parametrize(
        ("url", "database", "found"),
        [
            (
                "u:p@db:5433/jobs?sslmode=require",
                {"NAME": "test_jobs"},
                "u:p@db:5433/test_jobs?sslmode=require",
            ),
            ("u@/jobs?host=/x/y", {"NAME": "test_jobs_2"}, "u@/test_jobs_2?host=/x/y"),
            ("u@db/j%2Fx", {"NAME": "test_j/x"}, "u@db/test_j%2Fx"),
            ("u@db/jobs", {"NAME": "test_jobs_x"}, None),
            ("u@db/jobs", {"NAME": "mine_1", "TEST": {"NAME": "mine"}}, "u@db/mine_1"),
            ("u@db/jobs", {"NAME": "test_jobs", "TEST": {"NAME": None}}, "u@db/test_jobs"),
            ("u@db/jobs", {"NAME": "test_jobs", "TEST": {"NAME": "mine"}}, None),
            ("u@db/jobs", {"NAME": "test_jobsite"}, None),
            ("u@db/test_jobs", {"NAME": "test_jobs"}, None),
            ("u@db", {"NAME": "test_"}, None),
        ],
    )
    def test_while_djangos_tests_run_the_database_is_theirs(
        self, monkeypatch: pytest.MonkeyPatch, url: str, database: dict[str, Any], found: str | None
    ) -> None:
        monkeypatch.setenv("JSWORKER_DATABASE_URL", f"postgresql://{url}")
        monkeypatch.setenv("JSWORKER_NATS_URL", "nats://127.0.0.1:4222")
        monkeypatch.setattr(connections["default"], "settings_dict", database)
        settings = jsworker_settings()
        assert settings.database_dsn() == f"postgresql://{found or url}"
        assert settings.nats_is_set is (found is None)
        assert settings == jsworker_settings()
        assert (settings.stream == "JOBS") is (settings.subject_prefix == "jobs") is (found is None)
        monkeypatch.setitem(names_at_start, "default", database["NAME"])  # no test runner has replaced it
        assert jsworker_settings().database_dsn() == f"postgresql://{url}"

    @pytest.mark.parametrize(
        ("database", "url"),
        [
            ({"NAME": "shop"}, "postgresql:///shop"),
            (
                {"USER": "a@b", "PASSWORD": "p:/w", "HOST": "db", "PORT": 5433, "NAME": "shop 1"},
                "postgresql://a%40b:p%3A%2Fw@db:5433/shop%201",
            ),
            (
                {"USER": "u", "HOST": "/run/pg", "PORT": "5433", "NAME": "shop"},
                "postgresql://u@/shop?host=%2Frun%2Fpg&port=5433",
            ),
            (
                {"HOST": "::1", "NAME": "s", "OPTIONS": {"sslmode": "verify-full", "pool": True}},
                "postgresql://[::1]/s?sslmode=verify-full",
            ),
            (
                {"HOST": "a,b", "PORT": "1,2", "NAME": "s", "OPTIONS": {"target_session_attrs": "any"}},
                "postgresql:///s?target_session_attrs=any&host=a%2Cb&port=1%2C2",
            ),
            ({"HOST": "a,::1", "PORT": 1, "NAME": "s"}, "postgresql:///s?host=a%2C%3A%3A1&port=1%2C1"),
            ({"HOST": "a,b", "NAME": "s"}, "postgresql:///s?host=a%2Cb"),
            (
                {"OPTIONS": {"service": "main", "passfile": Path("/x/y"), "application_name": "shop"}},
                "postgresql:///?service=main&passfile=%2Fx%2Fy",
            ),
        ],
    )
    def test_urls_of_databases(self, database: dict[str, Any], url: str) -> None:
        assert url_of({"ENGINE": "django.db.backends.postgresql", **database}) == url
        assert Settings(database_url=url).database_dsn() == url

    @pytest.mark.parametrize("option", ["dbname", "host"])
    def test_an_option_that_names_another_database_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {option: "x"})
        line = (
            f"workers do not read '{option}' in OPTIONS of DATABASES['default']:"
            " set JSWORKER['DATABASE_URL'] to the same database"
        )
        assert [error.msg for error in check_configuration()] == [line]
        with override_settings(JSWORKER={"DATABASE_URL": "postgresql://db/jobs"}):
            assert jsworker_settings().database_dsn() == "postgresql://db/jobs"

    @pytest.mark.parametrize("how", ["service", "hosts"])
    def test_clients_connect_to_the_server_that_django_connects_to(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
    ) -> None:
        entry = connections["default"].settings_dict
        job = enqueue(KIND, {})
        if how == "service":
            place = {"host": "HOST", "port": "PORT", "user": "USER", "password": "PASSWORD", "dbname": "NAME"}
            lines = [f"{name}={entry[part]}" for name, part in place.items() if entry[part]]
            (tmp_path / "services").write_text("\n".join(["[main]", *lines, ""]))
            monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
            for part in place.values():
                monkeypatch.setitem(entry, part, "")
            monkeypatch.setitem(entry, "OPTIONS", {"service": "main"})
        else:
            monkeypatch.setitem(entry, "PORT", f"1,{entry['PORT']}")
            monkeypatch.setitem(entry, "HOST", f"{entry['HOST']},{entry['HOST']}")
        assert jobs_client().get(job.id).kind == KIND

    def test_jobs_need_postgresql(self) -> None:
        with pytest.raises(
            ImproperlyConfigured, match=r"DATABASES\['default'\] is of django.db.backends.sqlite3"
        ):
            url_of({"ENGINE": "django.db.backends.sqlite3", "NAME": "db"})


@task
def add(a: int, b: int = 0) -> int:
    return a + b


@task(queue_name="mail", takes_context=True)
def told(context: TaskContext, text: str) -> dict[str, Any]:
    return {"text": text, "attempt": context.attempt, "id": context.task_result.id}


@task
async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


@task
def wrong() -> None:
    raise ValueError("wrong")


@task
def gives_up() -> None:
    raise Fail("for good")


@task
def returns_a_class() -> Any:
    return StoredJob


@task
def returns_a_circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@task
def raises(how: str) -> None:
    class Local(Exception):
        pass

    match how:
        case "message":
            raise ValueError("the server said:\nsecret.Path: 5\nhint")
        case "note":
            error = KeyError("x")
            error.add_note("hint")
            raise error from ValueError("a\nb")
        case "local":
            raise Local
        case "group":
            raise ExceptionGroup("all", [ValueError("wrong")])


async def in_thread(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return await asyncio.to_thread(closing, call, *arguments, **named)


class TestTasks:
    """The interface of django.tasks."""

    def test_the_checks_of_the_interface_pass(self) -> None:
        assert list(check_tasks()) == []
        assert task_backends() == ["default"]
        with override_settings(INSTALLED_APPS=[]):
            [error] = default_task_backend.check()
        assert error.id == "jsworker.E002"

    async def test_a_task_is_run_and_its_result_is_read(self, start: StartWorker, rows: Rows) -> None:
        result = await in_thread(add.enqueue, 2, b=3)
        assert (result.status, result.args, result.kwargs) == (TaskResultStatus.READY, [2], {"b": 3})
        assert not result.is_finished
        await start(DjangoTask)
        await rows.becomes(UUID(result.id), "completed")
        await result.arefresh()
        assert (result.status, result.return_value, result.attempts) == (TaskResultStatus.SUCCESSFUL, 5, 1)
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert result.errors == []
        assert (await add.aget_result(result.id)).return_value == 5

    async def test_encrypted_tasks_run_and_are_read_and_so_are_those_of_a_schedule(
        self, settings: Settings, start: StartWorker, rows: Rows
    ) -> None:
        jobs_client()  # with the settings as they are
        keys = text_of_keys(old=OLD)
        encrypted = settings.model_copy(update={"encryption_keys": SecretStr(keys)})
        with override_settings(JSWORKER={"ENCRYPTION_KEYS": keys}):
            result = await in_thread(add.enqueue, 2, b=3)
            async with JobClient(encrypted) as client:
                call = (await client.get(result.id)).payload
                await client.schedules.add("daily", DjangoTask, Every(days=1, payload=call))
                scheduled = (await client.schedules.run_now("daily")).id
            await start(DjangoTask, with_settings=encrypted)
            for each in (UUID(result.id), scheduled):
                assert "$codec" in (await rows.becomes(each, "completed"))["result"]
                read = await add.aget_result(str(each))
                assert (read.args, read.return_value) == ([2], 5)

    async def test_a_coroutine_and_one_that_takes_its_context(self, start: StartWorker, rows: Rows) -> None:
        await start(DjangoTask)
        later, context = await add_later.aenqueue(2, 3), await told.aenqueue("hello")
        assert (await rows.becomes(UUID(later.id), "completed"))["result"] == 5
        row = await rows.becomes(UUID(context.id), "completed")
        assert row["result"] == {"text": "hello", "attempt": 1, "id": context.id}

    async def test_one_that_fails_tells_its_errors(self, start: StartWorker, rows: Rows) -> None:
        await start(DjangoTask)
        failed = [await each.aenqueue() for each in (wrong, gives_up)]
        await rows.query("UPDATE jsworker.jobs SET max_attempts = 1")
        for each in failed:
            await rows.becomes(UUID(each.id), "failed")
            await each.arefresh()
            assert (each.status, each.attempts) == (TaskResultStatus.FAILED, 1)
            with pytest.raises(ValueError, match="Task failed"):
                each.return_value  # noqa: B018 -- it raises
        [error], [given_up] = failed[0].errors, failed[1].errors
        assert error.exception_class is ValueError
        assert 'raise ValueError("wrong")' in error.traceback
        assert given_up.exception_class_path == "jsworker.JobFailed"
        assert given_up.traceback == "for good"

    @pytest.mark.parametrize(
        ("returns", "why"),
        [(returns_a_class, "Unsupported type"), (returns_a_circle, "maximum recursion depth")],
    )
    async def test_one_whose_result_is_no_json_is_not_run_again(
        self, start: StartWorker, rows: Rows, returns: Any, why: str
    ) -> None:
        await start(DjangoTask)
        result = await returns.aenqueue()

        async def has_run() -> Any:
            await result.arefresh()
            assert result.errors
            return result

        await eventually(has_run)
        row = await rows.job(UUID(result.id))
        assert (row["status"], row["attempts"], row["failure_reason"]) == ("failed", 1, "permanent")
        [error] = result.errors
        assert error.traceback.startswith(f"the result of the task cannot be stored: {why}")

    async def test_the_class_of_an_error_is_not_taken_from_its_message(
        self, start: StartWorker, rows: Rows
    ) -> None:
        await start(DjangoTask)
        expected = {
            "message": ("builtins.ValueError", ValueError),
            "note": ("builtins.KeyError", KeyError),
            "local": (f"{__name__}.raises.<locals>.Local", JobFailed),
            "group": ("builtins.ExceptionGroup", ExceptionGroup),
        }
        failed = {how: await raises.aenqueue(how) for how in expected}
        await rows.query("UPDATE jsworker.jobs SET max_attempts = 1")
        for how, result in failed.items():
            await rows.becomes(UUID(result.id), "failed")
            await result.arefresh()
            [error] = result.errors
            assert (error.exception_class_path, error.exception_class) == expected[how]

    def test_it_is_part_of_the_transaction(self) -> None:
        with pytest.raises(RuntimeError):
            rolled_back(add.enqueue, 1)
        assert not StoredJob.objects.exists()

    def test_priority_queue_and_time_are_those_of_its_job(self) -> None:
        later = timezone.now() + timedelta(hours=1)
        ids = [
            told.using(priority=number, run_after=when).enqueue("x").id
            for number, when in ((100, None), (0, None), (-1, later))
        ]
        jobs = [StoredJob.objects.get(id=each) for each in ids]
        assert [job.priority for job in jobs] == [0, 1, 2]
        assert [job.status for job in jobs] == ["queued", "queued", "scheduled"]
        assert {job.limit_key for job in jobs} == {"mail"}
        found = told.get_result(ids[2])
        assert (found.task.priority, found.task.queue_name, found.task.run_after) == (-1, "mail", later)
        assert found.status is TaskResultStatus.READY

    def test_what_the_interface_refuses(self) -> None:
        with pytest.raises(InvalidTask, match="Queue 'nowhere' is not valid"):
            add.using(queue_name="nowhere")
        with pytest.raises(TypeError):
            add.enqueue(object())
        no_app = modify_settings(INSTALLED_APPS={"remove": "tests.contrib"})
        with no_app, pytest.raises(InvalidTask, match="must be in an app of INSTALLED_APPS"):
            add.enqueue(1)
        for unknown in (str(uuid4()), "no id", None):
            with pytest.raises(TaskResultDoesNotExist):
                add.get_result(unknown)
        other = enqueue(KIND, {})
        with pytest.raises(TaskResultDoesNotExist):
            add.get_result(str(other.id))

    async def test_a_row_that_names_something_else_calls_nothing(
        self, start: StartWorker, client: JobClient, rows: Rows
    ) -> None:
        call = {
            "positional": ["true"],
            "named": {},
            "backend": "default",
            "queue_name": "default",
            "priority": 0,
        }
        jobs = [
            await client.enqueue("django-task", call | {"task": name})
            for name in ("os.system", "django_app.shop.nowhere", "django_app.shop.models.Order")
        ]
        await start(DjangoTask)
        errors = [(await rows.becomes(job.id, "failed"))["last_error"] for job in jobs]
        assert errors[0] == "task os.system is in no app of INSTALLED_APPS"
        assert errors[1].startswith("task django_app.shop.nowhere cannot be imported: ")
        assert errors[2] == "django_app.shop.models.Order is no task of Django, but of type ModelBase"

    async def test_signals_tell_of_its_life(
        self, start: StartWorker, rows: Rows, caplog: pytest.LogCaptureFixture
    ) -> None:
        told_of: list[tuple[str, str]] = []

        def note(signal: Any, task_result: Any, **_: Any) -> None:
            names = {task_enqueued: "enqueued", task_started: "started", task_finished: "finished"}
            told_of.append((names[signal], str(task_result.status)))

        for signal in (task_enqueued, task_started, task_finished):
            signal.connect(note)
        try:
            await start(DjangoTask)
            for each in (add, gives_up):
                result = await each.aenqueue(*([1] if each is add else []))
                await rows.becomes(UUID(result.id), "completed" if each is add else "failed")
                for _ in range(600):
                    if told_of[-1][0] == "finished":
                        break
                    await asyncio.sleep(0.1)
        finally:
            for signal in (task_enqueued, task_started, task_finished):
                signal.disconnect(note)
        assert told_of == [
            ("enqueued", "READY"),
            ("started", "RUNNING"),
            ("finished", "SUCCESSFUL"),
            ("enqueued", "READY"),
            ("started", "RUNNING"),
            ("finished", "FAILED"),
        ]
        [logged] = [each for each in caplog.records if "state=FAILED" in each.getMessage()]
        assert logged.exc_info is not None
        assert logged.exc_info[0] is Fail


ROOT = Path(__file__).parents[2]


@pytest.fixture
def manage(settings: Settings) -> Callable[..., subprocess.Popen[str]]:
    """Starts commands of manage.py."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "examples"), os.environ.get("PYTHONPATH")])),
        "JSWORKER_DATABASE_URL": settings.database_dsn(),
        "JSWORKER_NATS_URL": settings.nats_url,
        "JSWORKER_STREAM": settings.stream,
        "JSWORKER_SUBJECT_PREFIX": settings.subject_prefix,
    }

    def start(
        *arguments: str,
        program: Sequence[str] = ("-m", "django_app.manage"),
        settings_module: str = "django_app.settings",
        folder: Path | None = None,
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            env=variables | {"DJANGO_SETTINGS_MODULE": settings_module},
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


class TestCommands:
    """``manage.py``."""

    async def test_run_works_on_the_jobs_of_the_apps_and_on_tasks(
        self, manage: Callable[..., subprocess.Popen[str]], rows: Rows
    ) -> None:
        order = await in_thread(Order.objects.create, item="tea", cents=250)
        job = await in_thread(enqueue, "write-receipt", {"order": order.pk})
        alone = await in_thread(enqueue, "write-receipt", {"order": order.pk}, max_stalls=1)
        thanks = await in_thread(default_task_backend.enqueue, _thank(), [order.pk], {})
        with manage("jsworker_run", "--log-format", "json") as workers:
            try:
                for each in (job.id, alone.id, thanks.id):
                    await rows.becomes(each, "completed", seconds=120)
            finally:
                workers.terminate()
                out, err = workers.communicate(timeout=60)
        assert workers.returncode == 0, (out, err)
        assert (await rows.job(job.id))["result"] == {"receipt": "tea: 2.50"}

    async def test_run_finds_the_modules_that_manage_py_finds_from_any_folder(
        self, manage: Callable[..., subprocess.Popen[str]], tmp_path: Path, rows: Rows
    ) -> None:
        for folder in ("project", "more/elsewhere", "work"):
            (tmp_path / folder).mkdir(parents=True)
        (tmp_path / "project" / "manage.py").write_text((ROOT / "examples/django_app/manage.py").read_text())
        (tmp_path / "project" / "site_settings.py").write_text(
            "from django_app.settings import *\n\nINSTALLED_APPS = [*INSTALLED_APPS, 'elsewhere']\n"
        )
        (tmp_path / "more" / "elsewhere" / "__init__.py").touch()
        order = await in_thread(Order.objects.create, item="tea", cents=250)
        job = await in_thread(enqueue, "write-receipt", {"order": order.pk})
        with manage(
            *("jsworker_run", "--pythonpath", "../more"),
            program=[str(tmp_path / "project" / "manage.py")],
            settings_module="site_settings",
            folder=tmp_path / "work",
        ) as workers:
            try:
                await rows.becomes(job.id, "completed", seconds=120)
            finally:
                workers.terminate()
                out, err = workers.communicate(timeout=60)
        assert workers.returncode == 0, (out, err)

    def test_processors_of_an_app_are_those_that_run_finds_in_its_module(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Private(shop_jobs.WriteReceipt):
            kind = "private"

        Private.__module__ = shop_jobs.__name__
        monkeypatch.setattr(shop_jobs, "Alias", shop_jobs.WriteReceipt, raising=False)
        monkeypatch.setattr(shop_jobs, "_Private", Private, raising=False)
        commands: list[list[str]] = []
        monkeypatch.setattr("os.execve", lambda _program, command, _variables: commands.append(command))
        call_command("jsworker_run")
        targets = commands[0][4:]
        assert [each.kind for target in targets for each in load_processors(target)] == [
            "write-receipt",
            "django-task",
        ]

    @pytest.mark.parametrize(
        ("given", "passed_on"),
        [
            (("app:A", "--processes", "2"), ["app:A", "--processes", "2"]),
            (("--verbosity=0", "-v", "0", "app:A", "--reload"), ["app:A", "--reload"]),
            (("app:A", "app:B", "--", "--processes", "2"), ["app:A", "app:B", "--processes", "2"]),
            (("app:A",), ["app:A"]),
        ],
    )
    def test_options_of_run_are_taken_as_they_are(
        self, given: tuple[str, ...], passed_on: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []
        monkeypatch.setattr("os.execve", lambda _program, command, _variables: commands.append(command))
        Command().run_from_argv(["manage.py", "jsworker_run", *given])
        assert commands[0][4:] == passed_on

    @pytest.mark.parametrize("named", ["app:A", ["app:A"]], ids=["text", "list"])
    def test_targets_of_the_settings_are_a_list_or_one_text(
        self, named: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commands: list[list[str]] = []
        monkeypatch.setattr("os.execve", lambda _program, command, _variables: commands.append(command))
        with override_settings(JSWORKER={"TARGETS": named}):
            call_command("jsworker_run")
        assert commands[0][4:] == ["app:A"]

    def test_a_module_that_cannot_be_imported_is_named_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "half_done").mkdir()
        (tmp_path / "half_done" / "__init__.py").touch()
        (tmp_path / "half_done" / "jobs.py").write_text("import not_installed\n")
        monkeypatch.syspath_prepend(tmp_path)
        line = "^target half_done.jobs: .* cannot be imported: ModuleNotFoundError: .*line 1.$"
        with modify_settings(INSTALLED_APPS={"append": "half_done"}), pytest.raises(CommandError, match=line):
            call_command("jsworker_run")

    def test_every_command_of_jsworker_has_djangos_settings(
        self, manage: Callable[..., subprocess.Popen[str]]
    ) -> None:
        job = enqueue(KIND, {})
        with manage("jsworker", "jobs", "--json") as listing:
            out, err = listing.communicate(timeout=60)
        assert listing.returncode == 0, err
        assert str(job.id) in out
        with manage("jsworker", "job", str(uuid4())) as refused:
            assert refused.wait(timeout=60) == 1

    def test_where_tables_are_missing_djangos_command_is_named(
        self, manage: Callable[..., subprocess.Popen[str]], tmp_path: Path
    ) -> None:
        (tmp_path / "jobs_apart.py").write_text(
            "from django_app.settings import *\n\n"
            "DATABASES['jobs'] = DATABASES['default']\nJSWORKER = {'DATABASE': 'jobs'}\n"
        )
        with connection.cursor() as cursor:
            cursor.execute("DROP SCHEMA jsworker CASCADE")
        with manage("jsworker_run", settings_module="jobs_apart", folder=tmp_path) as refused:
            _, err = refused.communicate(timeout=60)
        assert refused.returncode == 1
        assert "no jsworker schema: run `manage.py migrate --database jobs`" in err

    def test_a_file_that_the_environment_names_does_not_contradict_them(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, database_url: str, capfd: Any
    ) -> None:
        (tmp_path / "url").write_text(database_url)
        monkeypatch.setattr(
            os, "environ", {**os.environ, "JSWORKER_DATABASE_URL_FILE": str(tmp_path / "url")}
        )
        job = enqueue(KIND, {})
        call_command("jsworker", "jobs", "--json")
        assert str(job.id) in capfd.readouterr().out


def _thank() -> Any:
    from django_app.shop.tasks import thank  # noqa: PLC0415 -- a task belongs to a backend

    return thank


@pytest.mark.parametrize(
    ("payload", "begins"),
    [("1e5000", "1000000"), ("[" * 3_000 + "]" * 3_000, "[[[[[[[")],
    ids=["long", "deep"],
)
def test_the_admin_shows_jobs_whose_payload_python_does_not_read(payload: str, begins: str) -> None:
    job, other = enqueue(KIND, {}), enqueue(KIND, {})
    with connection.cursor() as cursor:
        cursor.execute("UPDATE jsworker.jobs SET payload = %s::jsonb WHERE id = %s", [payload, job.id])
    client = Client()
    client.force_login(User.objects.create_superuser("admin"))
    listing = client.get("/admin/jsworker/storedjob/").content.decode()
    assert str(job.id) in listing
    assert str(other.id) in listing
    assert begins in client.get(f"/admin/jsworker/storedjob/{job.id}/change/").content.decode()
    # Python 3.13 reads ten times as many levels as 3.11: there the deep one is a list.
    assert begins in str(StoredJob.objects.get(id=job.id).payload)


def test_jobs_are_not_written_through_models() -> None:
    job = StoredJob(id=uuid4(), kind=KIND)
    for refused in (job.save, job.delete):
        with pytest.raises(NotImplementedError, match="changed by a client of jsworker"):
            refused()
