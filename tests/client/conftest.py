"""The client's tests share what the runtime's tests have."""

from tests.worker.conftest import js, patient, rows, start

__all__ = ["js", "patient", "rows", "start"]
