"""The client's fixtures for pytest-asyncio, registered where that plugin is active."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, Literal

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from jsworker import JobClient, Settings

Scope = Literal["function", "class", "module", "package", "session"]

_NAME: Final = "_jsworker_client_in_{}_loop"


def client_of_test(test: pytest.Item) -> str:
    """Return the name of the fixture whose client is open in the event loop that runs the test."""
    marker = test.get_closest_marker("asyncio")
    given: dict[str, Any] = {} if marker is None else dict(marker.kwargs)
    scope: Scope = (
        given.get("loop_scope")
        or given.get("scope")  # its earlier name, which pytest-asyncio still accepts
        or test.config.getini("asyncio_default_test_loop_scope")
    )
    return _NAME.format(scope)


def _client_in(scope: Scope) -> Any:
    @pytest_asyncio.fixture(name=_NAME.format(scope), loop_scope=scope)
    async def client(jsworker_settings: "Settings") -> "AsyncIterator[JobClient]":
        from jsworker import JobClient  # noqa: PLC0415 -- every pytest loads this module

        async with JobClient(jsworker_settings) as client:
            yield client

    return client


_in_function_loop = _client_in("function")
_in_class_loop = _client_in("class")
_in_module_loop = _client_in("module")
_in_package_loop = _client_in("package")
_in_session_loop = _client_in("session")
