"""Imports structlog without rich and greenlet, which it does not need: six megabytes of every supervisor."""

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
