"""What workers have done, added up by minute and kind: figures for people, on which nothing depends.

Each worker adds what it has counted, in one statement a few times a minute. A write that fails loses figures, no job.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from sqlalchemy import text

from jsworker.core.clock import DURATION_BUCKETS
from jsworker.ownership.database import Database

KEPT_SECONDS: Final = 48 * 3600.0

COUNTED: Final = ("started", "completed", "errors", "failed", "cancelled", "expired")
_PLACES: Final = len(DURATION_BUCKETS) + 1

_SUM: Final = """ARRAY(
    SELECT coalesce(had, 0) + coalesce(new, 0) FROM unnest(s.{name}, excluded.{name})
      WITH ORDINALITY AS each(had, new, place) ORDER BY place)"""

# The minute is by the database's clock. Rows are written in the order of kinds, because two workers that lock
# the same rows in different orders would deadlock; and without waiting for the disk, because a crash of
# PostgreSQL loses only figures of its last second.
ADD_STATISTICS = text(f"""
WITH given AS (
  SELECT * FROM unnest(CAST(:kinds AS text[]), {", ".join(f"CAST(:{name} AS bigint[])" for name in COUNTED)},
      CAST(:wait_seconds AS double precision[]), CAST(:run_seconds AS double precision[]),
      CAST(:waits AS text[]), CAST(:runs AS text[]))
    AS each(kind, {", ".join(COUNTED)}, wait_seconds, run_seconds, waits, runs)
)
INSERT INTO jsworker.statistics AS s (minute, kind, {", ".join(COUNTED)}, wait_seconds, run_seconds, waits, runs)
SELECT date_trunc('minute', statement_timestamp()), kind, {", ".join(COUNTED)}, wait_seconds, run_seconds,
  CAST(waits AS bigint[]), CAST(runs AS bigint[])
FROM given WHERE (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL ORDER BY kind
ON CONFLICT (minute, kind) DO UPDATE SET
  {", ".join(f"{name} = s.{name} + excluded.{name}" for name in (*COUNTED, "wait_seconds", "run_seconds"))},
  waits = {_SUM.format(name="waits")},
  runs = {_SUM.format(name="runs")}
""")  # noqa: S608 -- constants

FORGET_STATISTICS = text("""
DELETE FROM jsworker.statistics AS s WHERE s.ctid = ANY(ARRAY(
  SELECT ctid FROM jsworker.statistics
  WHERE minute < statement_timestamp() - make_interval(secs => CAST(:kept AS double precision))
  ORDER BY minute, kind LIMIT 5000 FOR UPDATE SKIP LOCKED))
RETURNING s.minute
""")


def _places() -> list[int]:
    return [0] * _PLACES


@dataclass(slots=True)
class KindFigures:
    """What a worker has done for a kind since it last wrote its figures, or all workers in a minute.

    Attributes:
        started: runs that began.
        completed, cancelled: jobs that ended so, by a run or, if cancelled, by a reset.
        errors: attempts that failed and were not the last.
        failed: jobs that failed for good.
        expired: jobs that were not begun in time.
        wait_seconds, waits: time from a job's due time to its claim: the sum, and the numbers by
            DURATION_BUCKETS.
        run_seconds, runs: the same for the time from a run's claim to its end.
    """

    started: int = 0
    completed: int = 0
    errors: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    waits: list[int] = field(default_factory=_places)
    runs: list[int] = field(default_factory=_places)


async def add_statistics(database: Database, figures: Mapping[str, KindFigures]) -> None:
    """Add what was done of each kind to the figures of the present minute."""
    rows = figures.values()
    values: dict[str, object] = {"kinds": list(figures)}
    values |= {
        name: [getattr(row, name) for row in rows] for name in (*COUNTED, "wait_seconds", "run_seconds")
    }
    # As text: PostgreSQL unnests an array of arrays into single numbers.
    values |= {
        name: [f"{{{','.join(map(str, getattr(row, name)))}}}" for row in rows] for name in ("waits", "runs")
    }
    await database.run(ADD_STATISTICS, values)


async def forget_statistics(database: Database) -> None:
    """Delete figures older than two days, except rows that another worker is deleting."""
    while await database.run(FORGET_STATISTICS, {"kept": KEPT_SECONDS}):
        continue
