"""Imports structlog without rich and greenlet, which it does not need: six megabytes of every supervisor."""

from jsworker.core.lean_imports import import_without

import_without({"rich", "greenlet"}, "structlog")
