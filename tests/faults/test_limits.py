"""Keys with limits while their workers are killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jsworker.core.settings import Settings
from tests.faults.fleet import plain_environment, variables
from tests.faults.limits import under_kills


@pytest.mark.thorough
@pytest.mark.timeout(400)
async def test_no_key_has_too_many_runs(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    given = make_settings()
    names = ("database_url", "nats_url", "stream", "subject_prefix")
    environment = plain_environment() | variables({name: getattr(given, name) for name in names})
    environment["JSWORKER_DATABASE_URL"] = given.database_dsn()
    found = await under_kills(environment, tmp_path, seconds=15.0, every=2.0, workers=3, keys=12, jobs=600)
    assert found["kills"] > 3
    assert found["times held"] > 0
    assert found["moments with too many"] == 0
    assert found["completed"] == 600
    assert found["longest idle"] < 30.0  # two scans, on a machine that is busy with other tests
