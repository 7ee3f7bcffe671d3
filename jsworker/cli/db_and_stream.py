"""``jsworker db`` and ``jsworker stream``: the tables, and JetStream's stream and consumers."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from jsworker.cli.options import JsonObject, argument, flag, new_app
from jsworker.cli.output import print_json, print_line, remark
from jsworker.cli.selection import connected_database
from jsworker.core.errors import UsageError
from jsworker.core.events import Event, Events
from jsworker.core.names import check_kind
from jsworker.core.priorities import HIGH, LOW, NORMAL
from jsworker.core.settings import Settings, load_settings
from jsworker.core.targets import load_processor_class
from jsworker.ownership.database import REVISIONS, check_level, upgrade_advice
from jsworker.ownership.refusals import needed_right
from jsworker.ownership.transitions.workers import installation_id
from jsworker.ownership.upgrading import current_revision, upgrade_database, upgrade_script
from jsworker.stream.jetstream import ensured_stream
from jsworker.stream.message import consumer_of
from jsworker.stream.topology import shown

app = new_app()
db = new_app(no_args_is_help=True)
stream = new_app(no_args_is_help=True)
app.add_typer(db, name="db")
app.add_typer(stream, name="stream")


@db.callback()
def _db() -> None:
    """Create or migrate jsworker's tables in the database of JSWORKER_DATABASE_URL.

    All of them are in the schema "jsworker".
    """


@db.command()
def upgrade(*, as_json: JsonObject = False) -> None:
    """Create the tables, or upgrade them to this version; workers may run meanwhile.

    Example: `jsworker db upgrade`
    """
    with needed_right("db upgrade", "to own jsworker's tables", "jsworker_owner"):
        revision = upgrade_database(load_settings().database_dsn(), tell=remark)
    if as_json:
        print_json({"revision": revision, "head": REVISIONS[-1]})
    else:
        print_line(f"the database is at migration {revision}")


@db.command()
def sql(
    since: Annotated[
        str,
        argument("[REVISION]", "Where the database is (jsworker db current); left out: it has no tables."),
    ] = "base",
) -> None:
    """Print the SQL that upgrades the tables to this version, to apply it by hand.

    Nothing is connected to. Run it statement by statement and stop at the first error, as
    psql -v ON_ERROR_STOP=1 does: each migration is a transaction, and indexes are built between them.

    Example: `jsworker db sql 0019 > to_newest.sql`
    """
    try:
        print_line(upgrade_script(since).rstrip())
    except ValueError as error:
        raise UsageError(str(error)) from None


@db.command()
def current(*, as_json: JsonObject = False) -> None:
    """Show the database's migration; exit code 1 if this version cannot work with it.

    Example: `jsworker db current`
    """
    revision = current_revision(load_settings().database_dsn())
    if as_json:
        print_json({"revision": revision, "head": REVISIONS[-1]})
    else:
        print_line(f"{revision or 'not migrated'} (this version's own: {REVISIONS[-1]})")
    check_level(revision)
    if (advice := upgrade_advice(revision)) is not None:
        remark(advice)


@stream.callback()
def _stream() -> None:
    """Create JetStream's stream and consumers, or correct them.

    Workers do so when they start, unless NATS lets only an operator do it (deploy/nats/permissions.conf).
    """


@stream.command()
def ensure(
    kinds: Annotated[list[str], argument("KIND", "Kinds, or MODULE:CLASS of their processors.")],
    *,
    lanes: Annotated[bool, flag("Also the consumers of their high and low jobs.", "--lanes")] = False,
    as_json: JsonObject = False,
) -> None:
    """Create the stream and a consumer for each of these kinds, or correct them, as a worker would.

    Nothing is deleted, and what is as it must be stays untouched. Run it with the variables of the workers,
    the login aside, before they start; again when a kind is new or JSWORKER_ACK_WAIT has changed.

    Example: `jsworker stream ensure my_jobs:AnalyzeRepo --lanes`
    """
    settings = load_settings()
    named = [load_processor_class(kind).kind if ":" in kind else check_kind(kind) for kind in kinds]
    wanted = list(dict.fromkeys(named))
    priorities = (NORMAL, HIGH, LOW) if lanes else (NORMAL,)
    consumers = [consumer_of(kind, priority) for kind in wanted for priority in priorities]
    with needed_right("stream ensure", "SELECT and INSERT on jsworker.installation", "jsworker_worker"):
        changes = asyncio.run(_ensure(settings, consumers))
    if as_json:
        print_json({"stream": settings.stream, "kinds": wanted, "changes": changes})
        return
    for change in changes:
        was, now = shown(change["was"]), shown(change["is"])
        print_line(f"{change['what']}: {change['setting']} {was} -> {now}")
    print_line(f"stream {settings.stream} is ready for {', '.join(wanted)}")


async def _ensure(settings: Settings, consumers: Sequence[str]) -> list[dict[str, Any]]:
    changed: list[Event] = []
    events = Events()
    events.on("stream.changed", changed.append)
    async with connected_database() as database:
        installation = await installation_id(database)
    async with ensured_stream(
        settings, installation, consumers, events=events, client_name="jsworker stream"
    ):
        return [
            {name: getattr(value, "value", value) for name, value in event.fields.items()}
            for event in changed
        ]
