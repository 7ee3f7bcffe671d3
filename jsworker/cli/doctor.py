"""``jsworker doctor``: what is wrong with settings, servers, tables and streams, and what to do about it."""

import asyncio
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated

from rich.table import Column, Table
from rich.text import Text

from jsworker.cli.options import flag, new_app
from jsworker.cli.output import console, print_json
from jsworker.core.exit_codes import DONE, FAILED
from jsworker.core.names import printable
from jsworker.core.settings import Settings, load_settings
from jsworker.doctor.checks import examine
from jsworker.doctor.finding import Finding, counted
from jsworker.doctor.gather import gather
from jsworker.doctor.repairs import repair
from jsworker.ownership.transitions.audit import os_user

app = new_app()

_LONGEST_LINE = 600
_PIPED_COLUMNS = 120
_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}
_AREAS = {"fix": "Mended", "postgresql": "PostgreSQL", "nats": "NATS"}


@app.command()
def doctor(
    *,
    fix: Annotated[bool, flag("Mend what is safe to mend, and say what was done.", "--fix")] = False,
    as_json: Annotated[bool, flag("Print a JSON array of findings.", "--json")] = False,
) -> int:
    """Check settings, servers, tables and streams, and say what to do.

    Nothing is written without --fix, which makes or changes stream and consumers as a worker does at its
    start, queues and publishes what is overdue, and lets workers try refused rows again at once. Each
    repair is listed by `jsworker audit`.
    Run it with the variables of a worker. Exit code 1 when there is an error; warnings alone are 0.

    Example: `jsworker doctor --json`
    """
    findings = asyncio.run(_findings(load_settings(), fix=fix))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        _print(findings)
    return FAILED if any(finding.level == "error" for finding in findings) else DONE


async def _findings(settings: Settings, *, fix: bool) -> list[Finding]:
    facts = await gather(settings)
    if not fix:
        return examine(facts)
    done = await repair(facts, actor=os_user())
    return done + examine(await gather(settings))


def _print(findings: Sequence[Finding]) -> None:
    columns = [Column(no_wrap=True), Column(no_wrap=True), Column(overflow="fold")]
    table = Table(*columns, box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for area, of_area in groupby(findings, key=lambda finding: finding.check.partition(".")[0]):
        table.add_row(Text(_AREAS.get(area, area.title()), style="bold"))
        for finding in of_area:
            level = Text(f"  {finding.level}", style=_STYLES[finding.level])
            style = "dim" if finding.level == "info" and finding.says.startswith("not checked") else ""
            says = Text(printable(finding.says, _LONGEST_LINE), style=style)
            table.add_row(level, Text(finding.check.partition(".")[2]), says)
            if finding.do is not None:
                table.add_row("", "", Text(f"do: {printable(finding.do, _LONGEST_LINE)}"))
    out = console(piped_columns=_PIPED_COLUMNS)
    out.print(table)
    levels = [finding.level for finding in findings]
    summary = f"{counted(levels.count('error'), 'error')}, {counted(levels.count('warning'), 'warning')}"
    out.print(Text(summary, style="bold"))
