"""Which schema this version needs, known without loading the library that migrates."""

from typing import Final

from jsworker.core.errors import MigrationMissing

REVISIONS: Final = (
    *("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0013", "0014"),
)
"""The migrations that this version knows, in their order; a test compares them with the scripts."""


def check_level(found: str | None) -> str:
    """Refuse a database that this version cannot work with, and return its revision.

    A revision that this version does not know is newer: workers of the old version go on through a
    rolling upgrade, because migrations only add.

    Args:
        found: the revision at which the database is; None: it was never migrated.

    Raises:
        MigrationMissing: never migrated, or migrated to an older revision than this version needs.
    """
    wanted = REVISIONS[-1]
    if found is None:
        raise MigrationMissing("the database has no jsworker schema: run `jsworker db upgrade`")
    if found in REVISIONS and found != wanted:
        raise MigrationMissing(
            f"the database is at migration {found}, this version needs {wanted}: run `jsworker db upgrade`"
        )
    return found
