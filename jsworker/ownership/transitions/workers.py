"""The registry: worker processes, and the id that pairs this database with its stream."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import text

from jsworker.core.errors import DatabaseRefused, TransitionRefused
from jsworker.core.names import printable
from jsworker.ownership.database import Database
from jsworker.ownership.refusals import in_halves, needed_right
from jsworker.ownership.transitions.audit import AuditEntry, run_noted

DRAINING: Final = "draining"
"""The state of a worker that is being stopped, not because of an error, until it has stopped."""
_LONGEST_ID = 200
_NO_SUCH_COLUMN = "42703"

# If the row of a live worker is deleted, its next heartbeat makes it again; a drained worker stays drained.
_SEEN = """
INSERT INTO jsworker.workers (
  id, hostname, pod_uid, container, boot_id, pid_namespace, pid, process_started, kinds, concurrency, version,
  heartbeat_interval, kinds_without_timeout, limits, answers, state, supervisor_pid, memory_bytes,
  loop_lag_seconds, drained_at{newer})
VALUES (
  :id, :hostname, :pod_uid, :container, :boot_id, :pid_namespace, :pid, :process_started,
  CAST(:kinds AS text[]), :concurrency, :version,
  make_interval(secs => CAST(:heartbeat_interval AS double precision)), CAST(:kinds_without_timeout AS text[]),
  CAST(:limits AS jsonb), :answers, CAST(:state AS text), :supervisor_pid, :memory_bytes, :loop_lag_seconds,
  CASE WHEN CAST(:state AS text) = 'drained' THEN clock_timestamp() END{newer_values})
ON CONFLICT (id) DO UPDATE SET
  last_seen_at = clock_timestamp(), answers = excluded.answers, state = excluded.state,
  memory_bytes = excluded.memory_bytes, loop_lag_seconds = excluded.loop_lag_seconds{newer_kept}
RETURNING drained_at IS NOT NULL AS is_to_drain
"""
SEEN = text(
    _SEEN.format(
        newer=", kind_settings",
        newer_values=", CAST(:kind_settings AS jsonb)",
        # A worker that began on the older schema writes it after the upgrade.
        newer_kept=",\n  kind_settings = coalesce(workers.kind_settings, excluded.kind_settings)",
    )
)
SEEN_AT_0024 = text(_SEEN.format(newer="", newer_values="", newer_kept=""))
"""On the schema of the previous minor version."""

_LIFE = """
SELECT w.id, w.hostname, w.pod_uid, w.container, w.boot_id, w.pid_namespace, w.pid, w.process_started, w.kinds,
  w.concurrency, w.version, extract(epoch FROM w.heartbeat_interval) AS heartbeat_interval, w.state, w.last_seen_at,
  extract(epoch FROM clock_timestamp() - w.last_seen_at) AS seconds_silent,
  coalesce((w.started_at, w.id) < (SELECT me.started_at, me.id FROM jsworker.workers AS me WHERE me.id = :id), true)
    AS started_before,
  (SELECT count(*) FROM jsworker.jobs AS j WHERE j.worker_id = w.id AND j.status || '' = 'processing') AS holds
FROM jsworker.workers AS w
WHERE w.id <> :id
"""

# Equality, not LIKE: worker-1 is not worker-10, and an underscore is not a wildcard.
EARLIER_LIVES = text(f"""
WITH life AS ({_LIFE} AND (w.hostname = :hostname OR w.pod_uid = CAST(:pod_uid AS text)))
SELECT * FROM life WHERE state <> 'stopped' OR holds > 0 ORDER BY last_seen_at DESC
""")  # noqa: S608 -- a constant of this file

# An id is a name and a random end of eight characters, which no two lives share.
DUPLICATES = text(f"""{_LIFE}
  AND w.id = CAST(:name AS text) || '-' || right(w.id, 8) AND w.state <> 'stopped' ORDER BY w.last_seen_at DESC
