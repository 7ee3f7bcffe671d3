"""docs/schedules.md: its code is run, its commands and what it says of names are true."""

import pytest

from jsworker.core.schedule_rules import named_schedules
from tests.support.documents import Page, run_line

PAGE = Page("docs/schedules.md")


def test_its_classes_have_the_schedules_that_it_shows() -> None:
    names = PAGE.names()
    reports, tidy = names["SendReports"], names["Tidy"]
    assert list(named_schedules(reports.kind, reports.schedule)) == ["send-reports"]
    assert list(named_schedules(tidy.kind, tidy.schedule)) == ["tidy uploads", "tidy archive"]


@pytest.mark.usefixtures("environment")
def test_its_commands_do_what_they_say() -> None:
    [commands] = PAGE.blocks("sh")
    for line in commands.splitlines():
        assert run_line(line) == 0, line
