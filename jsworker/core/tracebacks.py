"""Finds the place in the user's own code where an error was raised, or where a thread or a task is."""

import asyncio
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, Final

_OURS: Final = f"{Path(__file__).parents[1]}{os.sep}"
_TRACEBACK: Final = "Traceback (most recent call last):"
_MOST_ERRORS: Final = 10_000
_MARGIN: Final = " |+-"
"""The characters that precede the lines of an exception group."""
_FRAME: Final = re.compile(rf'[{_MARGIN}]*File "(?P<file>[^"]*)", line (?P<line>\d+)(, in (?P<function>.*))?')
_LEADS_THERE: Final = re.compile(
    r"[/\\](jsworker[/\\]worker|anyio|asyncio|concurrent[/\\]futures)[/\\]|[/\\]threading\.py$"
)
"""Files through which a worker comes to a processor, wherever they are installed."""
_INSTALLED: Final = re.compile(r"[/\\]site-packages[/\\]|[/\\]lib[/\\]python3|^<")
_RESUMABLE: Final[Mapping[type, tuple[str, str]]] = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}
"""Suspended objects by type: the attributes that hold the frame and the awaited object. Other types are not
asked, because their attributes may run code."""


def type_name(error: BaseException) -> str:
    """Return the name of an error's type, also if its metaclass has another one or raises."""
    return str.__str__(type.__dict__["__name__"].__get__(type(error)))


def held_by(error: BaseException, name: str) -> Any:
    """Return an attribute as Python has set it, such as ``__cause__``, whatever its class makes of it."""
    return BaseException.__dict__[name].__get__(error)


def members_of(error: BaseException) -> Sequence[BaseException]:
    """Return the members of an error group as Python has set them; none of another error."""
    # Not isinstance: that reads ``__class__``, which an error may define.
    if issubclass(type(error), BaseExceptionGroup):
        members: Sequence[BaseException] = BaseExceptionGroup.__dict__["exceptions"].__get__(error)
        return members
    return ()


def raised_at(error: BaseException) -> str:
    """Return file and line where an error was raised, in the user's own code if it passed any, else empty."""
    if issubclass(type(error), SyntaxError):
        file, line = (SyntaxError.__dict__[name].__get__(error) for name in ("filename", "lineno"))
        return f"{file}, line {line}"
    frames = traceback.walk_tb(held_by(error, "__traceback__"))
    return _last_own((frame.f_code.co_filename, line) for frame, line in frames)


def message_of(error: BaseException) -> str:
    """Return the text of an error as ``str()`` gives it, also if the error's own code raises in doing so."""
    try:
        shown = error if _has_too_many(error) else traceback.TracebackException(type(error), error, None)
        # It may be of a subclass of str, whose methods are the user's, too.
        return str.__str__(str(shown))
    except BaseException as fault:  # noqa: BLE001 -- __str__, __getattr__ and the like are the user's
        return unshown(fault)


def unshown(fault: BaseException) -> str:
    """Return what is shown in place of something whose own code raised ``fault`` when it was to be shown."""
    return f"it cannot be shown: showing it raised {type_name(fault)}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, as Python prints it; else its own alone."""
    if _has_too_many(error):
        return f"{_TRACEBACK}\n{frames_of(error)}{type_name(error)}: {message_of(error)}\n"
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 -- as above
        return f"{_TRACEBACK}\n{frames_of(error)}{type_name(error)}: {message_of(error)}\n"


def _has_too_many(error: BaseException) -> bool:
    """Return whether an error has too many members and causes for Python's traceback.

    That looks at a member as often as groups hold it: of groups in groups, for ever.
    """
    left, seen, found = [error], {id(error)}, 0
    while left and found < _MOST_ERRORS:
        each = left.pop()
        found += 1
        left += members_of(each)
        for cause in (held_by(each, "__cause__"), held_by(each, "__context__")):
            if cause is not None and id(cause) not in seen:
                seen.add(id(cause))
                left.append(cause)
    return bool(left)


def frames_of(error: BaseException) -> str:
    """Return the lines of a traceback that are about frames, for an error without its causes."""
    try:
        return "".join(traceback.format_tb(held_by(error, "__traceback__")))
    except BaseException as fault:  # noqa: BLE001 -- lines are asked of the modules' loaders
        return f"  {unshown(fault)}\n"


def innermost(frames: Iterable[FrameType]) -> str:
    """Return file and line of a stack's last call in the user's own code, or of its last call if none is."""
    return _last_own((frame.f_code.co_filename, frame.f_lineno) for frame in frames)


def _last_own(places: Iterable[tuple[str, int | None]]) -> str:
    known = [place for place in places if not place[0].startswith("<frozen ")]
    own = [place for place in known if not (is_ours(place[0]) or _INSTALLED.search(place[0]))]
    return next((f"{file}, line {line}" for file, line in reversed(own or known)), "")


def frames_of_thread(thread: int) -> list[FrameType]:
    """Return the frames of a thread, the outermost call first; none for one that has ended."""
    frame = sys._current_frames().get(thread)  # noqa: SLF001 -- the documented way to another thread's stack
    return [] if frame is None else frames_to(frame)


def frames_to(frame: FrameType) -> list[FrameType]:
    """Return the frames that lead to a frame, and the frame itself, the outermost call first."""
    return [each for each, _ in traceback.walk_stack(frame)][::-1]


def frames_of_task(task: asyncio.Task[Any]) -> tuple[list[FrameType], str]:
    """Return the frames of a task, outermost coroutine first, and the type of what the innermost awaits."""
    frames: list[FrameType] = []
    seen: set[int] = set()
    awaited: object = task.get_coro()
    waits_for = ""
    while awaited is not None and id(awaited) not in seen:
        seen.add(id(awaited))
        if (names := _RESUMABLE.get(type(awaited))) is not None:
            frame = getattr(awaited, names[0])
            frames += [] if frame is None else [frame]
            awaited = getattr(awaited, names[1])
        else:
            waits_for = type(awaited).__qualname__.replace("FutureIter", "Future")
            awaited = _behind(awaited)
    return frames, waits_for


def _behind(awaited: object) -> object:
    """Return the coroutine or generator that is awaited through an object with no attribute for it."""
    for held in gc.get_referents(awaited):
        if issubclass(type(held), asyncio.Task):
            return held.get_coro()
        if type(held) in _RESUMABLE:
            return held
    return None


def from_users_code(trace: str) -> str:
    """Return the text of a traceback without the frames that lead from jsworker's code to the user's."""
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


def last_place(trace: str) -> str:
    """Return file, line and function of the last frame in the user's own code, empty if there is none."""
    frames = [frame for line in trace.splitlines() if (frame := _FRAME.match(line))]
    installed = (_INSTALLED, _LEADS_THERE)
    own = [frame for frame in frames if not any(pattern.search(frame["file"]) for pattern in installed)]
    return f"{own[-1]['file']}, line {own[-1]['line']}, in {own[-1]['function']}" if own else ""
