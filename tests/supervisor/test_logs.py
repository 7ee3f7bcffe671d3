"""What a processor logs names its job, wherever it runs."""

import pytest

from jsworker.client import JobClient
from tests.supervisor.conftest import Supervise

FACTS = ("job_id", "kind", "fencing_token", "attempt", "worker_id")


@pytest.mark.parametrize("where", ["on the loop", "in a thread", "in quarantine"])
async def test_lines_of_a_processor_name_its_job(supervise: Supervise, client: JobClient, where: str) -> None:
    parent = supervise("Speaks", "SpeaksInThread")
    [pid] = await parent.ready()
    kind = "speaks-in-thread" if where == "in a thread" else "speaks"
    job = await client.enqueue(kind, {}, max_stalls=1 if where == "in quarantine" else None)
    [by_logging], [by_structlog] = [
        await parent.tells(event) for event in ("said by logging", "said by structlog")
    ]
    [started] = parent.lines("child.started")
    for line in (by_logging, by_structlog):
        told = [line[name] for name in FACTS]
        assert told == [str(job.id), kind, 1, 1, started["worker_id"]]
    assert (by_structlog["pid"] == pid) == (where != "in quarantine")
