"""What is slow to load is loaded by those who use it alone."""

import json
import os
import subprocess
import sys

import pytest

# One interpreter loads one thing after the other, and tells after each what is loaded by then.
LOADS = """
import json, sys
before = set(sys.modules)
told = {}
def tell(what):
    told[what] = sorted(sys.modules.keys() - before)
import jsworker
tell("jsworker")
import jsworker.worker.isolation.isolated_child
tell("isolated child")
import jsworker.supervisor.child_worker
tell("worker")
from jsworker import Worker, JobClient, JobProcessor, enqueue_statement
import jsworker.contrib, jsworker.cli.run
tell("everything")
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    told = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=True).stdout
    return {what: set(names) for what, names in json.loads(told).items()}


def test_jsworker_loads_no_framework(loaded: dict[str, set[str]]) -> None:
    extras = {"django", "django_tasks", "fastapi", "flask", "sentry_sdk", "starlette"}
    assert {"jsworker.cli.run", "sqlalchemy", "nats"} <= loaded["everything"]
    assert extras & loaded["everything"] == set()


def test_jsworker_itself_loads_nothing(loaded: dict[str, set[str]]) -> None:
    packages = {name.partition(".")[0] for name in loaded["jsworker"]}
    assert packages - sys.stdlib_module_names == {"jsworker"}
    assert "asyncio" not in loaded["jsworker"]


def test_a_process_for_isolated_jobs_loads_no_nats(loaded: dict[str, set[str]]) -> None:
    assert {"nats", "aiohttp", "prometheus_client", "alembic"} & loaded["isolated child"] == set()


def test_a_worker_loads_no_sessions_of_sqlalchemy_before_a_job_begins_a_transaction(
    loaded: dict[str, set[str]],
) -> None:
    assert {"sqlalchemy.orm", "sqlalchemy.ext.asyncio"} & loaded["worker"] == set()


DJANGO = """
import logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import django
django.setup()
import jsworker.contrib.django.admin, jsworker.contrib.django.tasks
print("alembic" in sys.modules)
"""


def test_a_process_of_django_loads_no_alembic_which_would_write_to_its_log() -> None:
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "django_app.settings"}
    environment["PYTHONPATH"] = os.pathsep.join(["examples", *sys.path])
    command = [sys.executable, "-c", DJANGO]
    assert (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        == "False\n"
    )
