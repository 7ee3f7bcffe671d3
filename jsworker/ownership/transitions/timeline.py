"""Writing to the timeline what no other statement tells: a fence after an outage, a write that came too late."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import text

from jsworker.core import strict_json
from jsworker.ownership.database import Database

# Once only: the answer to an insert may be lost, and then it is tried again.
NOTE = text("""
INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
SELECT DISTINCT n.job_id, n.event, n.worker_id, n.token, CAST(n.detail AS jsonb)
FROM unnest(
  CAST(:ids AS uuid[]), CAST(:events AS text[]), CAST(:workers AS text[]), CAST(:tokens AS bigint[]),
  CAST(:details AS text[])
) AS n(job_id, event, worker_id, token, detail)
WHERE NOT EXISTS (
  SELECT FROM jsworker.job_events AS e
  WHERE e.job_id = n.job_id AND e.event = n.event AND e.worker_id IS NOT DISTINCT FROM n.worker_id
    AND e.fencing_token IS NOT DISTINCT FROM n.token AND e.detail IS NOT DISTINCT FROM CAST(n.detail AS jsonb))
""")

# A late write is told once for each run and kind of write, however often it is tried. What this run has
# completed itself, in the job's own transaction, is no late write.
_REJECTED = """
INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
SELECT r.id, 'rejected', CAST(:worker_id AS text), r.token, jsonb_build_object('write', CAST(:write AS text))
FROM {late} AS r(id, token)
WHERE NOT EXISTS (
  SELECT FROM jsworker.jobs AS j WHERE j.id = r.id AND j.status = 'completed' AND j.fencing_token = r.token)
AND NOT EXISTS (
  SELECT FROM jsworker.job_events AS e
  WHERE e.job_id = r.id AND e.event = 'rejected' AND e.worker_id = CAST(:worker_id AS text)
    AND e.fencing_token = r.token AND e.detail ->> 'write' = CAST(:write AS text))
"""
REJECTED = text(_REJECTED.replace("{late}", "unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]))"))
REJECTED_ONE = _REJECTED.replace("{late}", "(VALUES (CAST(:id AS uuid), CAST(:token AS bigint)))").strip()
"""The same for one run, to be told by the very statement that was rejected."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that happened to a job.

    Attributes:
        event: its name, for example ``fenced``.
        detail: what else is to be told, as JSON can hold it; the same entry with the same detail is told once.
    """

    job_id: UUID
    event: str
    worker_id: str | None
    fencing_token: int | None
    detail: dict[str, Any] | None


async def note(database: Database, *, entries: Sequence[Entry]) -> None:
    """Write entries to the timelines of their jobs; what is there already is not written again.

    Raises:
        InvalidJson: a detail is no JSON.
        DatabaseUnavailable: unclear; note them again.
    """
    if not entries:
        return
    details = [
        None if one.detail is None else strict_json.dumps(one.detail, what="detail") for one in entries
    ]
    values = {
        "ids": [one.job_id for one in entries],
        "events": [one.event for one in entries],
        "workers": [one.worker_id for one in entries],
        "tokens": [one.fencing_token for one in entries],
        "details": details,
    }
    await database.run(NOTE, values)
