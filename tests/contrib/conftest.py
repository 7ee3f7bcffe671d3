"""The tests of frameworks share what the runtime's tests have."""

from tests.worker.conftest import pace, rows, start

__all__ = ["pace", "rows", "start"]
