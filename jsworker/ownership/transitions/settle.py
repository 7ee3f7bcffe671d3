"""The owner's last word: COMPLETE, FAIL, RELEASE. Each is fenced; zero rows means the job is lost.

Batches skip locked rows and then read without a lock what they skipped: a row that is still mine is told as
locked, or settled alone, where waiting for its lock holds up nobody else.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar
from uuid import UUID

from sqlalchemy import TextClause, text

from jsworker.ownership.database import Database
from jsworker.ownership.halving import in_halves
from jsworker.ownership.pool import Row, uuid_array
from jsworker.ownership.refusals import RowRefused
from jsworker.ownership.transitions.reset_rules import STALL_BACK_OFF
from jsworker.ownership.transitions.timeline import REJECTED

COMPLETE = text("""
WITH input AS (
  SELECT id, token, result
  FROM unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:results AS text[])) AS i(id, token, result)
), mine AS (
  SELECT j.id, CAST(input.result AS jsonb) AS result
  FROM jsworker.jobs AS j JOIN input ON input.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = input.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE jsworker.jobs AS j SET
  status = 'completed', result = mine.result, finished_at = clock_timestamp(), completed_by = j.worker_id,
  worker_id = NULL, last_activity_at = NULL
FROM mine WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id
RETURNING j.id, j.status, j.fencing_token
""")

# A run of a job that is cancelled on request counts neither as an error nor as an attempt.
FAIL = text(
    """
WITH input AS (
  SELECT * FROM unnest(
    CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:errors AS text[]),
    CAST(:reasons AS text[]), CAST(:delays AS double precision[]), CAST(:stalled AS boolean[])
  ) AS i(id, token, error, reason, delay, stalled)
), mine AS (
  SELECT j.id,
    CASE WHEN j.cancel_requested THEN 'cancelled'
         WHEN input.reason IS NOT NULL THEN 'failed'
         WHEN input.stalled AND j.stalls + 1 >= j.max_stalls THEN 'failed'
         WHEN NOT input.stalled AND j.errors + 1 >= j.max_attempts THEN 'failed'
         ELSE 'scheduled' END AS next,
    coalesce(input.reason, CASE WHEN input.stalled THEN 'stalled' ELSE 'attempts' END) AS reason,
    input.error, input.delay, input.stalled
  FROM jsworker.jobs AS j JOIN input ON input.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = input.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), ended AS (
  UPDATE jsworker.jobs AS j SET
    status = mine.next,
    errors = j.errors + CASE WHEN mine.stalled OR mine.next = 'cancelled' THEN 0 ELSE 1 END,
    stalls = j.stalls + CASE WHEN mine.stalled THEN 1 ELSE 0 END,
    attempts = j.attempts - CASE WHEN mine.next = 'cancelled' AND NOT mine.stalled THEN 1 ELSE 0 END,
    last_error = mine.error,
    failure_reason = CASE WHEN mine.next = 'failed' THEN mine.reason END,
    cleared = false, clear_reason = NULL,
    run_at = CASE WHEN mine.next <> 'scheduled' THEN j.run_at
                  ELSE clock_timestamp() + CASE WHEN mine.stalled THEN {back-off}
                                                ELSE make_interval(secs => mine.delay) END END,
    finished_at = CASE WHEN mine.next <> 'scheduled' THEN clock_timestamp() END,
    worker_id = NULL, last_activity_at = NULL
  FROM mine WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id
  RETURNING j.id, j.status, j.fencing_token, j.errors, j.failure_reason, j.run_at, mine.error,
    CASE WHEN mine.stalled THEN j.stalls END AS stalls
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, error, detail)
  SELECT id, CASE status WHEN 'scheduled' THEN 'error' ELSE status END, :worker_id, fencing_token, error,
    jsonb_strip_nulls(jsonb_build_object(
      'errors', errors, 'stalls', stalls, 'reason', failure_reason,
      'run_at', CASE WHEN status = 'scheduled' THEN run_at END))
  FROM ended
)
SELECT id, status, fencing_token FROM ended
""".replace("{back-off}", STALL_BACK_OFF)
)

RELEASE = text("""
WITH input AS (
  SELECT * FROM unnest(
    CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:reasons AS text[]), CAST(:delays AS double precision[])
  ) AS i(id, token, reason, delay)
), mine AS (
  SELECT j.id, j.cancel_requested AS cancel, input.reason, input.delay
  FROM jsworker.jobs AS j JOIN input ON input.id = j.id
  WHERE j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = input.token
  ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
), ended AS (
  UPDATE jsworker.jobs AS j SET
    status = CASE WHEN mine.cancel THEN 'cancelled' WHEN mine.delay IS NULL THEN 'queued' ELSE 'scheduled' END,
    attempts = j.attempts - 1,
    dispatch = j.dispatch + CASE WHEN mine.cancel OR mine.delay IS NOT NULL THEN 0 ELSE 1 END,
    needs_publish = NOT mine.cancel AND mine.delay IS NULL,
    publish_after = clock_timestamp(),
    queued_at = CASE WHEN mine.cancel OR mine.delay IS NOT NULL THEN j.queued_at ELSE clock_timestamp() END,
    run_at = CASE WHEN mine.cancel OR mine.delay IS NULL
                  THEN j.run_at ELSE clock_timestamp() + make_interval(secs => mine.delay) END,
    cleared = NOT mine.cancel,
    clear_reason = CASE WHEN mine.cancel THEN NULL ELSE mine.reason END,
    finished_at = CASE WHEN mine.cancel THEN clock_timestamp() END,
    worker_id = NULL, last_activity_at = NULL
  FROM mine WHERE j.id = mine.id AND j.status = 'processing' AND j.worker_id = :worker_id
  RETURNING j.id, j.status, j.fencing_token, j.dispatch, j.run_at, mine.reason
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, CASE status WHEN 'cancelled' THEN status ELSE 'released' END, :worker_id, fencing_token,
    jsonb_build_object('reason', reason, 'dispatch', dispatch) || CASE status WHEN 'scheduled'
      THEN jsonb_build_object('server_fault', true, 'run_at', run_at) ELSE '{}' END
  FROM ended
)
SELECT id, status, fencing_token FROM ended
""")

# Releases for a server's fault since the last error that counted.
SERVER_FAULTS = text("""
SELECT count(*) AS releases FROM jsworker.job_events AS e
WHERE e.job_id = :id AND e.event = 'released' AND e.detail -> 'server_fault' IS NOT NULL
  AND e.id > coalesce((SELECT max(other.id) FROM jsworker.job_events AS other
                       WHERE other.job_id = :id AND other.event IN ('error', 'retried')), 0)
