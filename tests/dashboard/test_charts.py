import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree as ET

import pytest

from jsworker.dashboard.charts import Series, Unit, round_steps, round_times, time_chart

BEGIN = datetime(2026, 11, 25, 12, 3, tzinfo=UTC)
TIMES = [BEGIN + timedelta(minutes=n) for n in range(60)]


def parsed(chart: str) -> ET.Element:
    """Return a chart as a tree: it must be well formed."""
    return ET.fromstring(chart)  # noqa: S314 -- our own


@pytest.mark.parametrize("form", ["lines", "areas", "bars"])
@pytest.mark.parametrize("number", [0, 1, 2, 60])
def test_draws_any_number_of_values(form: str, number: int) -> None:
    values = [Series("a", [float(n) for n in range(1, number + 1)]), Series("b", [None] * number)]
    tree = parsed(time_chart("Jobs", TIMES[:number], values, form=form))  # type: ignore[arg-type] # parametrized
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
    assert len([each for each in svg.iter("rect") if each.get("class") == "chart-column"]) == number


def test_bars_are_stacked_and_lines_have_gaps() -> None:
    bars = time_chart("Jobs", TIMES[:1], [Series("a", [1]), Series("b", [2])], form="bars")
    first, second = [
        each.get("d") or ""
        for each in parsed(bars).iter("path")
        if each.get("class", "").startswith("chart-bars")
    ]
    # Each begins at its lower edge: the second where the first one ends.
    low, up = float(first.split("v")[0].split()[-1]), float(first.split("v")[1].split("h")[0])
    assert float(second.split("v")[0].split()[-1]) == pytest.approx(low + up, abs=0.2)
    lines = time_chart("Wait", TIMES[:5], [Series("p99", [1, 2, None, 3, 4])], unit="s")
    assert (
        len([each for each in parsed(lines).iter("path") if each.get("class", "").startswith("chart-line")])
        == 2
    )


def test_says_in_words_what_it_shows() -> None:
    chart = time_chart("Latency", TIMES[:3], [Series("p99", [0.5, 0.25, 2.0])], unit="s")
    [words] = [each.text for each in parsed(chart).iter("desc")]
    assert words == (
        "From 2026-11-25 12:03 to 2026-11-25 12:05 UTC. p99: last 2.0 s, least 250 ms, most 2.0 s."
    )


def test_escapes_names() -> None:
    evil = '"><script>alert(1)</script>'
    chart = time_chart(evil, TIMES[:2], [Series(evil, [1, 2]), Series(evil, [1, 2])])
    assert "<script" not in chart
    parsed(chart)


def test_hostile_numbers_are_left_out() -> None:
    parsed(time_chart("Jobs", TIMES[:4], [Series("a", [float("nan"), float("inf"), -3, 1e300])]))


def test_refuses_a_series_of_another_length() -> None:
    with pytest.raises(ValueError, match="series 'a': 1 values for 2 times"):
        time_chart("Jobs", TIMES[:2], [Series("a", [1])])


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
    chart = time_chart("Run time", TIMES[:1], [Series("p99", [4_100])], unit="s")
    assert re.findall(r">([0-9 dhms]+)</text>", chart) == ["0", "30 m", "1 h", "1 h 30 m"]


def test_ticks_of_times_are_round() -> None:
    first = BEGIN.timestamp()
    assert [datetime.fromtimestamp(each, UTC).minute for each in round_times(first, first + 3_600, 5)] == [
        15,
        30,
        45,
        0,
    ]
    assert len(round_times(first, first + 365 * 86_400, 5)) <= 5
