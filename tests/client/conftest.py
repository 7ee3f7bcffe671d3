"""The client's tests share what the runtime's tests have."""

from tests.worker.conftest import js, rows, start

__all__ = ["js", "rows", "start"]