""")

# Waits for the lock that a COMMIT without an answer may still hold: what it reads is final.
COMMITTED = text("""
SELECT status FROM jsworker.jobs WHERE id = :id AND fencing_token = :token FOR SHARE
""")

# What a zero-row write means: still mine behind a lock, already written by me (the commit's answer was
# lost, or the job's own transaction completed it), or lost.
VERDICT = text("""
SELECT j.id, h.token AS fencing_token,
  j.status = 'processing' AND j.worker_id = :worker_id AND j.fencing_token = h.token AS mine,
  j.status = 'completed' AND j.fencing_token = h.token AS completed,
  (SELECT e.event FROM jsworker.job_events AS e
   WHERE e.job_id = j.id AND e.worker_id = :worker_id AND e.fencing_token = h.token
     AND e.event IN ('error', 'failed', 'cancelled', 'released')
   ORDER BY e.id DESC LIMIT 1) AS ended
FROM jsworker.jobs AS j
JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS h(id, token) ON h.id = j.id
""")


class Settled(Enum):
    """What became of a job when its run wanted to settle it."""

    COMPLETED = "completed"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"
    REFUSED = "refused"
    """PostgreSQL refused the content of this row; the job is still owned."""
    LOCKED = "locked"
    """Somebody else holds a lock on the row: nothing was written, the job is still owned."""


class Completion(NamedTuple):
    """A run that returned. ``result`` is JSON text."""

    id: UUID
    token: int
    result: str | None


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended in an error.

    Attributes:
        error: what to store as the attempt's error.
        permanent: why no further attempt may follow (``permanent``, ``payload``), or None.
        delay: seconds until the next attempt, if there is one; after a stall that is RESET's back-off instead.
        stalled: the run's process died in quarantine: a stall, not an error of the job.
    """

    id: UUID
    token: int
    error: str
    permanent: str | None
    delay: float
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """A run that has ended without an outcome: the job goes back to the queue.

    Attributes:
        reason: told in the timeline and to the next run.
        delay: seconds until it may run again, because a server's fault ended the run; None: at once.
    """

    id: UUID
    token: int
    reason: str
    delay: float | None = None


