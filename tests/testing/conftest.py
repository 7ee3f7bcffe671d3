"""The kit's fixtures on the servers of these tests: its own embedded ones are started in test_plugin.py."""

from collections.abc import Iterator

import pytest

from jsworker.testing.shared_servers import RunningServers
from tests.support.servers import TestServers


@pytest.fixture(scope="session")
def jsworker_servers(servers: TestServers) -> Iterator[RunningServers]:
    running = RunningServers(servers.postgres.url, servers.nats.url, are_given=False)
    yield running
    running.close()
