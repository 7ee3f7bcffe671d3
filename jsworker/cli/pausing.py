"""``jsworker pause``, ``resume``, ``drain``, ``undrain``: stop and allow jobs of a kind, a key, a worker."""

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any

from jsworker.cli.client_call import ask_client
from jsworker.cli.limits import Kind, pause_in_words
from jsworker.cli.options import argument, new_app, option
from jsworker.cli.output import moment, print_line
from jsworker.cli.selection import warn_unless_served
from jsworker.client.job_client import JobClient
from jsworker.client.terms import LONGEST_DELAY
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import cell, check_kind, check_limit_key_of_row
from jsworker.ownership.refusals import operators_rights
from jsworker.ownership.transitions.limits import named, pause_of, resumed

app = new_app()

Key = Annotated[str | None, argument("[KEY]", "A limit key; left out: the whole kind.")]
WorkerId = Annotated[str, argument("ID", "The worker, as `jsworker workers` names it.")]


@app.command()
def pause(
    kind: Kind,
    key: Key = None,
    *,
    seconds: Annotated[float | None, option("SECONDS", "Go on by itself after so long.", min=1.0)] = None,
    reason: Annotated[str | None, option("TEXT", "Shown by `jsworker limits`.")] = None,
) -> None:
    """Start no more jobs of a kind, or of one of its keys; running jobs continue.

    Messages of a paused kind stay in the stream; jobs of a paused key are held in the table. A new pause
    takes the place of the one before, also of a longer one.

    Example: `jsworker pause send-mail --seconds 3600 --reason "the mail server is moved"`
    """
    until = None
    if seconds is not None:
        if not math.isfinite(seconds) or seconds > LONGEST_DELAY:
            raise WrongUsage(f"--seconds {seconds:g} must be from 1 to {LONGEST_DELAY:.0f}")
        until = timedelta(seconds=seconds)

    async def change(client: JobClient) -> tuple[Mapping[str, Any] | None, datetime | None]:
        on = "" if key is None else check_limit_key_of_row(key)
        with operators_rights("pause", "UPDATE on jsworker.limits"):
            before = await pause_of(client.database, check_kind(kind), on)
        return before, await client.pause(kind, key, until=until, reason=reason)

    before, ends = ask_client(change)
    line = f"{named(kind, key or '')} is paused" + ("" if ends is None else f" until {moment(ends)}")
    print_line(line + ("" if before is None else f"; before: {pause_in_words(before)}"))
    warn_unless_served(kind)


@app.command()
def resume(kind: Kind, key: Key = None) -> None:
    """Resume a paused kind or key.

    Jobs of a key start only when neither the key nor its kind is paused: where the other pause is left, the
    line says so.

    Example: `jsworker resume send-mail`
    """
    pauses = ask_client(lambda client: client.resume(check_kind(kind), key))
    print_line(f"{named(kind, key or '')} {resumed(key or '', pauses)}")


@app.command()
def drain(worker_id: WorkerId) -> None:
    """Let a worker claim no more jobs; its running jobs continue.

    It learns of it with its next heartbeat, and hands back at once what it has claimed ahead. It stays
    drained until `jsworker undrain`, or until its process starts anew.

    Example: `jsworker drain jsworker-0-17-5f1c8a2e`
    """
    ask_client(lambda client: client.drain_worker(worker_id))
    print_line(f"worker {cell(worker_id)} is to be drained")


@app.command()
def undrain(worker_id: WorkerId) -> None:
    """Let a drained worker claim jobs again.

    Example: `jsworker undrain jsworker-0-17-5f1c8a2e`
    """
    ask_client(lambda client: client.undrain_worker(worker_id))
    print_line(f"worker {cell(worker_id)} claims jobs again")