""")

DRAIN = text("""
UPDATE jsworker.workers SET drained_at = coalesce(drained_at, clock_timestamp()) WHERE id = :id AND state <> 'stopped'
RETURNING id
""")
UNDRAIN = text("""
UPDATE jsworker.workers SET drained_at = NULL WHERE id = :id AND state <> 'stopped' AND drained_at IS NOT NULL RETURNING id
""")

MARK_STOPPED = text("UPDATE jsworker.workers SET state = 'stopped' WHERE id = :id")

# The row of a worker with a running job stays: it is the evidence by which the job is recovered.
_SILENT = """SELECT w.id FROM jsworker.workers AS w
  WHERE w.last_seen_at < clock_timestamp() - make_interval(secs => CAST(:silent_for AS double precision))
    AND NOT EXISTS (SELECT FROM jsworker.jobs AS j WHERE j.worker_id = w.id AND j.status || '' = 'processing')"""
SILENT = text(_SILENT)
FORGET = text(f"""
WITH silent AS (
  {_SILENT}
    AND w.id = ANY(CAST(:ids AS text[]))
  ORDER BY w.id FOR UPDATE SKIP LOCKED
)
DELETE FROM jsworker.workers AS w USING silent WHERE w.id = silent.id RETURNING w.id
""")  # noqa: S608 -- a constant of this file

INSTALLATION = text("SELECT id FROM jsworker.installation")
# A statement of its own: only logins that may be the first need the right to INSERT.
MAKE_INSTALLATION = text("""
INSERT INTO jsworker.installation (id) VALUES (:id) ON CONFLICT DO NOTHING RETURNING id
""")

# Longer than heartbeats may fail without their worker being taken for dead. In seconds, because one row with an
# interval that cannot be multiplied would fail every statement that reads this.
IS_ALIVE = """w.state <> 'stopped' AND extract(epoch FROM statement_timestamp()) - extract(epoch FROM w.last_seen_at)
  < greatest(20, 4 * extract(epoch FROM w.heartbeat_interval))"""

WORKERS = text(f"""
SELECT w.id, w.hostname, w.pid, w.supervisor_pid, w.state, w.kinds, w.concurrency, w.version, w.started_at,
  w.last_seen_at, {IS_ALIVE} AS alive, w.memory_bytes, w.loop_lag_seconds, w.drained_at,
  (SELECT count(*) FROM jsworker.jobs AS j WHERE j.worker_id = w.id AND j.status || '' = 'processing') AS processing
FROM jsworker.workers AS w WHERE (CAST(:id AS text) IS NULL OR w.id = :id) AND (CAST(:after AS text) IS NULL
  OR (w.last_seen_at, w.id) < (SELECT a.last_seen_at, a.id FROM jsworker.workers AS a WHERE a.id = :after))
