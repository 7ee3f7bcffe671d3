"""``jsworker dashboard``: serves the web application that shows and repairs."""

import asyncio
import logging
import sys
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jsworker.cli.options import argument, new_app, option
from jsworker.cli.output import print_line, remark
from jsworker.client.job_client import JobClient
from jsworker.core.errors import DatabaseRefused
from jsworker.core.exit_codes import WrongUsage
from jsworker.core.names import is_loopback, shown
from jsworker.core.settings import load_settings
from jsworker.core.targets import load_processors

if TYPE_CHECKING:
    from jsworker.dashboard import Authorize

_STATEMENT_SECONDS = 30.0
"""Least statement timeout: people who act on many jobs may wait longer than workers."""

app = new_app()


@app.command()
def dashboard(
    targets: Annotated[
        list[str] | None,
        argument("MODULE:CLASS", "Processors whose models make the forms for payloads; MODULE: all of it."),
    ] = None,
    *,
    host: Annotated[str, option("ADDRESS", "The address to listen on; default: 127.0.0.1.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        option("PORT", "Default: 8100, or a free port if that is taken; 0: a free port.", min=0, max=65_535),
    ] = None,
    logins: Annotated[
        Path | None, option("FILE", "Ask for name and password; see --new-login for its lines.")
    ] = None,
    proxy_secret: Annotated[
        Path | None,
        option("FILE", "Take users from a proxy that sends this file's content as X-Jsworker-Secret."),
    ] = None,
    proxy_group: Annotated[
        list[str] | None,
        option("GROUP=RIGHTS", "What members of a group of the proxy's users may do; again for others."),
    ] = None,
    proxy_everybody: Annotated[
        str | None, option("RIGHTS", "What users of no such group may do; default: nothing.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, option("NAME", "Answer to this host name alone; again for others.")
    ] = None,
    read_role: Annotated[
        str | None,
        option("ROLE", "Read pages with the rights of this role of PostgreSQL: the login is a member of it."),
    ] = None,
    trace_url: Annotated[str | None, option("URL", "Where a trace is shown, with {trace_id} in it.")] = None,
    new_login: Annotated[
        str | None, option("NAME", "Ask for a password, print its line for --logins, and end.")
    ] = None,
    rights: Annotated[str | None, option("RIGHTS", "Of --new-login; default: read.")] = None,
) -> None:
    """Serve the dashboard: see jobs, failures, workers; retry, cancel, take back, enqueue.

    Without a login it listens on this machine alone, and any user of a browser here may do everything.
    Rights are `read`, `payloads` (see what jobs hold), `all`, or actions: retry, cancel, clear, priority,
    reschedule, enqueue, pause, schedules, workflows, workers, dead-messages, repair. Needs the extra
    "dashboard": pip install 'jsworker[dashboard]'.

    Example: `jsworker dashboard --host 0.0.0.0 --logins logins.txt`
    """
    try:
        from jsworker.dashboard import dashboard as new_dashboard  # noqa: PLC0415 -- an extra
        from jsworker.dashboard.serving import address_of, listen, serve  # noqa: PLC0415
    except ImportError as error:
        raise WrongUsage(
            f"jsworker dashboard needs {error.name}; install it: pip install 'jsworker[dashboard]'"
        ) from None
    if new_login is not None:
        print_line(_line(new_login, rights or "read"))
        return
    if rights is not None:
        raise WrongUsage("--rights needs --new-login")
    authorize = _authorize(logins, proxy_secret, proxy_group, proxy_everybody)
    if authorize is None and not is_loopback(host):
        raise WrongUsage(
            f"--host {host}: without a login the dashboard listens on this machine alone;"
            " add --logins FILE or --proxy-secret FILE"
        )

    logging.getLogger("jsworker.dashboard").addHandler(logging.StreamHandler())
    faults = logging.StreamHandler()
    faults.addFilter(_is_of_a_fault)
    logging.getLogger("uvicorn.error").addHandler(faults)
    processors = [each for target in targets or () for each in load_processors(target)]

    async def run() -> None:
        async with JobClient(load_settings()) as client:
            client.database.wait_at_least(_STATEMENT_SECONDS)  # the doctor judges the settings themselves
            if read_role is not None:
                await _check_role(client, read_role)
            served = new_dashboard(
                client,
                authorize=authorize,
                hosts=allow_host,
                read_role=read_role,
                trace_url=trace_url,
                processors=processors,
            )
            listening = listen(host, port)
            await serve(served, listening, started=lambda: remark(f"dashboard: {address_of(listening)}"))

    asyncio.run(run())


def _is_of_a_fault(record: logging.LogRecord) -> bool:
    """Return whether the server logs an error of a page, not that it cut off open pages when it ended."""
    return record.exc_info is not None and isinstance(record.exc_info[1], Exception)


async def _check_role(client: JobClient, role: str) -> None:
    try:
        await client.database.for_reading(seconds=_STATEMENT_SECONDS, role=role).ping()
    except DatabaseRefused as error:
        raise WrongUsage(f"--read-role {shown(role)}: {error}") from None


def _authorize(
    logins: Path | None, proxy_secret: Path | None, groups: list[str] | None, everybody: str | None
) -> "Authorize | None":
    from jsworker.dashboard.authentication import PasswordFile, ProxyHeaders, access_named  # noqa: PLC0415 -- an extra

    if logins is not None and proxy_secret is not None:
        raise WrongUsage("--logins and --proxy-secret: one of them")
    if logins is not None:
        return PasswordFile(logins)
    if proxy_secret is None:
        if groups or everybody:
            raise WrongUsage("--proxy-group and --proxy-everybody need --proxy-secret")
        return None
    if not groups and everybody is None:
        raise WrongUsage("--proxy-secret lets no one in without --proxy-group or --proxy-everybody")
    pairs = [each.rpartition("=") for each in groups or ()]
    for group, _, rights in pairs:
        if not group:
            raise WrongUsage(f"--proxy-group {rights}: must be GROUP=RIGHTS")
    try:
        return ProxyHeaders(
            proxy_secret.read_text().strip(),
            groups={group: access_named(rights) for group, _, rights in pairs},
            everybody=None if everybody is None else access_named(everybody),
        )
    except OSError as error:
        raise WrongUsage(f"--proxy-secret {proxy_secret}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise WrongUsage(f"--proxy-secret {proxy_secret}: must be UTF-8 text") from None
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _line(name: str, rights: str) -> str:
    from jsworker.dashboard.authentication import access_named, login_line  # noqa: PLC0415 -- an extra

    try:
        access_named(rights)  # checked before the password is asked for
        return login_line(name, _password(name), rights)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _password(name: str) -> str:
    """Ask for the password twice on the terminal; without a terminal, read one line from stdin."""
    if not sys.stdin.isatty():
        remark(f"the password of {shown(name)} is read from stdin, one line")
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        try:
            password = getpass(f"Password of {shown(name)}: ")
            again = getpass("Once more: ")
        except EOFError:
            raise WrongUsage(f"--new-login {name}: no password was given") from None
        if password != again:
            raise WrongUsage(f"--new-login {name}: the two passwords differ")
    if not password:
        raise WrongUsage(f"--new-login {name}: no password was given")
    return password
