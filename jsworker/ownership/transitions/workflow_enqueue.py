"""ENQUEUE of a workflow: its row, its batches, what each of them needs, and all jobs, in one transaction."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import text

from jsworker.ownership.database import Database
from jsworker.ownership.pool import Transaction, uuid_array
from jsworker.ownership.transitions.enqueue import NewJob, field_of_copy, size_of

_LINES: Final = 1000
"""The most jobs in one piece of a COPY."""
_EDGE_BYTES: Final = 100
"""The bytes that a need counts as for the time given: checking its two foreign keys takes up to 35 microseconds."""

INSERT_WORKFLOW = text(
    "INSERT INTO jsworker.workflows (id, name) VALUES (CAST(:id AS uuid), CAST(:name AS text))"
)

INSERT_BATCHES = text("""
INSERT INTO jsworker.batches (id, workflow, name, kind, place, on_failure)
SELECT b.id, CAST(:workflow AS uuid), b.name, b.kind, b.place, b.on_failure
FROM unnest(CAST(:ids AS uuid[]), CAST(:names AS text[]), CAST(:kinds AS text[]), CAST(:places AS integer[]),
  CAST(:on_failures AS text[])) AS b(id, name, kind, place, on_failure)
""")

INSERT_NEEDS = text("""
INSERT INTO jsworker.batch_needs (batch, needs)
SELECT n.batch, n.needs FROM unnest(CAST(:batches AS uuid[]), CAST(:needs AS uuid[])) AS n(batch, needs)
""")

# Like COPY_MANY. Jobs of a batch with needs are held in any case: the needs cannot finish before this commit.
COPY_MEMBERS = text("""
COPY jsworker.jobs (
  id, kind, payload, max_attempts, max_stalls, traceparent, tracestate, limit_key, priority, batch_id,
  status, run_at, dispatch, needs_publish, publish_after, queued_at, held_by, held_at) FROM STDIN
""")
_QUEUED: Final = "queued\tnow\t1\tt\tnow\tnow\t\\N\t\\N\n"
_HELD: Final = "scheduled\t\\N\t0\tf\t\\N\t\\N\tneeds\tnow\n"


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch to enqueue: ``needs`` are ids of batches of the same workflow."""

    id: UUID
    name: str
    kind: str
    on_failure: str
    needs: Sequence[UUID]
    jobs: Sequence[NewJob]


async def enqueue_workflow(
    database: Database, *, workflow: UUID, name: str, batches: Sequence[NewBatch]
) -> None:
    """Store a workflow with everything that belongs to it, or nothing.

    Raises:
        DatabaseUnavailable: it is unclear whether it was stored.
    """
    edges = [(batch.id, need) for batch in batches for need in batch.needs]
    size = size_of(job for batch in batches for job in batch.jobs) + _EDGE_BYTES * len(edges)

    async def write(transaction: Transaction) -> None:
        await transaction.run(INSERT_WORKFLOW, {"id": workflow, "name": name})
        columns = {
            "ids": uuid_array(batch.id for batch in batches),
            "names": [batch.name for batch in batches],
            "kinds": [batch.kind for batch in batches],
            "places": list(range(len(batches))),
            "on_failures": [batch.on_failure for batch in batches],
        }
        await transaction.run(INSERT_BATCHES, {"workflow": workflow, **columns})
        if edges:
            ends = {
                "batches": uuid_array(one for one, _ in edges),
                "needs": uuid_array(two for _, two in edges),
            }
            await transaction.run(INSERT_NEEDS, ends)
        await transaction.copy_in(COPY_MEMBERS, _pieces(batches))

    await database.in_transaction(write, size=size)


def _pieces(batches: Iterable[NewBatch]) -> Iterator[str]:
    for batch in batches:
        tail = f"{batch.id.hex}\t{_HELD if batch.needs else _QUEUED}"
        for start in range(0, len(batch.jobs), _LINES):
            yield "".join([_line(batch.kind, job, tail) for job in batch.jobs[start : start + _LINES]])


def _line(kind: str, job: NewJob, tail: str) -> str:
    fields = (job.payload, job.max_attempts, job.max_stalls, job.traceparent, job.tracestate, job.limit_key)
    return "\t".join([job.id.hex, kind, *map(field_of_copy, fields), str(job.priority), tail])
