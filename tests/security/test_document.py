"""SECURITY.md: every threat has a measure, and whatever it points to is there."""

import re

from jsworker.core.settings import Settings, variable_of
from tests.security.guarded import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()
THREATS = TEXT.partition("## Threats\n\n")[2].partition("\n\n")[0].split("\n- ")


def test_every_threat_has_a_measure_and_a_test_or_a_reason() -> None:
    for number, threat in enumerate(THREATS, 1):
        text = " ".join(threat.removeprefix("- ").split())
        assert re.fullmatch(rf"\*\*X{number}\. [^*]+\.\*\* .{{20,}}\. Shown by: .*\S.*\.", text), text
    assert len(THREATS) == 23


def test_whatever_it_points_to_is_there() -> None:
    paths = set(re.findall(r"`((?:tests|deploy|\.github)/[^`]+)`", TEXT))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_variable_that_it_names_is_a_setting() -> None:
    named = {name.removesuffix("_FILE") for name in re.findall(r"JSWORKER_[A-Z_]+[A-Z]", TEXT)}
    assert named <= {variable_of(name) for name in Settings.model_fields}
