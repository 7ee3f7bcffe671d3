"""One database for all examples of a test, with its own event loop."""

from collections.abc import Iterator
from secrets import token_hex

import pytest

from tests.support.servers import TEMPLATE, TestServers, copy_database

from .world import World


@pytest.fixture(scope="module")
def world(servers: TestServers) -> Iterator[World]:
    name = f"state_machine_{token_hex(4)}"
    with World(copy_database(servers.postgres, name, TEMPLATE), servers.nats.url) as opened:
        yield opened
