"""docs/sql.md shows the statements as they are."""

from pathlib import Path

from .document_sql import document


def test_the_page_of_statements_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "sql.md"
    assert page.read_text() == document(), "run python -m tests.ownership.document_sql docs/sql.md"
