"""The words in which guards are written: a statement, a row that may take it, a flip for each predicate."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, TextClause, text

from jsworker.ownership.statements import condition

from .rows import STATES, WORKER

Row = Mapping[str, Any]
Parameters = dict[str, Any]


@dataclass(frozen=True)
class Flip:
    """One predicate made false.

    Attributes:
        predicate: its name, for people.
        guard: the predicate, or a regular expression where it has no name; taken out wherever it is repeated.
        columns: what the row holds instead, set after the statement's values were chosen.
        parameters: what the statement is given instead, for that row.
        tells: whether the statement notes this refusal in the timeline, if it notes any.
    """

    predicate: str
    guard: ColumnElement[bool] | str
    columns: Row = field(default_factory=dict)
    parameters: Callable[[Row], Parameters] = lambda _: {}
    tells: bool = True


@dataclass(frozen=True)
class Transition:
    """A guarded statement.

    Attributes:
        name: as in the protocol.
        statement: the SQL under test.
        status, columns: a row that fulfils the guard.
        parameters: the statement's values for that row.
        flips: its guard, predicate by predicate.
        writes: False for the reads that decide what is written next.
        names_rows: False for the sweeps, which take whatever is due.
        tells: what the statement itself writes to the timeline when it is refused.
        counts: whether it returns how many rows it took, instead of their ids.
    """

    name: str
    statement: TextClause
    status: str
    parameters: Callable[[Row], Parameters]
    flips: list[Flip]
    columns: Row = field(default_factory=dict)
    writes: bool = True
    names_rows: bool = True
    tells: str | None = None
    counts: bool = False


def statuses(guard: ColumnElement[bool] | str, *allowed: str) -> list[Flip]:
    """Return one flip for each status that the guard does not allow; its owner completed it."""
    besides: dict[str, dict[str, Any]] = {"completed": {"completed_by": WORKER}}
    return [
        Flip(f"status={status}", guard, {"status": status} | besides.get(status, {}))
        for status in STATES
        if status not in allowed
    ]


def without(statement: TextClause, guard: ColumnElement[bool] | str) -> TextClause:
    """Return the statement with a predicate taken out, wherever it stands."""
    pattern = guard if isinstance(guard, str) else re.escape(condition(guard))
    mutated, places = re.subn(pattern, "true", statement.text)
    assert places, f"no such predicate: {pattern}"
    return text(mutated)
