"""Targets ``MODULE:CLASS``: processors of the user's own code, by way of the working directory."""

import importlib
import inspect
import re
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

from jsworker.core.errors import InvalidTarget
from jsworker.core.names import printable, shown
from jsworker.core.processor import JobProcessor
from jsworker.core.tracebacks import raised_at

_TARGET = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<names>[^\W\d]\w*(\.[^\W\d]\w*)*)")
_LONGEST_CAUSE = 500


def load_processor(target: str) -> JobProcessor[Any] | type[JobProcessor[Any]]:
    """Return the processor of a target, or its class, which the worker makes and so can make again.

    Raises InvalidTarget when it cannot be imported, or is no processor that can be used.
    """
    found = _load(target)
    if isinstance(found, type) and inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise InvalidTarget(f"target {target} is abstract: it must define {missing}")
    return found


def load_processor_class(target: str) -> type[JobProcessor[Any]]:
    """Return the class of a target."""
    found = _load(target)
    return found if isinstance(found, type) else type(found)


def load_object(target: str) -> Any:
    """Return what is at ``MODULE:NAME``; InvalidTarget: it cannot be imported."""
    parts = _TARGET.fullmatch(target)
    if parts is None:
        advice = "; write the module without .py" if ".py:" in target else ""
        raise InvalidTarget(
            f"target {shown(target)} must read MODULE:CLASS, for example my_jobs:AnalyzeRepo{advice}"
        )
    found: Any = _import(target, parts["module"])
    for name in parts["names"].split("."):
        if not hasattr(found, name):
            owner = "module" if isinstance(found, ModuleType) else "class"
            raise InvalidTarget(f"target {target}: {owner} {found.__name__} has no {name}")
        found = getattr(found, name)
    return found


def _load(target: str) -> JobProcessor[Any] | type[JobProcessor[Any]]:
    found = load_object(target)
    if isinstance(found, JobProcessor) or (isinstance(found, type) and issubclass(found, JobProcessor)):
        return found
    what = "another class" if isinstance(found, type) else f"of type {type(found).__name__}"
    raise InvalidTarget(f"target {target} is no JobProcessor: it is {what}")


def _import(target: str, name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # stdout is for what the command itself says
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise InvalidTarget(
                f"target {target}: there is no module {error.name} in {here} or on the Python path"
            ) from error
        fault: BaseException = error
    except (Exception, SystemExit) as error:  # noqa: BLE001 -- the user's code; raised below as another
        fault = error
    cause = printable(traceback.format_exception_only(fault)[-1].strip(), _LONGEST_CAUSE)
    place = f" ({found})" if (found := raised_at(fault)) else ""
    raise InvalidTarget(f"target {target}: module {name} cannot be imported: {cause}{place}") from fault
