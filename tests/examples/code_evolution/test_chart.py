from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib.transforms import Bbox, BboxBase
from PIL import Image

from code_evolution import chart
from code_evolution.chart import ChartNotWritten, draw_charts, file_stems, spread
from code_evolution.outcome import RepositoryLines, Sample

START = datetime(2016, 3, 4, tzinfo=UTC)
LANGUAGES = [
    "Python",
    "reStructuredText",
    "Protocol Buffers",
    "C/C++ header",
    "TypeScript",
    "Shell",
    "YAML",
    "Markdown",
    "SQL",
    "HTML",
]


def repository(
    samples: int = 48,
    *,
    name: str = "project",
    scale: int = 9_000_000,
    days: float = 3000,
    languages: int = 10,
) -> RepositoryLines:
    return RepositoryLines(
        path=f"/srv/{name}",
        name=name,
        samples=[
            Sample(
                date=START + timedelta(days=days * place / max(1, samples - 1)),
                commit="a" * 40,
                lines={
                    language: scale * (place + 1) // (rank + 1) // samples
                    for rank, language in enumerate(LANGUAGES[:languages])
                },
            )
            for place in range(samples)
        ],
    )


CASES = {
    "48 samples": repository(),
    "one sample": repository(1),
    "two samples": repository(2, scale=20),
    "240 samples": repository(240),
    "one language": repository(languages=1),
    "tiny languages": RepositoryLines(
        "/srv/tiny",
        "tiny",
        [Sample(START, "a" * 40, dict.fromkeys(LANGUAGES, 1) | {"Go": lines}) for lines in (10, 900_000)],
    ),
    "no lines": repository(3, languages=0),
    "long name": repository(name="W" * 250),
    "odd name": repository(name="$\\nonsense{x_1$ <&> 项目 ünï \\frac"),
    "one moment": repository(30, days=0),
    "some hours": repository(30, days=0.3),
    "three months": repository(30, days=95),
    "a year": repository(30, days=400),
    "centuries": repository(30, days=365 * 7900),
}


def drawn_texts(shown: RepositoryLines) -> tuple[BboxBase, dict[str, Bbox]]:
    """Draw a chart and return the page and the place of every text that it shows."""
    with mpl.rc_context(chart._STYLE):
        figure = chart.draw(shown)
        figure.draw_without_rendering()
        texts = list(figure.texts)
        for axes in figure.axes:
            texts += axes.texts
            shown_axes: tuple[Any, ...] = (axes.xaxis, axes.yaxis) if axes.axison else ()
            for axis in shown_axes:
                texts += [tick.label1 for tick in axis._update_ticks()]
        places = {
            f"{n}: {text.get_text()}": text.get_window_extent()
            for n, text in enumerate(texts)
            if text.get_text()
        }
        return figure.bbox, places


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize("case", CASES)
def test_no_text_is_clipped_and_no_text_covers_another(case: str) -> None:
    page, places = drawn_texts(CASES[case])

    assert len(places) >= 3
    for text, place in places.items():
        assert page.x0 <= place.x0 < place.x1 <= page.x1, text
        assert page.y0 <= place.y0 < place.y1 <= page.y1, text
    for (one, a), (other, b) in combinations(places.items(), 2):
        assert not a.overlaps(b), (one, other)


def test_writes_svg_and_png_for_each_repository(tmp_path: Path) -> None:
    written = draw_charts([repository(3, name="a/b"), repository(2, name="a b")], tmp_path / "new" / "charts")

    assert [svg.name for svg, _ in written] == ["a-b.svg", "a-b-2.svg"]
    for svg, png in written:
        assert svg.read_text().startswith("<?xml")
        with Image.open(png) as picture:
            assert picture.size == (1650, 930)


def test_file_names_are_plain_short_and_different() -> None:
    names = ["a b/c", "A b-c", "...", "项目", "-rf", "x" * 300]

    stems = ["a-b-c", "A-b-c-2", "repository", "repository-2", "rf", "x" * 80]

    assert file_stems(names) == stems


def test_the_same_samples_give_the_same_files(tmp_path: Path) -> None:
    (first,) = draw_charts([repository()], tmp_path / "first")
    (second,) = draw_charts([repository()], tmp_path / "second")

    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_dates_out_of_order_are_drawn_in_order(tmp_path: Path) -> None:
    straight = repository(20)
    shuffled = RepositoryLines("/srv/project", "project", [*straight.samples[10:], *straight.samples[:10]])
    (first,) = draw_charts([straight], tmp_path / "first")
    (second,) = draw_charts([shuffled], tmp_path / "second")

    assert first[1].read_bytes() == second[1].read_bytes()


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ChartNotWritten) as refusal:
        draw_charts([repository(2)], tmp_path / "file" / "charts")

    assert str(refusal.value) == f"chart {tmp_path}/file/charts: Not a directory"


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "project.svg").mkdir()

    with pytest.raises(ChartNotWritten, match=r"project\.svg: Is a directory$"):
        draw_charts([repository(2)], tmp_path)


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([], []),
        ([0.5], [0.5]),
        ([-1.0], [0.0]),
        ([2.0], [1.0]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.5, 0.6]),
        ([0.99, 1.0, 1.0], [0.8, 0.9, 1.0]),
        ([0.0, 0.0, 0.05], [0.0, 0.1, 0.2]),
    ],
)
def test_labels_keep_their_distance(wanted: list[float], placed: list[float]) -> None:
    assert spread(wanted, gap=0.1, low=0.0, high=1.0) == pytest.approx(placed)
