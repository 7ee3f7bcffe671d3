"""When schedules come due: time changes against a table written by hand, missed instants, bad rules."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsworker import Cron, Every
from jsworker.core import schedule_rules
from jsworker.core.schedule_rules import Schedule, due, named_schedules, read_schedule

BERLIN, SAO_PAULO, LORD_HOWE = "Europe/Berlin", "America/Sao_Paulo", "Australia/Lord_Howe"


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("rule", "tz", "after", "local"),
    [
        # Germany, 29 March 2026: 02:00 becomes 03:00. 25 October: 03:00 becomes 02:00.
        ("30 2 * * *", BERLIN, "2026-03-28T12:00", ["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"]),
        ("30 2 * * *", BERLIN, "2026-10-24T12:00", ["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"]),
        ("0 3 * * *", BERLIN, "2026-03-28T12:00", ["2026-03-29T03:00+02:00", "2026-03-30T03:00+02:00"]),
        (
            "*/30 * * * *",
            BERLIN,
            "2026-03-29T01:00",
            ["2026-03-29T01:30+01:00", "2026-03-29T03:00+02:00", "2026-03-29T03:30+02:00"],
        ),
        (
            "*/30 * * * *",
            BERLIN,
            "2026-10-25T01:40",
            [
                "2026-10-25T02:00+02:00",
                "2026-10-25T02:30+02:00",
                "2026-10-25T02:00+01:00",
                "2026-10-25T02:30+01:00",
                "2026-10-25T03:00+01:00",
            ],
        ),
        # Brazil, 4 November 2018: 00:00 becomes 01:00. 18 February: 00:00 becomes 23:00 of the day before.
        ("0 0 * * *", SAO_PAULO, "2018-11-03T12:00", ["2018-11-04T01:00-02:00", "2018-11-05T00:00-02:00"]),
        ("30 23 * * *", SAO_PAULO, "2018-02-17T12:00", ["2018-02-17T23:30-02:00", "2018-02-18T23:30-03:00"]),
        # Lord Howe moves by half an hour: 4 October 2026 02:00 becomes 02:30, 5 April 02:00 becomes 01:30.
        ("15 2 * * *", LORD_HOWE, "2026-10-03T12:00", ["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"]),
        ("45 1 * * *", LORD_HOWE, "2026-04-04T12:00", ["2026-04-05T01:45+11:00", "2026-04-06T01:45+10:30"]),
        # Names, the last day of the month, the third Friday.
        ("0 9 * JAN MON", "UTC", "2026-01-01T00:00", ["2026-01-05T09:00+00:00", "2026-01-12T09:00+00:00"]),
        ("0 0 L * *", "UTC", "2026-02-01T00:00", ["2026-02-28T00:00+00:00", "2026-03-31T00:00+00:00"]),
        ("0 0 * * FRI#3", "UTC", "2026-02-01T00:00", ["2026-02-20T00:00+00:00", "2026-03-20T00:00+00:00"]),
        ("0 0 29 2 *", "UTC", "2026-02-01T00:00", ["2028-02-29T00:00+00:00", "2032-02-29T00:00+00:00"]),
    ],
)
def test_cron_rules_in_time_zones(rule: str, tz: str, after: str, local: list[str]) -> None:
    schedule, instant = Cron(rule, tz=tz), datetime.fromisoformat(after).replace(tzinfo=ZoneInfo(tz))
    found = []
    for _ in local:
        instant = schedule.after(instant)
        found.append(instant.astimezone(ZoneInfo(tz)).isoformat(timespec="minutes"))
    assert found == local


def test_within_an_hour_that_comes_twice_no_instant_is_over() -> None:
    for minute in range(0, 120, 10):
        now = utc("2026-10-25T00:00:00") + timedelta(minutes=minute)
        for rule in ("30 2 * * *", "0,30 2 * * *", "15 1-3 * * *"):
            assert Cron(rule, tz=BERLIN).after(now) > now
    now = utc("2026-10-25T01:10:00")  # 02:10 for the second time
    assert Cron("30 2 * * *", tz=BERLIN).after(now) == utc("2026-10-26T01:30:00")


CHATHAM = "Pacific/Chatham"  # 5 April 2026: 03:45 becomes 02:45


@pytest.mark.timeout(30)  # the library alone would return the same instants for ever, or none
@pytest.mark.parametrize("rule", ["*/18 3 * * 0", "*/5 3 * * *", "50 */3 * * SUN", "45 */3 * * *"])
def test_a_rule_comes_due_where_the_library_never_answers(rule: str) -> None:
    schedule, now = Cron(rule, tz=CHATHAM), utc("2026-04-04T11:05:00")
    found = [now := schedule.after(now) for _ in range(40)]
    assert found == sorted(set(found))
    assert found[0] < utc("2026-04-04T16:00:00") < found[-1] < utc("2026-07-20T00:00:00")


@pytest.mark.parametrize(
    ("tz", "changed_at", "hours", "weekdays", "rule"),
    [
        # Clocks go forward at midnight: 24 April, 6 September, 8 March, 29 March.
        ("Africa/Cairo", "2026-04-23T22:00", range(24), [5], "*/5 * * * FRI"),
        ("Africa/Cairo", "2026-04-23T22:00", [0], [5], "* 0 * * FRI"),
        ("Africa/Cairo", "2026-04-23T22:00", [1], [5], "* 1 * * FRI"),
        ("America/Santiago", "2026-09-06T04:00", [1, 2, 3], [7], "* 1-3 * * SUN"),
        ("America/Havana", "2026-03-08T05:00", [1], [7], "* 1 * * SUN"),
        ("Atlantic/Azores", "2026-03-29T01:00", [0, 1], [7], "* 0,1 * * SUN"),
        # By half an hour, back at midnight, back from 03:45, and as in most places.
        (LORD_HOWE, "2026-04-04T15:00", range(0, 24, 2), range(1, 8), "20 */2 * * *"),
        (LORD_HOWE, "2026-10-03T15:30", [2, 3, 4], range(1, 8), "*/15 2-4 * * *"),
        (SAO_PAULO, "2018-02-18T02:00", [23], [6], "*/20 23 * * SAT"),
        (CHATHAM, "2026-04-04T14:00", [0, 2, 4], range(1, 8), "*/7 0-4/2 * * *"),
        (BERLIN, "2026-10-25T01:00", [1, 2], range(1, 8), "*/30 1,2 * * *"),
        (BERLIN, "2026-03-29T01:00", [2], range(1, 8), "* 2 * * *"),
    ],
)
def test_rules_with_a_star_follow_the_hours(
    tz: str, changed_at: str, hours: Sequence[int], weekdays: Sequence[int], rule: str
) -> None:
    """Against every minute around a change of clocks, asked from instants before and after it."""
    text = rule.split(maxsplit=1)[0]
    minutes = range(0, 60, int(text[2:] or 1)) if text.startswith("*") else [int(text)]

    def is_due(local: datetime) -> bool:
        return local.minute in minutes and local.hour in hours and local.isoweekday() in weekdays

    begin = utc(changed_at) - timedelta(hours=5)
    following = (begin + timedelta(minutes=minute) for minute in range(10 * 1440))
    expected = [instant for instant in following if is_due(instant.astimezone(ZoneInfo(tz)))]
    schedule, asked = Cron(rule, tz=tz), begin - timedelta(seconds=1)
    while asked < begin + timedelta(hours=10):
        assert schedule.after(asked) == expected[bisect_right(expected, asked)]
        asked += timedelta(minutes=3, seconds=20)


def test_a_rule_that_clocks_always_skip_is_never_due() -> None:
    with pytest.raises(ValueError, match="never comes due"):
        Cron("* 2 * MAR 0L", tz=BERLIN)


@pytest.mark.parametrize(
    ("rule", "options", "said"),
    [
        ("0 0 30 2 *", {}, "bad day-of-month"),
        ("0 0 31 4,6 *", {}, "bad day-of-month"),
        ("*/5 * * * * *", {}, "must have five fields.*for seconds there is Every"),
        ("@daily", {}, "must have five fields"),
        ("", {}, "must have five fields"),
        ("61 * * * *", {}, "bad minute"),
        ("* * * * FOO", {}, "bad day-of-week"),
        (None, {}, "must have five fields"),
        ("0 3 * * *", {"tz": "Mars/Olympus"}, "tz='Mars/Olympus' must be a time zone"),
        ("0 3 * * *", {"tz": "../../etc/passwd"}, "must be a time zone"),
        ("0 3 * * *", {"tz": ""}, "must be a time zone"),
        ("0 3 * * *", {"tz": None}, "must be a time zone"),
        ("0 3 * * *", {"missed": "all"}, "must be coalesce or skip"),
        ("0 3 * * *", {"overlap": "queue"}, "must be allow or skip"),
        ("0 3 * * *", {"catch_up": -1}, "from 0 to 1000"),
        ("0 3 * * *", {"catch_up": 1001}, "from 0 to 1000"),
        ("0 3 * * *", {"catch_up": True}, "from 0 to 1000"),
        ("0 3 * * *", {"catch_up": 2, "missed": "skip"}, "contradict"),
        ("0 3 * * *", {"catch_up": 2, "overlap": "skip"}, "contradict each other: the first job"),
    ],
)
def test_bad_cron_rules(rule: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cron(rule, **options)


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"seconds": 0},
        {"seconds": 0.5},
        {"seconds": -5},
        {"days": 367},
        {"hours": float("nan")},
        {"hours": float("inf")},
        {"seconds": 1e300},
        {"seconds": "5"},
        {"minutes": None},
        {"seconds": timedelta(minutes=3)},
    ],
)
def test_bad_steps(step: dict[str, Any]) -> None:
    [given] = step.values() or [0]
    wanted = "" if isinstance(given, int | float) else "numbers: "
    said = rf"^Every\(.*\) must be {wanted}a step from 1 second to 366 days$"
    with pytest.raises(ValueError, match=said):
        Every(**step)


def test_equal_steps_are_multiples_since_1970_whenever_a_worker_starts() -> None:
    assert Every(minutes=5).after(utc("2026-03-01T10:02:03")) == utc("2026-03-01T10:05:00")
    assert Every(minutes=5).after(utc("2026-03-01T10:05:00")) == utc("2026-03-01T10:10:00")
    assert Every(days=7).after(utc("2026-11-24T00:00:00")) == utc(
        "2026-11-26T00:00:00"
    )  # a Thursday, as 1970-01-01


@pytest.mark.parametrize(
    "schedule",
    [
        Every(seconds=1),
        Every(seconds=1.5, overlap="skip"),
        Every(days=300, catch_up=7),
        Cron("0 3 * * MON-FRI", tz=BERLIN, missed="skip"),
    ],
)
def test_what_is_stored_is_read_again(schedule: Schedule) -> None:
    stored = schedule.text, schedule.tz, schedule.missed_text
    assert read_schedule(*stored, overlap=schedule.overlap) == schedule or schedule.text.startswith("every")
    assert read_schedule(*stored, overlap=schedule.overlap).text == schedule.text
    assert read_schedule(*stored).missed_text == schedule.missed_text


FIRST = utc("2026-03-01T10:00:00")


@pytest.mark.parametrize(
    ("schedule", "now", "runs", "then"),
    [
        # Within a minute nothing has been missed.
        (Every(seconds=20), "10:00:45", ["10:00:00", "10:00:20", "10:00:40"], "10:01:00"),
        (Every(seconds=20, missed="skip"), "10:00:45", ["10:00:00", "10:00:20", "10:00:40"], "10:01:00"),
        (Every(seconds=20), "10:00:00", ["10:00:00"], "10:00:20"),
        # Later it is up to the schedule.
        (Every(seconds=20), "10:02:05", ["10:02:00"], "10:02:20"),
        (
            Every(seconds=20, missed="skip"),
            "10:02:05",
            ["10:01:20", "10:01:40", "10:02:00"],
            "10:02:20",
        ),
        (Every(seconds=20, catch_up=2), "10:02:05", ["10:01:40", "10:02:00"], "10:02:20"),
        (
            Every(seconds=20, catch_up=1000),
            "10:01:05",
            ["10:00:00", "10:00:20", "10:00:40", "10:01:00"],
            "10:01:20",
        ),
        (Cron("0 10 * * *"), "10:30:00", ["10:00:00"], "+10:00:00"),
        (Cron("0 10 * * *", missed="skip"), "10:30:00", [], "+10:00:00"),
    ],
)
def test_missed_instants(schedule: Schedule, now: str, runs: list[str], then: str) -> None:
    found = due(schedule, FIRST, utc(f"2026-03-01T{now}"))
    assert [f"{each:%H:%M:%S}" for each in found.run] == runs
    assert found.then == utc(f"2026-03-0{2 if then[0] == '+' else 1}T{then.removeprefix('+')}")


@pytest.mark.parametrize(
    ("schedule", "now", "missed"),
    [
        (Every(seconds=20), "2026-03-01T10:00:45", 0),
        (Every(seconds=20), "2026-03-01T10:02:05", 6),
        (Every(seconds=20, missed="skip"), "2026-03-01T10:02:05", 4),
        (Every(seconds=20, catch_up=2), "2026-03-01T10:02:05", 5),
        (Every(seconds=20, catch_up=1000), "2026-03-01T10:02:05", 0),
        (Cron("0 10 * * *"), "2026-03-01T10:30:00", 0),
        (Cron("0 10 * * *", missed="skip"), "2026-03-03T10:30:00", 3),
        (Every(seconds=1), "2028-03-01T10:00:00", 1000),
    ],
)
def test_instants_without_a_job_are_counted(schedule: Schedule, now: str, missed: int) -> None:
    assert due(schedule, FIRST, utc(now)).missed == missed


def test_skipping_missed_instants_skips_none_that_is_on_time() -> None:
    today = utc("2026-03-03T10:00:00")
    found = due(Cron("0 10 * * *", missed="skip"), FIRST, utc("2026-03-03T10:00:20"))
    assert found.run == (today,)


def test_a_clock_that_went_back_changes_nothing() -> None:
    """What is due by a read of the row is due; the next instant lies behind it all the same."""
    found = due(Every(minutes=1), FIRST, utc("2026-03-01T09:00:00"))
    assert (found.run, found.then) == ((FIRST,), utc("2026-03-01T10:01:00"))


def test_an_outage_of_years_is_not_gone_through_minute_by_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[datetime] = []
    after = Every.after

    def counted(schedule: Every, instant: datetime) -> datetime:
        asked.append(instant)
        return after(schedule, instant)

    monkeypatch.setattr(Every, "after", counted)
    found = due(Every(seconds=1), utc("2020-01-01T00:00:00"), FIRST)
    assert found.run == (FIRST,)
    assert len(asked) < 10_000


def test_the_day_before_clocks_are_set_back_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[datetime] = []
    is_skipped = schedule_rules._is_skipped

    def counted(local: datetime) -> bool:
        looked.append(local)
        return is_skipped(local)

    monkeypatch.setattr(schedule_rules, "_is_skipped", counted)
    first = utc("2026-10-24T04:00:00")
    due(Cron("* * * * *", tz=BERLIN, catch_up=1000), first, first + timedelta(hours=20))
    assert len(looked) < 10_000


@settings(deadline=None)  # a busy machine
@given(st.integers(1, 10_000), st.integers(0, 400_000), st.integers(1, 20))
def test_instants_rise_and_none_is_run_twice(step: int, late: int, catch_up: int) -> None:
    schedule = Every(seconds=step, catch_up=catch_up)
    first = schedule.after(FIRST)
    now = datetime.fromtimestamp(first.timestamp() + late, UTC)
    found = due(schedule, first, now)
    assert list(found.run) == sorted(set(found.run))
    assert all(first <= each <= now for each in found.run)
    assert found.then > now
    assert found.run[-1] == max(each for each in found.run)
    assert (found.then - found.run[-1]).total_seconds() == step


def test_schedules_of_a_class() -> None:
    every = Every(minutes=1)
    assert named_schedules("tidy", None) == {}
    assert named_schedules("tidy", every) == {"tidy": every}
    assert named_schedules("tidy", {"a": every, "b": every}) == {"a": every, "b": every}
    with pytest.raises(TypeError, match="must be a Cron, an Every, or several by name, not str"):
        named_schedules("tidy", "0 3 * * *")
    for name in ("", "x" * 101, "a\0b", 5):
        with pytest.raises(ValueError, match="must be text of 1 to 100 printable characters"):
            named_schedules("tidy", {name: every})
