"""Who works here: worker processes, and the id that pairs this database with its stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import text

from jsworker.ownership.database import Database

# A row that somebody deleted under a live worker comes back with the next heartbeat.
SEEN = text("""
INSERT INTO jsworker.workers (
  id, hostname, pod_uid, container, boot_id, pid_namespace, pid, process_started, kinds, concurrency, version,
  heartbeat_interval, state)
VALUES (
  :id, :hostname, :pod_uid, :container, :boot_id, :pid_namespace, :pid, :process_started,
  CAST(:kinds AS text[]), :concurrency, :version,
  make_interval(secs => CAST(:heartbeat_interval AS double precision)), :state)
ON CONFLICT (id) DO UPDATE SET last_seen_at = clock_timestamp(), state = excluded.state
""")

INSTALLATION = text("""
WITH created AS (
  INSERT INTO jsworker.installation (id) VALUES (:id) ON CONFLICT DO NOTHING RETURNING id
)
SELECT id FROM created UNION ALL SELECT id FROM jsworker.installation WHERE NOT EXISTS (SELECT FROM created)
""")

WORKERS = text("""
SELECT w.id, w.hostname, w.pid, w.state, w.kinds, w.concurrency, w.version, w.started_at, w.last_seen_at,
  (SELECT count(*) FROM jsworker.jobs AS j WHERE j.worker_id = w.id AND j.status || '' = 'processing') AS processing
FROM jsworker.workers AS w ORDER BY w.last_seen_at DESC LIMIT :limit
""")


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One life of a worker process.

    Attributes:
        id: ``hostname-pid-random``; the random end makes every life a new one.
        pod_uid, container: what Kubernetes calls this life's surroundings.
        boot_id, pid_namespace, pid, process_started: evidence by which a later life can prove this one dead.
        heartbeat_interval: seconds.
    """

    id: str
    hostname: str
    pod_uid: str | None
    container: str | None
    boot_id: str | None
    pid_namespace: str | None
    pid: int
    process_started: str | None
    kinds: Sequence[str]
    concurrency: int
    version: str
    heartbeat_interval: float


async def seen(database: Database, worker: WorkerRow, *, state: str) -> None:
    """Register a worker, or note that it is still there.

    Args:
        database: where.
        worker: who.
        state: ``running``, ``draining`` or ``stopped``.
    """
    values: dict[str, Any] = {name: getattr(worker, name) for name in WorkerRow.__slots__}
    await database.run_heartbeat(SEEN, values | {"kinds": list(worker.kinds), "state": state})


async def installation_id(database: Database) -> UUID:
    """Return the id of this installation; the first to ask makes it."""
    for _ in range(3):
        rows = await database.run(INSTALLATION, {"id": uuid4()})
        if rows:
            found: UUID = rows[0].id
            return found
    raise AssertionError("an installation row neither inserted nor found")


async def list_workers(database: Database, *, limit: int) -> list[dict[str, Any]]:
    """Return workers, the last seen first, each as a dict by column name, with its running jobs."""
    return [dict(row._mapping) for row in await database.run(WORKERS, {"limit": limit})]  # noqa: SLF001 -- SQLAlchemy's public name
