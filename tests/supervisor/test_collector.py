"""The garbage collector of a worker process."""

import gc

import pytest

from jsworker import JobClient
from tests.ownership.rows import Sql
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_deaths import ends_completed

pytestmark = pytest.mark.hurried


async def test_a_worker_process_collects_after_many_objects_and_every_second(
    supervise: Supervise, client: JobClient, sql: Sql
) -> None:
    parent = supervise("Collects", "CollectsApart")
    await parent.ready()
    ids = [(await client.enqueue(kind, {})).id for kind in ("collects", "collects-apart")]
    results = [(await ends_completed(sql, job_id))["result"] for job_id in ids]
    assert results == [[10_000, True], gc.get_threshold()[0]]
