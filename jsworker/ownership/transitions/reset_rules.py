"""The four rules of RESET as SQL, each beside the one ladder that says where a job goes that is taken back.

Each rule repeats what it was decided on, so that an owner that was faster keeps its job.
"""

from sqlalchemy import TextClause, text

from jsworker.ownership.queries.run_age import IS_SO_OLD

STALL_BACK_OFF = "make_interval(secs => least(600, 5 * 2 ^ least(j.stalls - 1, 20)) * (0.8 + 0.4 * random()))"
"""How long a job waits after a counted stall that was not its first; ``j.stalls`` are those before it."""

_RESET = """
WITH taken AS (
  SELECT j.id, j.worker_id AS owner, j.cancel_requested, j.stalls, j.max_stalls, {counted} AS counted
  FROM jsworker.jobs AS j {rule}
  FOR NO KEY UPDATE OF j SKIP LOCKED
), decided AS (
  SELECT id, owner, counted, CASE
      WHEN cancel_requested THEN 'cancelled'
      WHEN counted AND stalls + 1 >= max_stalls THEN 'failed'
      WHEN NOT counted OR stalls = 0 THEN 'queued'
      ELSE 'scheduled' END AS next
  FROM taken
), reset AS (
  UPDATE jsworker.jobs AS j SET
    status = decided.next,
    stalls = j.stalls + CASE WHEN decided.counted THEN 1 ELSE 0 END,
    attempts = j.attempts - CASE WHEN decided.counted THEN 0 ELSE 1 END,
    dispatch = j.dispatch + CASE WHEN decided.next = 'queued' THEN 1 ELSE 0 END,
    needs_publish = decided.next = 'queued',
    publish_after = CASE WHEN decided.next = 'queued' THEN clock_timestamp() ELSE j.publish_after END,
    queued_at = CASE WHEN decided.next = 'queued' THEN clock_timestamp() ELSE j.queued_at END,
    run_at = CASE WHEN decided.next = 'scheduled'
      THEN clock_timestamp() + {back-off}
      ELSE j.run_at END,
    finished_at = CASE WHEN decided.next IN ('cancelled', 'failed') THEN clock_timestamp() END,
    failure_reason = CASE WHEN decided.next = 'failed' THEN 'stalled' END,
    cleared = decided.next IN ('queued', 'scheduled'),
    clear_reason = :reason,
    worker_id = NULL, last_activity_at = NULL
  FROM decided WHERE j.id = decided.id AND j.status = 'processing'
  RETURNING j.id, j.kind, j.status, j.fencing_token, j.dispatch, decided.owner, decided.counted, j.stalls
), told AS (
  INSERT INTO jsworker.job_events (job_id, event, worker_id, fencing_token, detail)
  SELECT id, 'reset', CAST(:worker_id AS text), fencing_token, jsonb_build_object(
    'cause', '{cause}', 'reason', CAST(:reason AS text), 'owner', owner, 'to', status, 'counted', counted,
    'stalls', stalls, 'dispatch', dispatch)
  FROM reset
){noted}
SELECT id, kind, status, fencing_token, dispatch, owner, counted, stalls FROM reset
"""


# Whoever takes back by this rule has no events and shows no figures: a worker tells it.
_NOTED_FOR_WORKERS = """, noted AS (
  INSERT INTO jsworker.untold_resets (job_id, kind, status, fencing_token, dispatch, owner, stalls)
  SELECT id, kind, status, fencing_token, dispatch, owner, stalls FROM reset
)"""


def _reset(cause: str, *, rule: str, counted: str, noted: str = "") -> TextClause:
    """Return the statement that takes back the rows of one rule."""
    return text(
        _RESET.replace("{cause}", cause)
        .replace("{rule}", rule.strip())
        .replace("{counted}", counted)
        .replace("{noted}", noted)
        .replace("{back-off}", STALL_BACK_OFF)
    )


# Rule 1. The row as it was seen, and stale still.
RESET_STALE = _reset(
    "stale",
    counted="CAST(:counted AS boolean) AND NOT seen.in_line",
    rule="""
  JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:activities AS timestamptz[]),
    CAST(:in_line AS boolean[])) AS seen(id, token, activity, in_line) ON seen.id = j.id
  WHERE j.status = 'processing' AND j.fencing_token = seen.token AND j.last_activity_at = seen.activity
    AND j.last_activity_at + j.stale_after < clock_timestamp()
  ORDER BY j.id
""",
)

# Rule 2. The owner's id never lives again, so whatever it owns is nobody's, at every token.
RESET_DEAD = _reset(
    "dead",
    counted="""CASE WHEN cardinality(CAST(:culprits AS uuid[])) > 0
    THEN j.id = ANY(CAST(:culprits AS uuid[]))
    ELSE CAST(:counted AS boolean) AND j.id <> ALL(CAST(:in_line AS uuid[])) END""",
    rule="""
  WHERE j.status || '' = 'processing' AND j.worker_id = :owner
    AND (CAST(:ids AS uuid[]) IS NULL OR j.id = ANY(CAST(:ids AS uuid[])))
  ORDER BY j.id LIMIT :limit
""",
)

# Rule 3. The row as it was seen, and silent beyond the crash threshold still.
RESET_CRASHED = _reset(
    "crashed",
    counted="CAST(:counted AS boolean) AND NOT seen.in_line",
    rule="""
  JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[]), CAST(:activities AS timestamptz[]),
    CAST(:in_line AS boolean[])) AS seen(id, token, activity, in_line) ON seen.id = j.id
  WHERE j.status = 'processing' AND j.fencing_token = seen.token AND j.last_activity_at = seen.activity
    AND j.last_activity_at + j.crash_after < clock_timestamp()
  ORDER BY j.id
""",
)

# Rule 4. The row as it was seen, and still as old as it was chosen for. Uncounted: the job did nothing wrong.
RESET_BY_OPERATOR = _reset(
    "operator",
    counted="false",
    noted=_NOTED_FOR_WORKERS,
    rule=f"""
  JOIN unnest(CAST(:ids AS uuid[]), CAST(:tokens AS bigint[])) AS seen(id, token) ON seen.id = j.id
  WHERE j.status = 'processing' AND j.fencing_token = seen.token
    AND {IS_SO_OLD}
  ORDER BY j.id
""",
)

# One worker deletes each, and tells it: one that dies right then leaves it untold, none tells it twice.
TAKE_UNTOLD = text("""
DELETE FROM jsworker.untold_resets AS u
WHERE u.id = ANY(ARRAY(
  SELECT id FROM jsworker.untold_resets ORDER BY id LIMIT :limit FOR UPDATE SKIP LOCKED))
RETURNING u.job_id AS id, u.kind, u.status, u.fencing_token, u.dispatch, u.owner, false AS counted, u.stalls
""")

OWNED = text("""
SELECT id FROM jsworker.jobs WHERE status || '' = 'processing' AND worker_id = :owner ORDER BY id
""")
