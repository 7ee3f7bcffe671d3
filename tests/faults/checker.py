"""The verdict over a history: a pure function. It asks no server and no process anything."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.faults import recovery
from tests.faults.history import History
from tests.faults.recovery import Recovery, Rerun
from tests.faults.safety import SAFETY, Finding

HELD_UP = "L6: left alone, although it might have gone on"


@dataclass
class Verdict:
    """What is wrong, by rule; every rule has an entry.

    Attributes:
        reruns: all runs after a job's first, explained or not.
        overlaps: those of them that began while the former still went on.
    """

    findings: dict[str, list[Finding]] = field(default_factory=dict)
    reruns: list[Rerun] = field(default_factory=list)
    overlaps: list[Rerun] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no rule found anything."""
        return not any(self.findings.values())

    @property
    def broken(self) -> list[str]:
        """The rules that found something."""
        return [rule for rule, found in self.findings.items() if found]

    def count(self, rule: str) -> int:
        """Return how much a rule found."""
        return len(self.findings[rule])


def check_safety(history: History) -> Verdict:
    """Apply the rules that need no fleet: those about rows, moves, effects and promises."""
    return Verdict({rule.name: list(rule.check(history)) for rule in SAFETY})


def check(history: History, *, heartbeat_interval: float) -> Verdict:
    """Apply every rule.

    Args:
        history: what happened.
        heartbeat_interval: the fleet's; two of them without a tick are a pause.
    """
    verdict = check_safety(history)
    judge = Recovery(history, heartbeat_interval=heartbeat_interval)
    for name, find in _rules(history, judge):
        verdict.findings[name] = list(find())
    verdict.reruns = judge.reruns()
    verdict.overlaps = judge.overlaps()
    return verdict


def _rules(history: History, judge: Recovery) -> Iterable[tuple[str, Callable[[], Iterator[Finding]]]]:
    return (
        ("false resets", judge.false_resets),
        ("unexplained duplicate runs", judge.unexplained),
        ("runs without a claim", judge.unclaimed),
        ("errors of innocent jobs", judge.innocent_errors),
        ("never ended", lambda: recovery.liveness(history)),
        (HELD_UP, lambda: recovery.held_up(history)),
        ("ended by itself", lambda: recovery.exits(history)),
        ("died by itself", lambda: recovery.deaths(history, judge.excuses)),
        ("never seen", lambda: recovery.sometimes(history)),
    )
