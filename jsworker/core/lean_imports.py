"""Imports a library without others that it needs only for what jsworker does not use."""

import importlib
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any, cast

_modules = cast("dict[str, Any]", sys.modules)


def import_without(unwanted: Collection[str], module: str) -> ModuleType:
    """Import a module that survives the lack of the ``unwanted`` ones; others may import them later.

    For the first lines of a process: a thread that imports one of them meanwhile fails.
    """
    missing = set(unwanted) - _modules.keys()
    # None is the documented way to make an import fail.
    _modules.update(dict.fromkeys(missing))
    try:
        return importlib.import_module(module)
    finally:
        for name in missing:
            del _modules[name]
