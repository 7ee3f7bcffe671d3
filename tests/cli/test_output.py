import json
import time
from collections.abc import AsyncGenerator, Iterator
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest

from jsworker.cli.output import (
    ActionOutcome,
    folded,
    moment,
    print_json,
    print_table,
    refused,
    report,
    right,
    seconds_in_words,
    since,
    until,
)
from jsworker.core.errors import JsworkerError
from jsworker.core.names import cell, headline


def test_json_values_have_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    in_delhi = datetime(2026, 1, 2, 9, 34, 5, 600_000, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    print_json(
        {
            "id": UUID(int=1),
            "at": in_delhi,
            "after": timedelta(minutes=2, milliseconds=5),
            "n": Decimal("1.5"),
        }
    )
    assert json.loads(capsys.readouterr().out) == {
        "id": "00000000-0000-0000-0000-000000000001",
        "at": "2026-01-02T04:04:05.600000Z",
        "after": 120.005,
        "n": 1.5,
    }


def test_numbers_that_json_has_not_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"lag": float("inf"), "id": UUID(int=1), "n": 1.5}, {"lag": float("nan")}])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == [
        {"lag": "Infinity", "id": "00000000-0000-0000-0000-000000000001", "n": 1.5},
        {"lag": "NaN"},
    ]


def test_bytes_have_no_place_in_json() -> None:
    with pytest.raises(TypeError, match="type bytes"):
        print_json({"data": b"x"})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0s"), (0.4, "0s"), (59.4, "59s"), (60, "1m"), (3599, "60m"), (7200, "2h"), (200_000, "2d")],
)
def test_durations_are_shown_in_their_largest_unit(seconds: float, words: str) -> None:
    assert seconds_in_words(seconds) == words


def test_instants_are_shown_as_distances() -> None:
    now = datetime.now(UTC)
    assert since(now - timedelta(hours=2)) == "2h"
    assert until(now + timedelta(hours=3)) == "3h"
    assert since(None) == ""


def test_cells_cannot_steer_the_terminal() -> None:
    assert cell("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    assert cell(None) == ""
    assert len(cell("x" * 1000)) == 300
    assert headline("\n ValueError: no\nmore") == "ValueError: no"
    assert headline(None) == ""


@pytest.mark.parametrize("columns", [10, 25, 40])
def test_a_table_that_is_too_wide_loses_spare_columns_and_nothing_else(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = [folded("KIND", at_least=8), right("QUEUED"), right("HELD"), right("WORKERS")]
    print_table(shown, [["count-words", "12345", "678", "9"]], spare=["HELD"])
    words = capsys.readouterr().out.split()
    assert [word for word in words if word not in ("HELD", "678")] == [
        *("KIND", "QUEUED", "WORKERS"),
        *("count-words", "12345", "9"),
    ]
    assert ("HELD" in words) == (columns == 40)


async def test_a_report_that_is_cut_short_says_how_far_it_came(capsys: pytest.CaptureFixture[str]) -> None:
    async def outcomes() -> AsyncGenerator[list[ActionOutcome], None]:
        yield [ActionOutcome(1, "queued"), refused(3, "job 3 is gone")]
        yield [ActionOutcome(2, "queued")]
        raise JsworkerError

    for expected, of in ((None, ""), (5, " of 5")):
        with pytest.raises(JsworkerError):
            await report(outcomes(), as_json=False, expected=expected)
        printed = capsys.readouterr()
        assert printed.out == "1 queued\n2 queued\n"
        remark = f"done for 2{of}; run the command again for the others"
        assert printed.err.splitlines() == ["job 3 is gone", remark]


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    ("utc", "shown"),
    [
        ("2026-10-24T22:30:00.250Z", "2026-10-25 00:30:00.250"),
        ("2026-10-25T00:30:00.250Z", "2026-10-25 02:30:00.250+0200"),
        ("2026-10-25T01:30:00.250Z", "2026-10-25 02:30:00.250+0100"),
        ("2026-10-25T02:30:00.250Z", "2026-10-25 03:30:00.250"),
        ("2026-03-29T00:59:59.250Z", "2026-03-29 01:59:59.250"),
        ("2026-03-29T01:00:00.250Z", "2026-03-29 03:00:00.250"),
        ("9999-12-31T22:00:00.250Z", "9999-12-31 23:00:00.250"),
    ],
)
def test_times_of_an_hour_that_occurs_twice_say_which_one_it_is(utc: str, shown: str) -> None:
    assert moment(datetime.fromisoformat(utc), milliseconds=True) == shown
