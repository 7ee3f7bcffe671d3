"""Signals that a child leaves to its parent, without programs that its jobs start inheriting that."""

import os
import signal
from collections.abc import Iterable
from types import FrameType


def leave_to_parent(numbers: Iterable[signal.Signals]) -> None:
    """Do nothing at these signals. Processes that jobs start or fork get the usual dispositions back."""
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Not SIG_IGN, which programs that jobs start would inherit.
            signal.signal(number, _do_nothing)
    os.register_at_fork(after_in_child=_have_usual_signals)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


def _have_usual_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is _do_nothing:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
