"""Where the test runner of a framework gives its settings to tests that use no database of jsworker's own."""

from collections.abc import Callable
from typing import Final

from jsworker.core.settings import Settings

of_runner: Final[list[Callable[[], Settings | None]]] = []
"""At most one function; it returns None while the runner has made no database."""
