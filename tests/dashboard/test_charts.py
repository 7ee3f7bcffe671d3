import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree as ET

import pytest

from jsworker.dashboard.charts import Form, Series, Unit, round_steps, round_times, time_chart

BEGIN = datetime(2026, 11, 25, 12, 3, tzinfo=UTC)
TIMES = [BEGIN + timedelta(minutes=n) for n in range(60)]


def parsed(chart: str) -> ET.Element:
    """Return a chart as a tree: it must be well formed."""
    return ET.fromstring(chart)  # noqa: S314 -- our own


def series(name: str, *values: float | None) -> Series:
    """Return a series in some colour."""
    return Series(name, values, "series-1")


@pytest.mark.parametrize("form", ["lines", "bars"])
@pytest.mark.parametrize("number", [0, 1, 2, 60])
def test_draws_any_number_of_known_values(form: Form, number: int) -> None:
    known = [float(n) for n in range(1, number + 1)]
    values = [series("a", *known, *[None] * (60 - number)), series("b", *[None] * 60)]
    tree = parsed(time_chart("Jobs", TIMES, values, form=form))
    svg = tree.find("svg")
    assert svg is not None
    assert [svg[0].tag, svg[1].tag] == ["title", "desc"]
    drawn = [
        each
        for each in svg.iter()
        if (each.get("class") or "").startswith(("chart-line", "chart-bars", "chart-dot"))
    ]
    assert bool(drawn) == bool(number)
    assert ("no data yet" in "".join(svg.itertext())) == (not number)
    assert len([each for each in svg.iter("rect") if each.get("class") == "chart-column"]) == (
        60 if number else 0
    )


def test_bars_are_stacked_and_lines_have_gaps() -> None:
    bars = time_chart("Jobs", TIMES[:2], [series("a", 1, None), series("b", 2, None)], form="bars")
    first, second = [
        each.get("d") or ""
        for each in parsed(bars).iter("path")
        if each.get("class", "").startswith("chart-bars")
    ]
    # Each begins at its lower edge: the second where the first one ends.
    low, up = float(first.split("v")[0].split()[-1]), float(first.split("v")[1].split("h")[0])
    assert float(second.split("v")[0].split()[-1]) == pytest.approx(low + up, abs=0.2)
    lines = time_chart("Wait", TIMES[:5], [series("p99", 1, 2, None, 3, 4)], unit="s")
    assert (
        len([each for each in parsed(lines).iter("path") if each.get("class", "").startswith("chart-line")])
        == 2
    )


def test_says_in_words_what_it_shows() -> None:
    chart = time_chart("Latency", TIMES[:3], [series("p99", 0.5, 0.25, 2.0)], unit="s")
    [words] = [each.text for each in parsed(chart).iter("desc")]
    assert words == (
        "From 2026-11-25 12:03 to 2026-11-25 12:05 UTC. p99: last 2.0 s, least 250 ms, most 2.0 s."
    )


def test_escapes_names() -> None:
    evil = '"><script>alert(1)</script>'
    chart = time_chart(evil, TIMES[:2], [series(evil, 1, 2), series(evil, 1, 2)])
    assert "<script" not in chart
    parsed(chart)


def test_hostile_numbers_are_left_out() -> None:
    parsed(time_chart("Jobs", TIMES[:4], [series("a", float("nan"), float("inf"), -3, 1e300)]))


@pytest.mark.parametrize(
    ("most", "unit", "steps"),
    [
        (0, "", [0, 1]),
        (1, "", [0, 1]),
        (3, "", [0, 1, 2, 3]),
        (7, "", [0, 2, 4, 6, 8]),
        (1090, "", [0, 500, 1000, 1500]),
        (0.07, "s", [0, 0.02, 0.04, 0.06, 0.08]),
        (50, "s", [0, 15, 30, 45, 60]),
        (1_000, "s", [0, 300, 600, 900, 1200]),
        (7_200, "s", [0, 1800, 3600, 5400, 7200]),
        (5e6, "s", [0, 2e6, 4e6, 6e6]),
    ],
)
def test_ticks_are_round(most: float, unit: Unit, steps: list[float]) -> None:
    assert round_steps(most, unit) == pytest.approx(steps)


def test_ticks_of_durations_are_whole_minutes() -> None:
    chart = time_chart("Run time", TIMES[:2], [series("p99", 4_100, None)], unit="s")
    assert re.findall(r">([0-9 dhms]+)</text>", chart) == ["0", "30 m", "1 h", "1 h 30 m"]


def test_ticks_of_times_are_round() -> None:
    first = BEGIN.timestamp()
    assert [datetime.fromtimestamp(each, UTC).minute for each in round_times(first, first + 3_600, 5)] == [
        15,
        30,
        45,
        0,
    ]
