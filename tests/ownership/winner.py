"""The winner of a race: a transaction that is still open and holds the locks of what it has written."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from sqlalchemy import Engine, Executable, Row

from jsworker.ownership.predicates import ANY_AGE
from jsworker.ownership.transitions import claim, control, publish, reset, settle, steps

from .polling import eventually
from .rows import KIND, LIMITS, WORKER, Sql, read_job, read_value


class Winner:
    """Runs statements in one open transaction; others that need the same rows must wait or skip."""

    def __init__(self, engine: Engine, sql: Sql) -> None:
        self._sql = sql
        self._connection = engine.connect()
        self._pid = int(self._connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()

    def run(self, statement: Executable, parameters: Mapping[str, Any] | None = None) -> Sequence[Row[Any]]:
        """Run a statement of the code under test; its locks stay."""
        rows = self._connection.execute(statement, parameters).all()
        assert rows, "the winner wrote nothing"
        return rows

    def locks_the_table(self) -> None:
        """Let no other transaction write to jobs; a claim waits for no row, but for this."""
        self._connection.exec_driver_sql("LOCK TABLE jsworker.jobs IN SHARE ROW EXCLUSIVE MODE")

    def commit(self) -> None:
        """End the transaction; what it wrote holds."""
        self._connection.commit()

    def rollback(self) -> None:
        """End the transaction as if it had never been."""
        self._connection.rollback()

    def blocked(self) -> int:
        """Return how many statements wait for this transaction."""
        found = read_value(
            self._sql,
            "SELECT count(*) FROM pg_stat_activity WHERE pg_blocking_pids(pid) @> ARRAY[%s::integer]",
            self._pid,
        )
        return int(found)

    async def blocks(self, statements: int = 1) -> None:
        """Wait until so many statements wait for this transaction."""
        await eventually(lambda: self.blocked() == statements, f"{statements} waiting for the winner")

    async def is_passed_over(self) -> None:
        """Wait until an operator's statement has skipped locked rows and its caller has looked at them."""
        looked = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
            r" AND query ~ '^SELECT (j\.)?id'"
        )
        await eventually(lambda: read_value(self._sql, looked) > 0, "a look at what the winner has locked")

    def claims(self, job_id: UUID, worker_id: str) -> None:
        """Claim, and leave the claim open."""
        parameters = {
            "worker_id": worker_id,
            "kind": KIND,
            "ids": [job_id],
            "stale_after": LIMITS.stale_after,
            "crash_after": LIMITS.crash_after,
            "timeout": LIMITS.timeout,
            "max_attempts": LIMITS.max_attempts,
            "max_stalls": LIMITS.max_stalls,
        }
        self.run(claim.CLAIM, parameters)

    def completes(self, job_id: UUID, token: int = 1) -> None:
        """Complete as the owner, and leave it open."""
        self.run(settle.complete_statement(WORKER, settle.Completion(job_id, token, '"winner"')))

    def fails(self, job_id: UUID, permanent: str | None = None) -> None:
        """Fail as the owner, and leave it open."""
        runs = [settle.Failure(job_id, 1, "broken", permanent, 60.0)]
        self.run(settle.FAIL, settle.fail.values(WORKER, runs))

    def releases(self, job_id: UUID) -> None:
        """Release as the owner, and leave it open."""
        runs = [settle.Return(job_id, 1, "shutdown")]
        self.run(settle.RELEASE, settle.release.values(WORKER, runs))

    def resets(self, job_id: UUID) -> None:
        """Reset by the stale rule, counted, and leave it open."""
        parameters = {
            "worker_id": "sweeper-3-cccc",
            "reason": "silent",
            "counted": True,
            "ids": [job_id],
            "tokens": [1],
            "activities": [read_job(self._sql, job_id)["last_activity_at"]],
            "uncounted": [False],
        }
        self.run(reset.RESET_STALE, parameters)

    def cancels(self, job_id: UUID) -> None:
        """Cancel, and leave it open."""
        self.run(control.CANCEL, {"ids": [job_id], "statuses": list(control.LIVE), **ANY_AGE.values()})

    def retries(self, job_id: UUID) -> None:
        """Retry, and leave it open."""
        self.run(control.RETRY, {"ids": [job_id]})

    def keeps_step(self, job_id: UUID, name: str, result: str) -> None:
        """Keep what a step returned, as the owner, and leave it open."""
        owner = {"worker_id": WORKER, "id": job_id, "token": 1, "write": "step"}
        self.run(steps.STEP, owner | {"name": name, "result": result, "sleeps": None})

    def marks(self, job_id: UUID, dispatch: int = 1) -> None:
        """Mark as published, and leave it open."""
        self.run(publish.MARK, {"ids": [job_id], "dispatches": [dispatch], "seqs": [7], "created": None})
