"""The commands of the quick start and the tutorial, typed as they stand, in an empty folder."""

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, commands_of, files_of
from tests.docs.session import Session

TUTORIAL = ["tutorial/1-outbox.md", "tutorial/2-crash.md", "tutorial/3-watch.md"]


@pytest.mark.parametrize(
    "pages",
    [
        ["start/quickstart.md"],
        pytest.param(TUTORIAL, marks=pytest.mark.thorough),
    ],
)
def test_every_command_does_what_the_page_says(pages: list[str], tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        for page in pages:
            session.write(files_of(page))
            for command in commands_of((DOCS / page).read_text()):
                session.run(command)
