"""Where a processor comes from, so that another process can make the same one."""

import importlib
import inspect
import sys
from typing import Any

from jsworker.core.processor import JobProcessor


def origin_of(given: JobProcessor[Any] | type[JobProcessor[Any]]) -> str | None:
    """Return ``MODULE:NAME`` of what makes this processor again, None when nothing surely does.

    A class is made without arguments, as it was here. An instance must be an attribute of its class's module,
    or of a class that takes no arguments: with others it might differ from what its class makes by default.
    """
    cls = given if isinstance(given, type) else type(given)
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__":
        return None
    if isinstance(given, JobProcessor):
        for name, value in vars(module).items():
            if value is given:
                return f"{cls.__module__}:{name}"
        if inspect.signature(cls).parameters:
            return None
    return f"{cls.__module__}:{cls.__qualname__}" if _resolves(cls, module) else None


def processor_at(origin: str) -> JobProcessor[Any]:
    """Make the processor of an origin in this process.

    Raises:
        Exception: what importing its module or making it raises.
    """
    module, _, names = origin.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    processor: JobProcessor[Any] = found() if isinstance(found, type) else found
    return processor


def _resolves(cls: type[Any], module: object) -> bool:
    found: object = module
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls
