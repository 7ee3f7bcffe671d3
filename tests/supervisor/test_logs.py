"""What a processor logs names its job, wherever it runs."""

import pytest

from jsworker import JobClient
from tests.supervisor.conftest import Supervise

pytestmark = pytest.mark.hurried

FACTS = ("job_id", "kind", "fencing_token", "attempt", "worker_id")


async def test_lines_of_a_processor_name_its_job(supervise: Supervise, client: JobClient) -> None:
    """On the event loop, in a thread, and in a process of its own."""
    parent = supervise("Speaks", "SpeaksInThread")
    [pid] = await parent.ready()
    [started] = parent.lines("child.started")
    jobs = [("speaks", None), ("speaks-in-thread", None), ("speaks", 1)]
    for place, (kind, max_stalls) in enumerate(jobs):
        job = await client.enqueue(kind, {}, max_stalls=max_stalls)
        by_logging, by_structlog = [
            (await parent.tells(event, place + 1))[place]
            for event in ("said by logging", "said by structlog")
        ]
        for line in (by_logging, by_structlog):
            told = [line[name] for name in FACTS]
            assert told == [str(job.id), kind, 1, 1, started["worker_id"]]
        assert (by_structlog["pid"] == pid) == (max_stalls is None)
