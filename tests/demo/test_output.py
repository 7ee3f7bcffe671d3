"""What the demo says, also when a signal interrupts it in mid-sentence."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import rich.console

from jsworker.demo.output import Output

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

    def hits(self, output: Output) -> bool:
        """Let the demo speak, and tell whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            output.tell_beginning([], Path("data"))
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def test_a_complaint_is_heard_wherever_the_beginning_was_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unheard = []
    for moment in range(1, MOST_MOMENTS):
        output = Output(json_output=True)
        if not Interruption(moment).hits(output):
            break
        output.complain("interrupted")
        if capsys.readouterr().err.splitlines()[-1:] != ["interrupted"]:
            unheard.append(moment)

    assert moment > 1
    assert unheard == []
