"""Where in the user's own code an error came up, or a thread or a task is."""

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio

_OURS: Final = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED: Final = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_MARGIN: Final = " |+-"
"""What stands before the lines of an exception group."""
_FRAME: Final = re.compile(rf'[{_MARGIN}]*File "(?P<file>[^"]*)", line (?P<line>\d+)(, in (?P<function>.*))?')
_LEADS_THERE: Final = re.compile(
    r"[/\\](jsworker[/\\]worker|anyio|asyncio|concurrent[/\\]futures)[/\\]|[/\\]threading\.py$"
)
"""Files through which a worker comes to a processor, wherever they are installed."""
_INSTALLED_ANYWHERE: Final = re.compile(
    rf"{_LEADS_THERE.pattern}|[/\\]site-packages[/\\]|[/\\]lib[/\\]python3|^<"
)


def raised_at(error: BaseException) -> str:
    """Return file and line where an error was raised, in the user's own code if it passed any, else empty."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    return innermost(_summary(traceback.walk_tb(error.__traceback__)))


def innermost(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return file and line of a stack's last call in the user's own code, if any is there, else of all."""
    frames = [frame for frame in stack if not frame.filename.startswith("<frozen ")]
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    for frame in reversed(own or frames):
        return f"{frame.filename}, line {frame.lineno}"
    return ""


def stack_of_thread(thread: int) -> traceback.StackSummary:
    """Return where a thread is, the outermost call first; nothing for one that has ended."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 -- the only way to another thread's stack
    return traceback.StackSummary() if frame is None else _summary(reversed([*traceback.walk_stack(frame)]))


def stack_of_task(task: "asyncio.Task[Any]") -> traceback.StackSummary:
    """Return where a task waits, the outermost coroutine first; one that runs is found in its thread."""
    frames: list[tuple[FrameType, int]] = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    return _summary(frames)


def _summary(frames: Iterable[tuple[FrameType, int]]) -> traceback.StackSummary:
    # Without the source's lines, which would be read from disk.
    return traceback.StackSummary.extract(iter(frames), lookup_lines=False)


def from_users_code(trace: str) -> str:
    """Return the text of a traceback without the frames that lead from our code to the user's."""
    return "\n".join(_shortened(trace.splitlines()))


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    depth: int | None = None  # of the traceback in which we are
    left_out: list[str] = []
    leads = False
    for line in lines:
        if depth is not None and _depth(line) <= depth:
            if leads:  # it never left our code
                yield from left_out
            depth, leads = None, False
        if line.endswith(_TRACEBACK):
            depth, leads, left_out = _depth(line), True, []
            yield line
            continue
        if leads and (frame := _FRAME.match(line)) and not _LEADS_THERE.search(frame["file"]):
            leads = False
        if leads:
            left_out.append(line)
        else:
            yield line
    if leads:
        yield from left_out


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(_MARGIN))


def is_ours(path: str) -> bool:
    """Return whether a file belongs to jsworker."""
    return path.startswith(_OURS)


def _is_installed(path: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to jsworker."""
    return path.startswith((_OURS, *_INSTALLED))


def last_place(trace: str) -> str:
    """Return file, line and function of the last frame in the user's own code, empty if there is none."""
    frames = [frame for line in trace.splitlines() if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not _INSTALLED_ANYWHERE.search(frame["file"])]
    return f"{own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['function']}" if own else ""
