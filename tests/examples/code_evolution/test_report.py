import io
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rich.console import Console

from code_evolution.outcome import Outcome, RepositoryLines, Sample
from code_evolution.report import MOST_ROWS, lines_table, summary_table

START = datetime(2021, 1, 10, 12, tzinfo=UTC)


def repository(samples: int, languages: dict[str, int], name: str = "project") -> RepositoryLines:
    return RepositoryLines(
        f"/srv/{name}",
        name,
        [
            Sample(
                START + timedelta(days=30 * place),
                f"{place:040x}",
                {language: lines * (place + 1) for language, lines in languages.items()},
            )
            for place in range(samples)
        ],
    )


def outcome(**changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "jobs": 48,
        "completed": 48,
        "recovered": 2,
        "recovery_seconds": 2.34567,
        "failed": 0,
        "lost": 0,
        "seconds": 7.98765,
        "repositories": [repository(2, {"Go": 5, "Python": 7})],
        "recovered_job": None,
        "complaints": [],
        "remarks": [],
    }
    return Outcome(**(facts | changes))


def printed(renderable: object, width: int = 100) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_lines_table_ends_with_the_growth() -> None:
    title, header, *rows, growth = printed(lines_table(repository(2, {"Go": 1500, "Python": 700}), 100))

    assert title == "project"
    assert header.split() == ["date", "commit", "Go", "Python", "total"]
    assert [row.split() for row in rows] == [
        ["2021-01-10", "00000000", "1,500", "700", "2,200"],
        ["2021-02-09", "00000000", "3,000", "1,400", "4,400"],
    ]
    assert growth.split() == ["growth", "+1,500", "+700", "+2,200"]


def test_a_language_that_shrinks_grows_by_less_than_nothing() -> None:
    shrinking = repository(3, {"Go": 10})
    backwards = RepositoryLines("/srv/x", "x", [*reversed(shrinking.samples)])

    assert printed(lines_table(backwards, 80))[-1].split() == ["growth", "-20", "-20"]


def test_a_long_history_is_thinned_with_its_first_and_last_commit() -> None:
    _, _, *rows, _ = printed(lines_table(repository(240, {"Go": 1}), 100))

    assert len(rows) == MOST_ROWS
    assert rows[0].split()[-1] == "1"
    assert rows[-1].split()[-1] == "240"


@pytest.mark.parametrize("width", range(40, 161, 8))
@pytest.mark.parametrize("languages", [0, 1, 2, 5, 12])
def test_the_lines_table_fits_and_its_columns_add_up(width: int, languages: int) -> None:
    lines = {f"Language {place}" * (1 + place % 2): 1000 * (place + 1) for place in range(languages)}

    _, header, *rows, _ = printed(lines_table(repository(3, lines), width), width)

    assert "…" not in header
    assert header.split()[-1] == "total"
    for row in rows:
        *parts, total = [int(number.replace(",", "")) for number in row.split()[2:]]
        assert total == sum(parts) or not parts


def test_languages_without_room_are_summed_up() -> None:
    lines = {f"Language{place}": 100 - place for place in range(20)}

    _, header, first, *_ = printed(lines_table(repository(2, lines), 80), 80)

    assert header.split()[2] == "Language0"
    assert header.split()[-2:] == ["other", "total"]
    assert int(first.split()[-1].replace(",", "")) == sum(lines.values())


def test_the_summary_says_what_became_of_the_jobs() -> None:
    lines = printed(summary_table(outcome()))

    assert [line.rsplit(maxsplit=1) for line in lines[:3]] == [
        ["jobs", "48"],
        ["completed", "48"],
        ["recovered", "2"],
    ]
    assert [" ".join(line.split()) for line in lines[3:]] == [
        "kill to re-run 2.3 s",
        "lost 0",
        "run time 8.0 s",
    ]


def test_the_summary_hides_no_failures_and_invents_no_kill() -> None:
    lines = [
        " ".join(line.split()) for line in printed(summary_table(outcome(failed=3, recovery_seconds=None)))
    ]

    assert "failed 3" in lines
    assert not any(line.startswith("kill") for line in lines)


def test_the_json_object_has_the_promised_fields() -> None:
    value = json.loads(json.dumps(outcome().as_json()))

    assert value == {
        "jobs": 48,
        "completed": 48,
        "recovered": 2,
        "recovery_seconds": 2.346,
        "lost": 0,
        "seconds": 7.988,
        "repositories": [
            {
                "repository": "/srv/project",
                "samples": [
                    {
                        "date": "2021-01-10T12:00:00+00:00",
                        "commit": "0" * 40,
                        "lines": {"Go": 5, "Python": 7},
                    },
                    {
                        "date": "2021-02-09T12:00:00+00:00",
                        "commit": f"{1:040x}",
                        "lines": {"Go": 10, "Python": 14},
                    },
                ],
            }
        ],
    }


def test_a_run_without_a_kill_has_no_recovery_seconds() -> None:
    assert outcome(recovery_seconds=None).as_json()["recovery_seconds"] is None