_SETTLED = {each.value: each for each in Settled}
_Held = tuple[UUID, int]
Refusals = dict[_Held, RowRefused]
"""Why the rows of runs were refused, by job id and fencing token."""
EndedT = TypeVar("EndedT", Completion, Failure, Return)


@dataclass(frozen=True, slots=True)
class _Write(Generic[EndedT]):
    name: str
    batch: TextClause
    alone: TextClause
    parameters: Callable[[Sequence[EndedT]], dict[str, Any]]
    size: Callable[[EndedT], int]


async def complete(
    database: Database,
    *,
    worker_id: str,
    runs: Sequence[Completion],
    refusals: Refusals | None = None,
    tries: int = 0,
    wait: bool = True,
) -> list[Settled]:
    """Complete jobs and tell what became of each, in order.

    Args:
        database: where they are.
        worker_id: their owner.
        runs: what they ended in.
        refusals: takes why rows were refused.
        tries: that went unanswered; after each of them it may take longer.
        wait: for the locks that others hold on their rows, one by one; else such a row is told as ``LOCKED``.

    Raises:
        DatabaseUnavailable: unclear; ask again: what was written under the same token counts as success.
    """
    return await _settle(database, worker_id, runs, _COMPLETE, refusals, tries=tries, wait=wait)


async def fail(
    database: Database,
    *,
    worker_id: str,
    runs: Sequence[Failure],
    refusals: Refusals | None = None,
    tries: int = 0,
    wait: bool = True,
) -> list[Settled]:
    """End attempts in an error and tell what became of each job, in order; arguments as for ``complete``.

    Raises:
        DatabaseUnavailable: unclear; ask again.
    """
    return await _settle(database, worker_id, runs, _FAIL, refusals, tries=tries, wait=wait)


async def release(
    database: Database,
    *,
    worker_id: str,
    runs: Sequence[Return],
    refusals: Refusals | None = None,
    tries: int = 0,
    wait: bool = True,
) -> list[Settled]:
    """Hand jobs back whose runs have really ended, and tell what became of each, in order.

    The arguments are as for ``complete``.

    Raises:
        DatabaseUnavailable: unclear; ask again.
    """
    return await _settle(database, worker_id, runs, _RELEASE, refusals, tries=tries, wait=wait)


async def server_faults(database: Database, *, job_id: UUID) -> int:
    """Return how often in a row a job was released because of a server's fault.

    Raises:
        DatabaseUnavailable: no answer.
    """
    [row] = await database.run(SERVER_FAULTS, {"id": job_id})
    return int(row.releases)


async def was_committed(database: Database, *, job_id: UUID, token: int) -> bool:
    """Tell, after a COMMIT without an answer, whether it completed the job under this token.

    Raises:
        DatabaseUnavailable: no answer, or the commit is still on its way; ask again.
    """
    rows = await database.run(COMMITTED, {"id": job_id, "token": token})
    return bool(rows) and rows[0].status == "completed"


def complete_statement(worker_id: str, run: Completion) -> TextClause:
    """Return COMPLETE for one job with its values bound; no row means that the job is lost."""
    return _COMPLETE.alone.bindparams(worker_id=worker_id, **_completions([run]))


