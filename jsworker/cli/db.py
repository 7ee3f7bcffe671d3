"""``jsworker db``: the tables and their version."""

from jsworker.cli.options import JsonObject, new_app
from jsworker.cli.output import print_json, print_line, remark
from jsworker.core.settings import load_settings
from jsworker.ownership.database import REVISIONS, check_level
from jsworker.ownership.upgrading import current_revision, upgrade_database

app = new_app(no_args_is_help=True)


@app.callback()
def _db() -> None:
    """Create or migrate jsworker's tables in the database of JSWORKER_DATABASE_URL.

    All of them are in the schema "jsworker".
    """


@app.command()
def upgrade(*, as_json: JsonObject = False) -> None:
    """Create the tables, or bring them to what this version needs; workers may run meanwhile."""
    revision = upgrade_database(load_settings().database_dsn(), tell=remark)
    if as_json:
        print_json({"revision": revision, "head": REVISIONS[-1]})
    else:
        print_line(f"the database is at migration {revision}")


@app.command()
def current(*, as_json: JsonObject = False) -> None:
    """Show at which migration the database is; exit code 1 when this version cannot work with it."""
    revision = current_revision(load_settings().database_dsn())
    if as_json:
        print_json({"revision": revision, "head": REVISIONS[-1]})
    else:
        print_line(f"{revision or 'not migrated'} (this version's own: {REVISIONS[-1]})")
    check_level(revision)
