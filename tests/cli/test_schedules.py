"""``jsworker schedules``: what is added, listed, paused and run; wrong rules are told in one line."""

import re

import pytest

from tests.ownership.rows import Sql, read_value

from .commands import Cli

pytestmark = pytest.mark.usefixtures("sql")


def test_from_add_to_remove(cli: Cli, sql: Sql) -> None:
    added = cli(
        "schedules", "add", "nightly", "tidy", "--cron", "0 3 * * MON-FRI", "--tz", "Europe/Berlin"
    ).ok_unserved("tidy")
    assert added.lines[0].startswith("nightly is due at 20")
    cli(
        "schedules",
        "add",
        "often",
        "tidy",
        "--every",
        "90",
        "--payload",
        '{"n": 1}',
        "--overlap",
        "skip",
        "--priority",
        "high",
    ).ok_unserved("tidy")
    listed = {each["name"]: each for each in cli("schedules", "list", "--json").ok().json}
    assert (listed["nightly"]["rule"], listed["nightly"]["tz"]) == ("0 3 * * MON-FRI", "Europe/Berlin")
    assert (listed["often"]["payload"], listed["often"]["overlap"]) == ({"n": 1}, "skip")
    assert (listed["nightly"]["priority"], listed["often"]["priority"]) == ("normal", "high")
    table = cli("schedules").ok().lines
    assert table[0].split()[:3] == ["NAME", "KIND", "RULE"]
    assert any("0 3 * * MON-FRI (Europe/Berlin)" in line for line in table)
    assert cli("schedules", "pause", "nightly").ok().lines == ["nightly is paused"]
    assert any("paused" in line for line in cli("schedules", "list").ok().lines)
    assert cli("schedules", "resume", "nightly").ok().lines[0].startswith("nightly is due at 20")
    assert re.fullmatch(r"nightly is due at \S{10} \S{8}", added.lines[0])
    [job_id] = cli("schedules", "run-now", "often").ok().lines
    assert str(read_value(sql, "SELECT id FROM jsworker.jobs WHERE schedule = 'often'")) == job_id
    assert cli("schedules", "remove", "often").ok().lines == ["often is removed"]
    assert [each["name"] for each in cli("schedules", "list", "--json").ok().json] == ["nightly"]


def test_what_is_overdue_says_so(cli: Cli, sql: Sql) -> None:
    cli("schedules", "add", "nightly", "tidy", "--every", "60").ok_unserved("tidy")
    sql.execute("UPDATE jsworker.schedules SET next_at = clock_timestamp() - interval '2 hours'")
    assert any("late 2h" in line for line in cli("schedules", "list").ok().lines)


def test_a_name_that_is_taken(cli: Cli) -> None:
    cli("schedules", "add", "nightly", "tidy", "--every", "60").ok_unserved("tidy")
    assert cli("schedules", "add", "nightly", "tidy", "--every", "90").refused(1) == (
        "there is a schedule 'nightly' already"
    )
    cli("schedules", "add", "nightly", "tidy", "--every", "90", "--replace").ok_unserved("tidy")
    assert cli("schedules", "list", "--json").ok().json[0]["rule"] == "every 90 s"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cron", "0 0 30 2 *"], "--cron '0 0 30 2 *': bad day-of-month"),
        (["--cron", "0 3 * *"], "--cron '0 3 * *' must have five fields"),
        (["--cron", "tz missed"], "--cron 'tz missed' must have five fields"),
        (["--cron", "0 3 * *"], "; for seconds there is --every SECONDS"),
        (["--every", "0"], "--every 0 must be a step from 1 second to 366 days"),
        (["--every", "nan"], "--every nan must be a step from 1 second to 366 days"),
        (["--cron", "0 3 * * *", "--tz", "Mars/Olympus"], "--tz 'Mars/Olympus' must be a time zone"),
        (["--every", "60", "--catch-up", "-1"], "--catch-up -1 must be a whole number from 0 to 1000"),
        (
            ["--every", "60", "--missed", "skip", "--catch-up", "2"],
            "--missed 'skip' and --catch-up contradict each other",
        ),
        ([], "takes either --cron RULE or --every SECONDS"),
        (["--every", "60", "--cron", "0 3 * * *"], "takes either --cron RULE or --every SECONDS"),
    ],
)
def test_wrong_rules(cli: Cli, arguments: list[str], said: str) -> None:
    assert said in cli("schedules", "add", "nightly", "tidy", *arguments).refused(2)


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 101])
def test_a_wrong_name(cli: Cli, name: str) -> None:
    line = cli("schedules", "add", name, "tidy", "--every", "60").refused(2)
    assert line.endswith(" of a schedule must be text of 1 to 100 printable characters")


def test_unknown_names(cli: Cli) -> None:
    for action in ("pause", "resume", "run-now", "remove"):
        assert cli("schedules", action, "x").refused(1) == "there is no schedule 'x'"