ORDER BY w.last_seen_at DESC, w.id DESC LIMIT :limit
""")  # noqa: S608 -- a constant of this file


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One life of a worker process.

    Attributes:
        id: ``hostname-pid-random``; the random end makes every life a new one.
        boot_id, pid_namespace, pid, process_started: evidence by which a later life can prove this one dead.
        kinds_without_timeout: kinds whose runs are limited by nothing but JSWORKER_JOB_TIMEOUT, or not at all; not
            read of other workers.
        limits: by kind what its class declares of limits: ``max_running``, ``rate``, ``per``, and the name of their
            ``key``. Kinds without are left out. Not read of other workers.
        kind_settings: by kind how its runs are limited and repeated, as class and settings say together; shown to
            people. Not read of other workers.
        supervisor_pid: of the process that started this one and watches it; None: nothing does. Not read of other
            workers.
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
    kinds_without_timeout: Sequence[str] = field(default=(), kw_only=True)
    limits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    kind_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, kw_only=True)
    supervisor_pid: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class EarlierLife(WorkerRow):
    """Another worker's row, as it is now.

    Attributes:
        state: ``running``, ``drained``, ``draining`` or ``stopped``; a killed worker stays as it was.
        seconds_silent: since its last heartbeat, by the database's clock.
        started_before: whether it registered before the worker that asks.
        holds: how many running jobs it owns.
    """

    state: str
    last_seen_at: datetime
    seconds_silent: float
    started_before: bool
    holds: int


async def seen(
    database: Database,
    worker: WorkerRow,
    *,
    state: str,
    answers: bool = False,
    memory_bytes: int | None = None,
    loop_lag_seconds: float | None = None,
) -> bool:
    """Register a worker, or note that it is still there; return whether an operator wants it to be drained.

    ``answers``: whether its NATS subject was proven to answer.
    """
    lists = {"kinds": list(worker.kinds), "kinds_without_timeout": list(worker.kinds_without_timeout)}
    documents = {"limits": json.dumps(worker.limits), "kind_settings": json.dumps(worker.kind_settings)}
    now = {
        "answers": answers,
        "state": state,
        "memory_bytes": memory_bytes,
        "loop_lag_seconds": loop_lag_seconds,
    }
    statement = SEEN_AT_0024 if database.revision == "0024" else SEEN
    try:
        rows = await database.run_heartbeat(statement, asdict(worker) | lists | documents | now)
    except DatabaseRefused as error:
        if error.sqlstate == _NO_SUCH_COLUMN:  # the schema went back, with a backup: for the next heartbeat
            await database.migrated_to()
        raise
    return any(row.is_to_drain for row in rows)


async def drain(database: Database, worker_id: str, *, entry: AuditEntry) -> None:
    """Have a worker claim nothing more, from its next heartbeat on.

    Raises:
        TransitionRefused: it has stopped, or there is no such worker.
    """
    if not await run_noted(database, DRAIN, {"id": worker_id}, entry):
        raise await _refused(database, worker_id)


async def undrain(database: Database, worker_id: str, *, entry: AuditEntry) -> None:
    """Have a drained worker claim jobs again, from its next heartbeat on.

    Raises:
        TransitionRefused: it is not to be drained, it has stopped, or there is no such worker.
    """
    if not await run_noted(database, UNDRAIN, {"id": worker_id}, entry):
        raise await _refused(database, worker_id)


async def _refused(database: Database, worker_id: str) -> TransitionRefused:
    found, named = await get_worker(database, worker_id), printable(worker_id, _LONGEST_ID)
    if found is None:
        return TransitionRefused(f"no worker has id {named}")
    return TransitionRefused(
        f"worker {named} {'has stopped' if found['state'] == 'stopped' else 'is not drained'}"
    )


async def earlier_lives(database: Database, *, worker: WorkerRow) -> list[EarlierLife]:
    """Return other workers of this hostname or pod that did not stop in order or still hold jobs."""
    values = {"id": worker.id, "hostname": worker.hostname, "pod_uid": worker.pod_uid}
    return [EarlierLife(**row._asdict()) for row in await database.run(EARLIER_LIVES, values)]


async def duplicates(database: Database, *, worker: WorkerRow, name: str) -> list[EarlierLife]:
    """Return other workers that did not stop in order and whose id is ``name`` and a random end."""
    rows = await database.run(DUPLICATES, {"id": worker.id, "name": name})
    return [EarlierLife(**row._asdict()) for row in rows]


async def mark_stopped(database: Database, *, worker_id: str) -> None:
    """Note that a worker proven dead has stopped; what it still holds goes on to be found."""
    await database.run(MARK_STOPPED, {"id": worker_id})


async def forget_workers(database: Database, *, silent_for: float) -> int:
    """Delete the rows of workers without a running job that were silent for so long; return how many."""
    values = {"silent_for": silent_for}
    ids = [row.id for row in await database.run(SILENT, values)]
    gone, _ = await in_halves(ids, lambda some: database.run(FORGET, values | {"ids": list(some)}))
    return len(gone)


async def installation_id(database: Database) -> UUID:
    """Return the id of this installation; the first to ask makes it."""
    for _ in range(3):
        rows = await database.run(INSTALLATION)
        if not rows:
            with needed_right("the first connection", "INSERT on jsworker.installation", "jsworker_producer"):
                rows = await database.run(MAKE_INSTALLATION, {"id": uuid4()})
        if rows:
            found: UUID = rows[0].id
            return found
    raise AssertionError("an installation row neither inserted nor found")


def state_in_words(worker: Mapping[str, Any]) -> str:
    """Return the state of a listed worker; of one that was killed, or cannot reach PostgreSQL, ``silent``."""
    if worker["state"] != "stopped" and not worker["alive"]:
        return "silent"
    asked = worker["state"] == "running" and worker["drained_at"] is not None
    return "to be drained" if asked else str(worker["state"])


async def get_worker(database: Database, worker_id: str) -> dict[str, Any] | None:
    """Return a worker as ``list_workers`` does; None: it is not registered."""
    rows = await database.run(WORKERS, {"id": worker_id, "limit": 1, "after": None})
    return rows[0]._asdict() if rows else None


async def list_workers(database: Database, *, limit: int, after: str | None = None) -> list[dict[str, Any]]:
    """Return workers, the last seen first, each as a dict by column name; ``after``: behind this one, by its id.

    ``processing`` is how many jobs it owns, ``alive`` whether it was seen within four of its heartbeats (at
    least 20 seconds) and has not stopped. ``memory_bytes`` is what its process takes, ``loop_lag_seconds`` how late
    its event loop was at most in the half minute before its last heartbeat; None: not known. ``drained_at``: since
    when an operator wants it to be drained; its ``state`` says whether it is.
    """
    return [
        row._asdict() for row in await database.run(WORKERS, {"id": None, "limit": limit, "after": after})
    ]
