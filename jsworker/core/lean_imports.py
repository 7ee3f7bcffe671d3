"""Imports a library without the dependencies that only its unused parts need."""

import importlib
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any, cast

_modules = cast("dict[str, Any]", sys.modules)


def import_without(unwanted: Collection[str], module: str) -> ModuleType:
    """Import a module that works without the ``unwanted`` ones; other code may import those later.

    For the first lines of a process: if a thread imports an unwanted module meanwhile, its import fails.
    """
    missing = set(unwanted) - _modules.keys()
    # None is the documented way to make an import fail.
    _modules.update(dict.fromkeys(missing))
    try:
        return importlib.import_module(module)
    finally:
        for name in missing:
            del _modules[name]
