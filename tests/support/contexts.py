"""Worker contexts for components that a test runs without a worker."""

from dataclasses import replace
from typing import Any

from jsworker.core.contents import PLAIN
from jsworker.core.events import Events
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.sessions import Sessions
from jsworker.ownership.transitions.refused_rows import RefusedRows
from jsworker.stream.jetstream import Stream
from jsworker.worker.context import Complaints, DatabaseHealth, PublishingHealth, WorkerContext
from jsworker.worker.figure_counts import FigureCounts
from jsworker.worker.recovery.earlier_lives import identify


def make_context(
    database: Database,
    *,
    stream: Stream | None = None,
    events: Events | None = None,
    settings: Settings | None = None,
    worker_id: str = "testing",
    **fields: Any,
) -> WorkerContext:
    """Return a context around a database; keyword arguments replace any field. Nothing connects."""
    events = events or Events()
    settings = settings or Settings(database_url=database.url.render_as_string(hide_password=False))

    def died(name: str, error: BaseException) -> None:
        raise AssertionError(name) from error

    context = WorkerContext(
        settings=settings,
        contents=PLAIN,
        kinds={},
        me=replace(identify(settings, []), id=worker_id),
        database=database,
        sessions=Sessions(database, worker_id=worker_id, size=1, lock_seconds=5.0),
        stream=stream or Stream(settings, installation_id=None, events=events, client_name=worker_id),
        events=events,
        supervision=None,
        health=DatabaseHealth(events),
        publishing=PublishingHealth(events),
        complaints=Complaints(events),
        refused_rows=RefusedRows(database, worker_id=worker_id),
        died=died,
        counts=FigureCounts(events),
    )
    return replace(context, **fields)