async def _settle(
    database: Database,
    worker_id: str,
    runs: Sequence[EndedT],
    write: _Write[EndedT],
    refusals: Refusals | None,
    *,
    tries: int,
    wait: bool,
) -> list[Settled]:
    refusals = {} if refusals is None else refusals
    seconds = database.seconds_for(sum([write.size(run) for run in runs]), tries=tries)
    rows, refused = await in_halves(
        runs,
        lambda half: database.run_by_key(
            write.batch, {"worker_id": worker_id} | write.parameters(half), seconds=seconds
        ),
    )
    settled = {(job_id, token): _SETTLED[status] for job_id, status, token in rows}
    settled |= {(run.id, run.token): Settled.REFUSED for run, _ in refused}
    refusals |= {(run.id, run.token): error for run, error in refused}
    missing = [run for run in runs if (run.id, run.token) not in settled]
    if missing:
        settled |= await _judge(database, worker_id, missing, write, refusals, tries=tries, wait=wait)
    return [settled[run.id, run.token] for run in runs]


async def _judge(
    database: Database,
    worker_id: str,
    missing: Sequence[EndedT],
    write: _Write[EndedT],
    refusals: Refusals,
    *,
    tries: int,
    wait: bool,
) -> dict[_Held, Settled]:
    rows = await database.run(VERDICT, {"worker_id": worker_id} | _held(missing))
    verdicts = {(row.id, row.fencing_token): row for row in rows}
    settled: dict[_Held, Settled] = {}
    for run in missing:
        held = run.id, run.token
        row = verdicts.get(held)
        if row is None or not row.mine:
            settled[held] = _verdict(row)
        elif wait:
            settled[held] = await _alone(database, worker_id, run, write, refusals, tries=tries)
        else:
            settled[held] = Settled.LOCKED
    lost = [run for run in missing if settled[run.id, run.token] is Settled.LOST]
    if lost:
        with suppress(RowRefused):  # the entry in the timeline; the answer is the same without it
            await database.run(REJECTED, {"worker_id": worker_id, "write": write.name} | _held(lost))
    return settled


async def _alone(
    database: Database, worker_id: str, run: EndedT, write: _Write[EndedT], refusals: Refusals, *, tries: int
) -> Settled:
    seconds = database.seconds_for(write.size(run), tries=tries)
    try:
        rows = await database.run(
            write.alone, {"worker_id": worker_id} | write.parameters([run]), seconds=seconds
        )
    except RowRefused as error:
        refusals[run.id, run.token] = error
        return Settled.REFUSED
    if rows:
        return Settled(rows[0].status)
    # Whoever held the lock may have been an earlier try of this very write.
    return _verdict(next(iter(await database.run(VERDICT, {"worker_id": worker_id} | _held([run]))), None))


def _verdict(row: Row | None) -> Settled:
    if row is None:
        return Settled.LOST
    if row.completed:
        return Settled.COMPLETED
    return _WRITTEN_BEFORE.get(row.ended, Settled.LOST)


_WRITTEN_BEFORE = {
    "error": Settled.SCHEDULED,
    "failed": Settled.FAILED,
    "cancelled": Settled.CANCELLED,
    "released": Settled.QUEUED,
}


def _held(runs: Sequence[Completion | Failure | Return]) -> dict[str, Any]:
    return {"ids": uuid_array(run.id for run in runs), "tokens": [run.token for run in runs]}


def _completions(runs: Sequence[Completion]) -> dict[str, Any]:
    return _held(runs) | {"results": [run.result for run in runs]}


def _failures(runs: Sequence[Failure]) -> dict[str, Any]:
    return _held(runs) | {
        "errors": [run.error for run in runs],
        "reasons": [run.permanent for run in runs],
        "delays": [run.delay for run in runs],
        "stalled": [run.stalled for run in runs],
    }


def _returns(runs: Sequence[Return]) -> dict[str, Any]:
    return _held(runs) | {"reasons": [run.reason for run in runs], "delays": [run.delay for run in runs]}


def _waiting(statement: TextClause) -> TextClause:
    """Return a batch's statement as it is for one row alone: it waits for the lock."""
    return text(statement.text.replace("SKIP LOCKED", ""))


_COMPLETE = _Write("complete", COMPLETE, _waiting(COMPLETE), _completions, lambda run: len(run.result or ""))
_FAIL = _Write("fail", FAIL, _waiting(FAIL), _failures, lambda run: len(run.error))
_RELEASE = _Write("release", RELEASE, _waiting(RELEASE), _returns, lambda run: len(run.reason))
