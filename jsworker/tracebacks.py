"""Where in the user's own code an error came up."""

import os
import sysconfig
import traceback
from pathlib import Path
from typing import Final

_OURS: Final = f"{Path(__file__).parent}{os.sep}"
_INSTALLED: Final = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def raised_at(error: BaseException) -> str:
    """Return file and line where an error was raised, in the user's own code if it passed any, else empty."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
    ]
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    for frame in reversed(own or frames):
        return f"{frame.filename}, line {frame.lineno}"
    return ""


def is_ours(path: str) -> bool:
    """Tell whether a file belongs to jsworker."""
    return path.startswith(_OURS)


def _is_installed(path: str) -> bool:
    """Tell whether a file belongs to Python, to an installed package or to jsworker."""
    return path.startswith((_OURS, *_INSTALLED))
