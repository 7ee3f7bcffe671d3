"""Fixtures of other rooms that these tests need."""

from tests.supervisor.conftest import supervise

__all__ = ["supervise"]
