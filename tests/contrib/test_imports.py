"""What is slow to load is loaded by those who use it alone."""

import subprocess
import sys

EXTRAS = ("django", "django_tasks", "fastapi", "flask", "sentry_sdk", "starlette")


def printed(code: str) -> str:
    """Return what a new interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_jsworker_loads_no_framework() -> None:
    names = "Worker, JobClient, JobProcessor, enqueue_statement"
    code = (
        f"import sys; from jsworker import {names}; import jsworker.contrib, jsworker.cli.run; "
        f"print(sorted({set(EXTRAS)!r} & sys.modules.keys()))"
    )
    assert printed(code) == "[]\n"


def test_jsworker_itself_loads_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); import jsworker; "
        "print(*{name.partition('.')[0] for name in sys.modules.keys() - before} - sys.stdlib_module_names, "
        "'asyncio' in sys.modules)"
    )
    assert printed(code) == "jsworker False\n"


def test_a_process_for_isolated_jobs_loads_no_nats() -> None:
    code = (
        "import sys; import jsworker.worker.isolation.isolated_child; "
        "print([name for name in ('nats', 'aiohttp', 'prometheus_client', 'alembic') if name in sys.modules])"
    )
    assert printed(code) == "[]\n"


def test_a_worker_loads_no_sessions_of_sqlalchemy_before_a_job_begins_a_transaction() -> None:
    code = (
        "import sys; import jsworker.worker.isolation.isolated_child, jsworker.supervisor.child_worker; "
        "print([name for name in ('sqlalchemy.orm', 'sqlalchemy.ext.asyncio') if name in sys.modules])"
    )
    assert printed(code) == "[]\n"
