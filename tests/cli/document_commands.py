"""Writes docs/cli.md: each command with its help and its options, as the command line itself has them.

python -m tests.cli.document_commands docs/cli.md
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from jsworker.cli.app import _COMMANDS
from jsworker.core.settings import Settings

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
HEADER = """# The command line

<!-- Written by `python -m tests.cli.document_commands docs/cli.md`; do not edit. -->

`jsworker COMMAND --help` shows the same.

| exit code | |
|---|---|
| 0 | done |
| 1 | failed, or partly refused |
| 2 | wrong usage or invalid settings: one line names the option or variable, the value and the rule |
| 3, 4 | `enqueue --wait`: the job has not completed (3), or not in time (4) |
| 130 | Ctrl-C; but 0 for `run`, `dashboard` and `dev` without COMMAND, which end by it |

Results are written to stdout, everything else (questions, messages, progress bars) to stderr. On a terminal,
tables fit its width and have colours unless `NO_COLOR` is set; in a pipe they are complete and plain. Their
times are in this machine's zone. `--json`, or `--output json`, prints one JSON document: an array for a
listing and for jobs that are enqueued or acted on, an object for a single item. Field names are column names,
times are ISO 8601 in UTC, and durations are in seconds. A listing has `--limit` and `--after`; if there are
more items, it prints the command for its next page. Progress bars are shown only on a terminal, and never
with `--json`.

`jsworker --install-completion` lets bash, zsh, fish and PowerShell complete commands, options and values.
"""


def page() -> str:
    """Return the page."""
    parts = [HEADER]
    for name, entry in _COMMANDS.items():
        found: Any = get_command(importlib.import_module(f"jsworker.cli.{entry.module}").app)
        command = getattr(found, "commands", {}).get(name, found)
        parts += ["\n".join(_section(f"jsworker {name}", command))]
    return "\n".join(parts)


def commands() -> Iterator[tuple[str, Any]]:
    """Yield each command that does something, with its words."""
    for name, entry in _COMMANDS.items():
        found: Any = get_command(importlib.import_module(f"jsworker.cli.{entry.module}").app)
        command = getattr(found, "commands", {}).get(name, found)
        inner = getattr(command, "commands", {})
        for each, sub in inner.items():
            yield f"{name} {each}", sub
        if not inner:
            yield name, command


def _section(words: str, command: Any, depth: int = 2) -> Iterator[str]:
    yield f"{'#' * depth} `{words}`\n"
    inner = getattr(command, "commands", {})
    if not inner:
        yield f"```text\n{' '.join([words, '[OPTIONS]', *filter(None, map(_usage, command.params))])}\n```\n"
    yield f"{str(command.help or '').strip()}\n"
    options = command.params
    if words == "jsworker run":
        options = [each for each in options if each.name not in Settings.model_fields]
        yield "Each [setting](reference/settings.md) is an option, too.\n"
    if rows := list(filter(None, map(_row, options))):
        yield "| | |\n|---|---|"
        yield "\n".join(rows) + "\n"
    for name, each in inner.items():
        yield from _section(f"{words} {name}", each, depth + 1)


def _usage(parameter: Any) -> str:
    """Return an argument as usages show it, an option not at all."""
    if parameter.param_type_name != "argument":
        return ""
    name = _name(parameter).strip("[].")
    name += "…" if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _name(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return ""
    names = [_name(parameter)]
    if parameter.param_type_name == "option":
        names = [f"{', '.join(parameter.opts)} {parameter.metavar or ''}".strip()]
    default = parameter.default
    is_shown = parameter.show_default and default not in (None, False, "", ())
    rest = f" Default: `{default}`." if is_shown else ""
    return f"| {_cell(f'`{names[0]}`')} | {_cell(str(parameter.help or ''))}{rest} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
