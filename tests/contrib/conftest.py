"""The tests of frameworks share what the runtime's tests have."""

from tests.worker.conftest import rows, start

__all__ = ["rows", "start"]
