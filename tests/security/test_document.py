"""SECURITY.md: every threat has a measure, and whatever it points to is there."""

import re

from jsworker.core.settings import Settings, variable_of
from tests.security.guarded import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| X")
]


def test_every_threat_has_a_measure_and_a_test_or_a_reason() -> None:
    assert [row[0] for row in ROWS] == [f"X{number}" for number in range(1, 24)]
    for row in ROWS:
        assert len(row) == 4
        assert all(row)


def test_whatever_it_points_to_is_there() -> None:
    paths = set(re.findall(r"`((?:tests|deploy|\.github)/[^`]+)`", TEXT))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_variable_that_it_names_is_a_setting() -> None:
    named = {name.removesuffix("_FILE") for name in re.findall(r"JSWORKER_[A-Z_]+[A-Z]", TEXT)}
    assert named <= {variable_of(name) for name in Settings.model_fields}
