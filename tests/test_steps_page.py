"""docs/steps.md: its jobs do what it says, its commands work."""

from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker import JobClient, Worker
from jsworker.core.settings import Settings
from tests.conftest import UNHURRIED
from tests.support.documents import Page, run_line
from tests.support.polling import eventually

PAGE = Page("docs/steps.md")
JOB = "01a20f3e-1cf9-7742-a45f-1455c6717983"


@pytest.fixture
def names() -> dict[str, Any]:
    """What the code of the page defines."""
    return PAGE.names()


async def test_its_jobs_do_what_it_shows(settings: Settings, names: dict[str, Any]) -> None:
    kinds = [names[name] for name in ("SendOrder", "SendOrderPlainly", "Import")]
    own = settings.model_copy(update=UNHURRIED)
    async with JobClient(own) as client, Worker(kinds, own):
        jobs = [await client.enqueue(kind, {"order": "A-7"}) for kind in kinds]

        async def done() -> list[Any]:
            rows = [await client.get(job.id) for job in jobs]
            assert [row.status for row in rows] == ["completed"] * 3, [row.last_error for row in rows]
            return [row.result for row in rows]

        receipt = {"order": "A-7", "cents": 500}
        label = "label of A-7"
        assert await eventually(done, seconds=60) == [{"receipt": receipt, "label": label}, label, "imported"]
        kept = [(step.name, step.result) for step in await client.steps(jobs[0].id)]
        assert kept == [("charge", receipt), ("label", label), ("cool-off", None)]


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    with psycopg.connect(settings.database_dsn(), autocommit=True) as connection:
        connection.execute(
            "INSERT INTO jsworker.jobs (id, kind, payload, status, run_at)"
            " VALUES (%s, 'a', '{}', 'scheduled', now())",
            [UUID(JOB)],
        )
        connection.execute(
            "INSERT INTO jsworker.job_steps (job_id, name, result, fencing_token)"
            " VALUES (%s, 'charge', '5', 1)",
            [UUID(JOB)],
        )
    [commands] = PAGE.blocks("sh")
    for line in commands.splitlines():
        assert run_line(line) == 0, line
        assert "charge" in capsys.readouterr().out
