"""Imports structlog without rich and greenlet: six megabytes of every supervisor, for what it never does.

rich would show tracebacks, greenlet keep apart the contexts of greenlets: structlog does without either where
it is not installed.
"""

import importlib
import sys
from typing import Any, cast

_modules = cast("dict[str, Any]", sys.modules)
_unwanted = {"rich", "greenlet"} - _modules.keys()
# None is the documented way to make an import fail.
_modules.update(dict.fromkeys(_unwanted))
importlib.import_module("structlog")
for _name in _unwanted:
    del _modules[_name]
