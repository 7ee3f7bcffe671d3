"""A test case for ``unittest``, with the same servers, databases and client as the fixtures of pytest."""

import unittest
from functools import cached_property

from jsworker.client.job_client import JobClient
from jsworker.client.sync_client import SyncJobClient
from jsworker.core.settings import Settings
from jsworker.testing.shared_servers import servers_of_process


class JsworkerTestCase(unittest.IsolatedAsyncioTestCase):
    """Each test has a database and a stream of its own; the servers live as long as the process.

    Test methods may be coroutines, which use the functions of ``jsworker.testing``, or plain methods, which
    use those of ``jsworker.testing.sync``. In your own ``setUp`` or ``asyncSetUp`` call this class's first.

    Attributes:
        settings: of the test's database and stream; the environment holds them too during the test.
        job_client: an open client, for coroutines.
    """

    settings: Settings
    job_client: JobClient

    def setUp(self) -> None:
        """Make the test's database."""
        super().setUp()
        self.settings = self.enterContext(servers_of_process().test_settings())

    @cached_property
    def sync_job_client(self) -> SyncJobClient:
        """An open client for plain methods, made at its first use."""
        return self.enterContext(SyncJobClient(self.settings))

    async def asyncSetUp(self) -> None:
        """Open the client."""
        await super().asyncSetUp()
        self.job_client = await self.enterAsyncContext(JobClient(self.settings))
