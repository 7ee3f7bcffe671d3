"""The rules that hold between durations; each fault is one line with the numbers."""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from jsworker.core.settings.variables import LONGEST_SECONDS, as_given, variable_of

_TIMING: tuple[tuple[str, str, tuple[tuple[int, str], ...]], ...] = (
    ("stale_threshold", "must be at least", ((3, "heartbeat_interval"),)),
    ("crash_threshold", "must be at least", ((3, "heartbeat_interval"),)),
    ("stale_threshold", "must exceed", ((1, "crash_threshold"),)),
    ("heartbeat_interval", "must exceed", ((1, "statement_timeout"),)),
    ("ack_wait", "must exceed", ((1, "stale_threshold"), (2, "scan_interval"))),
    ("stale_threshold", "must exceed", ((1, "watchdog_timeout"),)),
    ("stale_threshold", "must be at least", ((2, "scan_interval"),)),
    ("grace_period", "must exceed", ((1, "shutdown_timeout"), (2, "statement_timeout"))),
    ("retention", "must exceed", ((2, "ack_wait"),)),
)


def durations(settings: object, unsound: frozenset[str] = frozenset()) -> dict[str, float]:
    """Return the durations that take part in rules and are set."""
    names = {name for left, _, right in _TIMING for name in (left, *(term for _, term in right))}
    found = {name: getattr(settings, name) for name in names - unsound}
    return {name: value for name, value in found.items() if value is not None}


def timing_faults(values: Mapping[str, float], kind: str | None = None) -> Iterator[str]:
    """Yield a line for each rule broken; a kind's own stale threshold is asked only about its own rules."""
    for left, relation, right in _TIMING:
        names = {left, *(name for _, name in right)}
        if not names <= values.keys() or (kind and "stale_threshold" not in names):
            continue
        value = _exact(values[left])
        bound = sum((factor * _exact(values[name]) for factor, name in right), Decimal())
        if not (value > bound or (value == bound and relation == "must be at least")):
            terms = [
                (f"{factor} × " if factor > 1 else "") + _term(name, values, kind) for factor, name in right
            ]
            yield f"{_term(left, values, kind)} {relation} {' + '.join(terms)}"


def kind_faults(kind: str, threshold: Any, values: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each rule that a kind's own stale threshold breaks."""
    number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if number and 0 < threshold <= LONGEST_SECONDS:
        yield from timing_faults({**values, "stale_threshold": threshold}, kind)
    else:
        rule = f"must be a number of seconds greater than 0 and at most {LONGEST_SECONDS}"
        yield f"stale_threshold={as_given(threshold)} of kind {kind} {rule}"


def _term(name: str, values: Mapping[str, float], kind: str | None) -> str:
    if kind and name == "stale_threshold":
        return f"stale_threshold={_number(values[name])} of kind {kind}"
    return f"{variable_of(name)}={_number(values[name])}"


def _exact(value: float) -> Decimal:
    """Return the number that was written: as floats 3 × 0.1 exceeds 0.3."""
    return Decimal(repr(value))


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)
