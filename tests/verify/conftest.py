"""Fixtures of other rooms that these checks need."""

from tests.supervisor.conftest import supervise

__all__ = ["supervise"]
