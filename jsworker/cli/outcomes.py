"""What became of each job or message that a command acted on."""

from dataclasses import dataclass
from types import TracebackType
from typing import Self
from uuid import UUID

from jsworker.cli.failures import DONE, FAILED
from jsworker.cli.output import print_json, print_line
from jsworker.cli.remarks import tell

REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one.

    Attributes:
        outcome: where it went, in one word; ``refused`` when nothing happened.
        refusal: why nothing happened.
        has_changed: whether that is because it is not any more what a filter found.
    """

    id: UUID | int
    outcome: str
    refusal: str | None = None
    has_changed: bool = False


def refused(subject: UUID | int, why: str) -> Outcome:
    """Return the outcome of something that was left as it was."""
    return Outcome(subject, REFUSED, why)


def changed(subject: UUID | int, why: str) -> Outcome:
    """Return the outcome of something that was left as it was, for a filter does not mean it any more."""
    return Outcome(subject, REFUSED, why, has_changed=True)


class OutcomeReport:
    """Writes outcomes: line by line as they come, or as one JSON array at the end.

    Used as a context manager: what was done before an error is reported all the same.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._outcomes: list[Outcome] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._as_json:
            print_json([{"id": each.id, "outcome": each.outcome} for each in self._outcomes])
        left = sum(each.has_changed for each in self._outcomes)
        if left == 1:
            tell("1 job was left out: it had changed since it was found")
        elif left:
            tell(f"{left} jobs were left out: they had changed since they were found")

    def add(self, outcome: Outcome) -> None:
        """Take one outcome; a refusal is told on stderr."""
        self._outcomes.append(outcome)
        if outcome.refusal is not None:
            tell(outcome.refusal)
        elif not self._as_json:
            print_line(f"{outcome.id} {outcome.outcome}")

    @property
    def exit_code(self) -> int:
        """1 when anything was refused."""
        return FAILED if any(each.outcome == REFUSED for each in self._outcomes) else DONE
