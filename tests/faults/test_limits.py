"""Keys with limits while their workers are killed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jsworker.core.settings import Settings
from tests.faults.fleet import plain_environment, variables
from tests.faults.limits import OVERLAPS, overlaps, under_kills

LOG = """\
a one:1 10 begin 1.0
a one:1 10 end 2.0
a two:1 10 begin 2.5
b three:1 11 begin 2.6
a two:2 11 begin 4.0
a two:2 11 end 5.0
"""


@pytest.mark.parametrize(
    ("killed_at", "more", "found"),
    [
        (3.0, "", 0),
        (4.5, "", 1),
        (3.0, "a four:1 12 begin 4.5\n", 1),
        (3.0, "a four:1 12 begin 4.5\nc five:1 10 begin 2.7\n", 1),
    ],
)
def test_runs_of_a_key_that_went_on_at_once_are_counted(killed_at: float, more: str, found: int) -> None:
    assert overlaps(LOG + more, {10: killed_at}, ["a", "c"]) == found


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
    assert found[OVERLAPS] == 0
    assert found["completed"] == 600
    assert found["longest idle"] < 30.0  # two scans, on a machine that is busy with other tests
