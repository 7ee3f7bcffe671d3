"""Loaded as ``sitecustomize``: takes from a Python process what only Linux has."""

import ctypes
import os
import pathlib
import signal
import time
from typing import Any

ONLY_LINUX = (
    (os, "memfd_create"),
    (os, "pidfd_open"),
    (os, "waitid"),
    (signal, "pidfd_send_signal"),
    (time, "CLOCK_BOOTTIME"),
)


class _Library(ctypes.CDLL):
    def __getattr__(self, name: str) -> Any:
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)


def _is_proc(path: pathlib.Path) -> bool:
    return path.parts[:2] == ("/", "proc")


def _refusing_proc(method: Any) -> Any:
    def call(path: pathlib.Path, *arguments: Any, **options: Any) -> Any:
        if _is_proc(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return method(path, *arguments, **options)

    return call


def take_away() -> None:
    for module, name in ONLY_LINUX:
        if hasattr(module, name):
            delattr(module, name)
    ctypes.CDLL = _Library  # type: ignore[misc] # what it is about
    for method in ("open", "read_text", "readlink"):
        setattr(pathlib.Path, method, _refusing_proc(getattr(pathlib.Path, method)))
    exists = pathlib.Path.exists
    pathlib.Path.exists = lambda self: not _is_proc(self) and exists(self)  # type: ignore[method-assign]


if __name__ == "sitecustomize":
    take_away()
