"""Where in the user's own code an error came up."""

import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_OURS: Final = f"{Path(__file__).parent}{os.sep}"
_INSTALLED: Final = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_TRACEBACK: Final = "Traceback (most recent call last):"
_MARGIN: Final = " |+-"
"""What stands before the lines of an exception group."""
_FRAME: Final = re.compile(rf'[{_MARGIN}]*File "(?P<file>[^"]*)", line (?P<line>\d+)(, in (?P<function>.*))?')
_LEADS_THERE: Final = re.compile(
    r"[/\\](jsworker[/\\]runtime|anyio|asyncio|concurrent[/\\]futures)[/\\]|[/\\]threading\.py$"
)
"""Files through which a worker comes to a processor, wherever they are installed."""
_INSTALLED_ANYWHERE: Final = re.compile(
    rf"{_LEADS_THERE.pattern}|[/\\]site-packages[/\\]|[/\\]lib[/\\]python3|^<"
)


def raised_at(error: BaseException) -> str:
    """Return file and line where an error was raised, in the user's own code if it passed any, else empty."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    walked = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code.co_filename, line) for frame, line in walked]
    frames = [frame for frame in frames if not frame[0].startswith("<frozen ")]
    own = [frame for frame in frames if not _is_installed(frame[0])]
    for file, line in reversed(own or frames):
        return f"{file}, line {line}"
    return ""


def from_users_code(trace: str) -> str:
    """Return the text of a traceback without the frames that lead from our code to the user's."""
    return "\n".join(_shortened(trace.splitlines()))


def _shortened(lines: Sequence[str]) -> Iterator[str]:
    depth: int | None = None  # of the traceback in which we are
    left_out: list[str] = []
    leads = False
    for line in lines:
        if depth is not None and _depth(line) <= depth:
            if leads:  # it never came to anybody else's code
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


def _is_installed(path: str) -> bool:
    """Tell whether a file belongs to Python, to an installed package or to jsworker."""
    return path.startswith((_OURS, *_INSTALLED))


def last_place(trace: str) -> str:
    """Return file, line and function of the last frame in the user's own code, empty if there is none."""
    frames = [frame for line in trace.splitlines() if (frame := _FRAME.match(line))]
    own = [frame for frame in frames if not _INSTALLED_ANYWHERE.search(frame["file"])]
    return f"{own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['function']}" if own else ""
