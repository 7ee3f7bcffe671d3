"""What commands write to stdout: one JSON document, or a table for people."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.table import Column, Table

_UNCUT = 100_000
"""Columns; a table that no terminal shows is not cut."""


def print_json(value: Any) -> None:
    """Write one JSON document: UUIDs as text, times in ISO 8601 UTC, durations in seconds."""
    indent = 2 if sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(value, default=_json_value, indent=indent) + "\n")


def print_line(line: str) -> None:
    """Write one line to stdout."""
    sys.stdout.write(f"{line}\n")


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table: fitted to the terminal and in colour there, whole and plain elsewhere."""
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def console(*, piped_columns: int = _UNCUT) -> Console:
    """Return rich's way to stdout; what is not a terminal gets no colours, and by default no line breaks."""
    fitted = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if fitted else piped_columns, highlight=False, markup=False, emoji=False)


def iso(time: datetime) -> str:
    """Return a time in ISO 8601, UTC."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _json_value(value: Any) -> Any:
    match value:
        case UUID():
            return str(value)
        case datetime():
            return iso(value)
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return float(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        case _:
            raise TypeError(f"a value of type {type(value).__name__} has no place in JSON output")
