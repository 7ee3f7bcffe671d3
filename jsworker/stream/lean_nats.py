"""Imports nats-py without aiohttp, which only its websockets need.

It takes ten megabytes of a worker and a sixth of its start. jsworker connects over none; a job that does so
with nats-py finds aiohttp all the same.
"""

import importlib
import sys
from importlib.util import find_spec
from typing import Any

from jsworker.core.lean_imports import import_without

_ONLY_FOR_WEBSOCKETS = {"aiohttp", "multidict"}


class _Later:
    """A module that is imported when something of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # asked for by those who look at any object
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


_transport = import_without(_ONLY_FOR_WEBSOCKETS, "nats.aio.transport")
for _name in _ONLY_FOR_WEBSOCKETS:
    if getattr(_transport, _name, None) is None and (_name in sys.modules or find_spec(_name) is not None):
        setattr(_transport, _name, _Later(_name))
