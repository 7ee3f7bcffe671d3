"""docs/steps.md: its jobs do what it says, its commands work."""

import re
import shlex
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from jsworker import JobClient, Worker, load_settings
from jsworker.core.settings import Settings
from tests.conftest import UNHURRIED
from tests.support.polling import eventually

PAGE = (Path(__file__).parents[1] / "docs" / "steps.md").read_text()
JOB = "01a20f3e-1cf9-7742-a45f-1455c6717983"


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


@pytest.fixture
def names() -> dict[str, Any]:
    """What the code of the page defines."""
    defined: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, defined)  # noqa: S102 -- the page's own code
    return defined


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


def test_its_commands_do_what_they_say(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

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
    monkeypatch.setenv("JSWORKER_DATABASE_URL", settings.database_dsn())
    monkeypatch.setenv("JSWORKER_NATS_URL", settings.nats_url)
    assert load_settings().database_dsn() == settings.database_dsn()
    [commands] = blocks("sh")
    for line in commands.splitlines():
        assert run_command(shlex.split(line)[1:]) == 0, line
        assert "charge" in capsys.readouterr().out
