"""NOTE_RUN: the owner writes into the row which span its run has, so that a run after it can link to it."""

from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from sqlalchemy import Text, select, update

from jsworker.ownership.database import Database
from jsworker.ownership.pool import uuid_array
from jsworker.ownership.predicates import mine
from jsworker.ownership.statements import compiled, given_array, given_runs, j, locked

# Skips what is locked, for nothing depends on it; the guard is the one of every write of an owner.
_run = given_runs("run", state=given_array("states", Text))
_mine = locked(
    select(j.c.id, _run.c.token, _run.c.state).join(_run, _run.c.id == j.c.id).where(mine(_run.c.token))
)
NOTE_RUN = compiled(
    update(j)
    .values(tracestate=_mine.c.state)
    .where(j.c.id == _mine.c.id, mine(_mine.c.token))
    .returning(j.c.id)
)


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
