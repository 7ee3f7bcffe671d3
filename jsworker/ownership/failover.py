"""The history of the database at the other end: it changes when a standby takes over, or a backup is restored."""

from dataclasses import dataclass

from sqlalchemy import text

from jsworker.ownership.database import Database

# Not pg_control_checkpoint(): after a promotion it shows the old timeline until the next checkpoint has ended.
# The name of the WAL file that is being written begins with the timeline's eight hexadecimal digits; a standby
# writes none.
HISTORY = text("""
SELECT CAST((SELECT system_identifier FROM pg_control_system()) AS text) AS system_identifier,
  CASE WHEN pg_is_in_recovery() THEN NULL ELSE left(pg_walfile_name(pg_current_wal_lsn()), 8) END AS timeline
""")


@dataclass(frozen=True, slots=True)
class DatabaseHistory:
    """What distinguishes one history of a database from another.

    Attributes:
        system_identifier: made by initdb; copies of a cluster keep it.
        timeline: begins with 1 and rises with every promotion; None on a standby.
    """

    system_identifier: str
    timeline: int | None


async def read_history(database: Database) -> DatabaseHistory:
    """Return which history the database at the other end has; any role may ask.

    Raises:
        DatabaseUnavailable: no answer.
        DatabaseRefused: an administrator has withdrawn the functions from the role.
    """
    [row] = await database.run(HISTORY)
    timeline = None if row.timeline is None else int(row.timeline, 16)
    return DatabaseHistory(row.system_identifier, timeline)
