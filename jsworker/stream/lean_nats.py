"""Imports nats-py without aiohttp, which it needs only for websockets.

aiohttp would take ten megabytes of memory and a sixth of a worker's start. jsworker uses no websockets; a job
that uses them with nats-py still gets aiohttp, which is then imported.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from jsworker.core.lean_imports import import_without

_ONLY_FOR_WEBSOCKETS = {"aiohttp", "multidict"}


class _Later:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # read by code that inspects any object
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


_transport = import_without(_ONLY_FOR_WEBSOCKETS, "nats.aio.transport")
for _name in _ONLY_FOR_WEBSOCKETS:
    if getattr(_transport, _name, None) is None and (_name in sys.modules or find_spec(_name) is not None):
        setattr(_transport, _name, _Later(_name))
