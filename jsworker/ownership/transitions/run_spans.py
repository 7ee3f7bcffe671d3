"""NOTE_RUN: the owner writes into the row which span its run has, so that a run after it can link to it."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array

# Skips what is locked, for nothing depends on it; the guard is the one of every write of an owner.
NOTE_RUN = text("""
WITH noted AS (
  SELECT * FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:states AS text[]))
    AS n(id, token, state)
), mine AS (
  SELECT j.id, noted.token, noted.state
  FROM jsworker.jobs AS j JOIN noted ON noted.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = noted.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET tracestate = mine.state
FROM mine
WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = mine.token
RETURNING j.id
""")


class RunContext(NamedTuple):
    """A run and what the row's ``tracestate`` is from now on."""

    id: UUID
    fencing_token: int
    tracestate: str


async def note_runs(database: Database, *, worker_id: str, runs: Sequence[RunContext]) -> None:
    """Write the contexts of runs that this worker still owns.

    Raises:
        DatabaseUnavailable: unclear; a later run may lack its link.
    """
    parameters = {
        "worker_id": worker_id,
        "ids": uuid_array(run.id for run in runs),
        "tokens": [run.fencing_token for run in runs],
        "states": [run.tracestate for run in runs],
    }
    await database.run_by_key(NOTE_RUN, parameters)
