"""Servers of this package: the cluster is the tests' common one, a pair belongs to its test."""

import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from jsworker.embedded import EmbeddedNats
from tests.scale_out.nats_cluster import Cluster, clustered
from tests.support.servers import new_servers_folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with clustered() as running:
        yield running


@pytest.fixture(scope="module")
def nats_url() -> Iterator[str]:
    folder = new_servers_folder()
    with EmbeddedNats(folder / "nats") as nats:
        yield nats.url
    shutil.rmtree(folder)
