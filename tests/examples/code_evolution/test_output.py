"""What the demo prints, also when a signal interrupts it in the middle of a line."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import rich.console

from code_evolution.report import complain, print_beginning

MOST_MOMENTS = 100_000


class Interruption:
    """Ctrl-C at the n-th line that rich's console executes."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002 -- a tracer's shape
        if frame.f_code.co_filename != rich.console.__file__:
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt
        return self

    def hits(self) -> bool:
        """Let the demo print, and return whether it was interrupted."""
        console = rich.console.Console(stderr=True)
        before = sys.gettrace()
        sys.settrace(self)
        try:
            print_beginning(console, [], Path("data"))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def test_a_complaint_is_seen_wherever_the_beginning_was_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unseen = []
    for moment in range(1, MOST_MOMENTS):
        if not Interruption(moment).hits():
            break
        complain("interrupted")
        if capsys.readouterr().err.splitlines()[-1:] != ["interrupted"]:
            unseen.append(moment)

    assert moment > 1
    assert unseen == []
