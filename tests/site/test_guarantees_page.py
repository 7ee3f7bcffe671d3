"""docs/guarantees.md, docs/enqueueing.md, docs/monitoring.md: their code does what they say."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from jsworker import JobClient, Settings, Worker
from tests.support.documents import Page


@pytest.fixture
def _words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module of the first example."""
    (tmp_path / "words.py").write_text(Page("README.md").blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "words", raising=False)
    yield
    sys.modules.pop("words", None)  # other pages have a module of this name, too


async def test_rows_are_committed_with_the_completion(settings: Settings) -> None:
    page = Page("docs/guarantees.md").names()
    with psycopg.connect(settings.database_dsn(), autocommit=True) as connection:
        connection.execute('CREATE TABLE receipts ("order" text PRIMARY KEY)')
        async with Worker([page["Pay"], page["PayPatiently"]], settings), JobClient(settings) as client:
            for kind in ("Pay", "PayPatiently"):
                job = await client.enqueue(page[kind], page["Order"](order=kind))
                assert await job.result(60) == {"paid": True}
        rows = connection.execute('SELECT "order" FROM receipts ORDER BY "order"').fetchall()
    assert rows == [("Pay",), ("PayPatiently",)]


@pytest.mark.usefixtures("_words")
async def test_every_way_to_enqueue_makes_a_job(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Page("docs/enqueueing.md").names()
    engine = create_async_engine(settings.database_dsn().replace("postgresql:", "postgresql+psycopg:"))
    await page["count"]("so much to count", async_sessionmaker(engine))
    await engine.dispose()
    with psycopg.connect(settings.database_dsn()) as connection:
        found = connection.execute(
            "SELECT status, count(*) FROM jsworker.jobs WHERE kind = 'count-words' GROUP BY 1 ORDER BY 1"
        ).fetchall()
    assert found == [("queued", 1001), ("scheduled", 1)]
    assert capsys.readouterr().out.endswith(" new\n")


@pytest.mark.usefixtures("_words", "settings")
async def test_an_application_has_figures_of_its_worker() -> None:
    page = Page("docs/monitoring.md").names()
    async with page["worker"]:
        names = {family.name for family in page["registry"].collect()}
    assert {"jsworker_heartbeat_lag_seconds", "jsworker_runs_ended"} <= names
