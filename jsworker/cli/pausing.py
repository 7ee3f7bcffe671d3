"""``jsworker pause`` and ``resume``: stop and allow the start of jobs of a kind or a key."""

import math
from datetime import timedelta
from typing import Annotated

from jsworker.cli.client_call import ask_client
from jsworker.cli.limits import Kind
from jsworker.cli.options import argument, new_app, option
from jsworker.cli.output import moment, print_line
from jsworker.cli.selection import warn_unless_served
from jsworker.client.terms import LONGEST_DELAY
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import check_kind
from jsworker.ownership.transitions.limits import named

app = new_app()

Key = Annotated[str | None, argument("[KEY]", "A limit key; left out: the whole kind.")]


@app.command()
def pause(
    kind: Kind,
    key: Key = None,
    *,
    seconds: Annotated[float | None, option("SECONDS", "Go on by itself after so long.", min=1.0)] = None,
    reason: Annotated[str | None, option("TEXT", "Shown by `jsworker limits`.")] = None,
) -> None:
    """Start no more jobs of a kind, or of one of its keys; running jobs continue.

    Messages of a paused kind stay in the stream; jobs of a paused key are held in the table.

    Example: `jsworker pause send-mail --seconds 3600 --reason "the mail server is moved"`
    """
    until = None
    if seconds is not None:
        if not math.isfinite(seconds) or seconds > LONGEST_DELAY:
            raise WrongUsage(f"--seconds {seconds:g} must be from 1 to {LONGEST_DELAY:.0f}")
        until = timedelta(seconds=seconds)
    ends = ask_client(lambda client: client.pause(check_kind(kind), key, until=until, reason=reason))
    print_line(f"{named(kind, key or '')} is paused" + ("" if ends is None else f" until {moment(ends)}"))
    warn_unless_served(kind)


@app.command()
def resume(kind: Kind, key: Key = None) -> None:
    """Resume a paused kind or key.

    Example: `jsworker resume send-mail`
    """
    ask_client(lambda client: client.resume(check_kind(kind), key))
    print_line(f"{named(kind, key or '')} goes on")
