"""The servers of the test session, for the benchmarks."""

from pathlib import Path

import pytest

from benchmarks.servers import Servers
from tests.support.servers import TestServers


@pytest.fixture
def bench(servers: TestServers, tmp_path: Path) -> Servers:
    return Servers(servers.postgres, servers.nats, tmp_path)
