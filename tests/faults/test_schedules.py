"""A schedule of a second while its workers are killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jsworker.core.settings import Settings
from tests.faults.fleet import plain_environment, variables
from tests.faults.schedules import under_kills


@pytest.mark.thorough
@pytest.mark.timeout(300)
async def test_every_instant_has_one_job(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    given = make_settings()
    names = ("database_url", "nats_url", "stream", "subject_prefix")
    environment = plain_environment() | variables({name: getattr(given, name) for name in names})
    environment["JSWORKER_DATABASE_URL"] = given.database_dsn()
    found = await under_kills(environment, tmp_path, seconds=20.0, every=2.0)
    assert found["kills"] > 3
    assert found["instants"] > 1
    assert (found["without a job"], found["with more than one job"], found["jobs between instants"]) == (
        0,
        0,
        0,
    )
