"""What the tests of the dashboard share: rows in every state, and a viewer."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from jsworker import JobClient
from jsworker.core.settings import Settings
from jsworker.dashboard import dashboard
from jsworker.ownership.transitions.enqueue import new_job_id
from tests.dashboard.viewer import Viewer
from tests.worker.conftest import rows, start
from tests.worker.rows import Rows

__all__ = ["rows", "start"]

_NOW = sql.SQL("clock_timestamp()")
_STATES: dict[str, dict[str, Any]] = {
    "queued": {"queued_at": _NOW},
    "scheduled": {"run_at": sql.SQL("clock_timestamp() + interval '1 hour'")},
    "processing": {
        "worker_id": "worker-1",
        "fencing_token": 1,
        "attempts": 1,
        **dict.fromkeys(("claimed_at", "started_at", "last_activity_at"), _NOW),
    },
    "completed": {"attempts": 1, "completed_by": "worker-1", "claimed_at": _NOW, "finished_at": _NOW},
    "failed": {
        "attempts": 1,
        "errors": 1,
        "last_error": "ValueError: a failure\nTraceback",
        "finished_at": _NOW,
    },
    "cancelled": {"finished_at": _NOW},
}

PutJob = Callable[..., Awaitable[UUID]]


@pytest.fixture
async def client(settings: Settings) -> AsyncIterator[JobClient]:
    """A client without NATS: workers publish what it queues."""
    given = {name: getattr(settings, name) for name in settings.model_fields_set - {"nats_url"}}
    async with JobClient(Settings(**given | {"statement_timeout": 30.0})) as opened:
        yield opened


@pytest.fixture
def put(rows: Rows) -> PutJob:
    """Insert a job of a status as a row, with these columns, and return its id."""

    async def insert(status: str, **columns: Any) -> UUID:
        values = {"id": new_job_id(), "kind": "resize", "payload": Jsonb({}), "status": status}
        values |= _STATES[status] | columns
        names = sql.SQL(", ").join(map(sql.Identifier, values))
        given = [each if isinstance(each, sql.SQL) else sql.Literal(each) for each in values.values()]
        statement = sql.SQL("INSERT INTO jsworker.jobs ({}) VALUES ({})")
        await rows.connection.execute(statement.format(names, sql.SQL(", ").join(given)))
        return UUID(str(values["id"]))

    return insert


@pytest.fixture
async def viewer(client: JobClient) -> AsyncIterator[Viewer]:
    """Somebody on this machine, who may do everything."""
    found = Viewer(dashboard(client))
    yield found
    await found.http.aclose()
