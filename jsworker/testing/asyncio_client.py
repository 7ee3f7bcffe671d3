"""The client's fixture for pytest-asyncio, registered where that plugin is active."""

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import pytest_asyncio

if TYPE_CHECKING:
    from jsworker import JobClient, Settings


@pytest_asyncio.fixture(name="_jsworker_asyncio_client")
async def _asyncio_client(jsworker_settings: "Settings") -> "AsyncIterator[JobClient]":
    from jsworker import JobClient  # noqa: PLC0415 -- every pytest loads this module

    async with JobClient(jsworker_settings) as client:
        yield client
