"""A shop with real jobs: workers as processes, the dashboard as a process, both on servers of a test."""

import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import psycopg

from jsworker.client.sync_client import SyncJobClient
from jsworker.core.settings import Settings, variable_of
from tests.supervisor.parent_process import ParentProcess

MODULE = "shop_jobs"
_SECONDS = 120.0


class Shop:
    """Enqueues jobs, asks the database about them, and kills who runs them.

    Attributes:
        address: of its dashboard, without a slash at the end.
        board: the process of its dashboard.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.address = ""
        self._folder = folder
        self._processes: list[ParentProcess] = []
        self._database = psycopg.connect(settings.database_dsn(), autocommit=True)
        self.client = SyncJobClient(settings)
        self.client.open()
        shutil.copy(Path(__file__).with_name(f"{MODULE}.py"), folder)

    def start(self, *command: str) -> ParentProcess:
        """Start a command of jsworker on the shop's jobs."""
        given = {name: getattr(self.settings, name) for name in self.settings.model_fields_set}
        process = ParentProcess(
            MODULE,
            folder=self._folder,
            environment={variable_of(name): str(value) for name, value in given.items()},
            command=(sys.executable, "-m", "jsworker", command[0]),
            options=command[1:],
        )
        self._processes.append(process)
        return process

    def open_dashboard(self, port: int = 0) -> None:
        self.board = board = self.start("dashboard", "--port", str(port))

        def said() -> re.Match[str] | None:
            assert board.popen.poll() is None, board.log
            return re.search(r"dashboard: (http://\S+)/", board.log)

        found = wait_for(said, lambda: board.log)
        self.address = found[1]

    def rows(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = self._database.execute(statement.encode(), values)
        return cursor.fetchall() if cursor.description else []

    def value(self, statement: str, *values: Any) -> Any:
        return self.rows(statement, *values)[0][0]

    def status(self, job_id: UUID) -> str:
        return str(self.value("SELECT status FROM jsworker.jobs WHERE id = %s", job_id))

    def wait_until(self, job_id: UUID, *statuses: str) -> None:
        """Wait until a job is in one of these states."""
        wait_for(lambda: self.status(job_id) in statuses, lambda: f"{job_id} is {self.status(job_id)}")

    def enqueue(self, kind: str, payload: dict[str, Any], **options: Any) -> UUID:
        return self.client.enqueue(kind, payload, **options).id

    def kill_owner(self, job_id: UUID) -> None:
        """Kill the process that runs a job, at once."""
        statement = (
            "SELECT w.pid FROM jsworker.jobs AS j JOIN jsworker.workers AS w ON w.id = j.worker_id"
            " WHERE j.id = %s AND j.progress IS NOT NULL"
        )
        found = wait_for(lambda: self.rows(statement, job_id), lambda: f"{job_id} is {self.status(job_id)}")
        psutil.Process(found[0][0]).send_signal(signal.SIGKILL)

    def nightly_import(self, *, is_broken: bool) -> UUID:
        """Enqueue a workflow."""
        with self.client.workflow("nightly import") as flow:
            parts = flow.batch(
                "import-products",
                [{"part": n, "is_broken": is_broken and n == 3} for n in range(4)],
                name="parts",
            )
            flow.job("publish-catalogue", {}, after=[parts], name="catalogue")
            flow.job("send-invoice", {"number": 7}, after=[parts], name="invoice")
        return flow.id

    def add_dead_messages(self, number: int) -> None:
        self.rows(
            "INSERT INTO jsworker.dead_messages (subject, stream_seq, reason, data, truncated)"
            " SELECT %s, n, 'the message holds no id of a job', '{}', false FROM generate_series(1, %s) AS n",
            f"{self.settings.subject_prefix}.send-invoice",
            number,
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill_all()
        self.client.close()
        self._database.close()


@contextmanager
def open_shop(database_url: str, nats_url: str, folder: Path, name: str = "shop") -> Iterator[Shop]:
    """Open a shop whose dashboard is served; workers are started by ``start("run", …)``.

    Its stream and subjects have its name.
    """
    settings = Settings(
        database_url=database_url, nats_url=nats_url, stream=name.upper(), subject_prefix=name
    )
    shop = Shop(settings, folder)
    try:
        shop.open_dashboard()
        yield shop
    finally:
        shop.close()


def wait_for(check: Callable[[], Any], otherwise: Callable[[], str]) -> Any:
    """Return what ``check`` returns once that is true; AssertionError with other words after two minutes."""
    until = time.monotonic() + _SECONDS
    while not (found := check()):
        assert time.monotonic() < until, otherwise()
        time.sleep(0.1)
    return found
