"""Fixtures of other rooms that these tests need."""

from tests.supervisor.conftest import sql, supervise

__all__ = ["sql", "supervise"]
