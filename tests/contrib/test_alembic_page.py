"""docs/alembic.md: its statements work with every driver, its env.py leaves jsworker's tables alone."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from alembic import command
from jsworker import enqueue_statement
from jsworker.core.settings import Settings
from tests.support.documents import Page, names_of, run_line
from tests.worker.rows import Rows

PAGE = Page("docs/alembic.md")
ENQUEUES, ENV, MODELS = PAGE.blocks("python")


@pytest.fixture
def names() -> dict[str, Any]:
    return names_of(ENQUEUES)


@pytest.fixture
async def orders(rows: Rows) -> None:
    await rows.query("CREATE TABLE orders (number int PRIMARY KEY)")


def url(settings: Settings, driver: str) -> str:
    return settings.database_dsn().replace("postgresql://", f"postgresql+{driver}://")


TERMS: list[dict[str, Any]] = [
    {"unique_key": "a"},
    {"unique_key": "b", "unique": "waiting"},
    {"unique_key": "c", "unique_for": 60},
    {"unique_key": "d", "debounce": 60, "debounce_max": 600},
    {"delay": 60, "expires_in": 600, "priority": "high", "limit_key": "acme", "max_attempts": 2},
]


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_async_drivers(settings: Settings, rows: Rows, names: dict[str, Any], driver: str) -> None:
    engine = create_async_engine(url(settings, driver))
    async with AsyncSession(engine) as session:
        job = await names["place_order"](session, 7)
        with pytest.raises(Exception, match="orders_pkey"):
            await names["place_order"](session, 7)
        for terms in TERMS:
            first = (await session.execute(enqueue_statement("terms", {"ü": [1, None]}, **terms))).one()
            again = (await session.execute(enqueue_statement("terms", {"ü": []}, **terms))).one()
            assert (first.created, again.created) == (True, "unique_key" not in terms)
        await session.commit()
    await engine.dispose()
    assert [
        str(row["id"]) for row in await rows.query("SELECT id FROM jsworker.jobs WHERE kind <> 'terms'")
    ] == [job]
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 7


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
async def test_blocking_drivers(settings: Settings, rows: Rows, names: dict[str, Any], driver: str) -> None:
    engine = create_engine(url(settings, driver))
    with engine.connect() as connection:
        job = names["place_order_plainly"](connection, 7)
        with pytest.raises(Exception, match="orders_pkey"):
            names["place_order_plainly"](connection, 7)
        for terms in TERMS:
            first = connection.execute(enqueue_statement("terms", {"ü": ["100 %", None]}, **terms)).one()
            again = connection.execute(enqueue_statement("terms", {"ü": []}, **terms)).one()
            assert (first.created, again.created) == (True, "unique_key" not in terms)
        connection.commit()
    engine.dispose()
    assert [
        str(row["id"]) for row in await rows.query("SELECT id FROM jsworker.jobs WHERE kind <> 'terms'")
    ] == [job]
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 7


Project = Callable[[str], Config]


@pytest.fixture
def project(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Makes an Alembic project of an ``env.py``, and the models of the page."""
    (tmp_path / "my_app").mkdir()
    (tmp_path / "my_app" / "__init__.py").touch()
    (tmp_path / "my_app" / "models.py").write_text(MODELS)
    (tmp_path / "migrations" / "versions").mkdir(parents=True)
    template = Path(__file__).parents[2] / "alembic" / "script.py.mako"
    (tmp_path / "migrations" / "script.py.mako").write_text(template.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_app", "my_app.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def make(env: str) -> Config:
        (tmp_path / "migrations" / "env.py").write_text(env)
        config = Config()
        config.set_main_option("script_location", str(tmp_path / "migrations"))
        config.set_main_option("path_separator", "os")
        config.set_main_option("sqlalchemy.url", url(settings, "psycopg"))
        return config

    return make


def generated(config: Config) -> str:
    script = command.revision(config, "what autogenerate finds", autogenerate=True)
    return Path(script.path).read_text()  # type: ignore[union-attr]  # one revision


async def test_autogenerate_finds_the_applications_tables_and_no_others(project: Project, rows: Rows) -> None:
    config = project(ENV)
    text = generated(config)
    assert re.findall(r"op\.(\w+)\('?\"?(\w+)", text) == [("create_table", "orders")]
    assert "'jsworker.jobs.id'" in text
    command.upgrade(config, "head")
    assert await rows.value("SELECT count(*) FROM orders") == 0
    command.check(config)
    assert await rows.value("SELECT count(*) FROM jsworker.jobs") == 0


async def test_without_the_recipe_it_drops_jsworkers_tables(project: Project) -> None:
    own = ENV.replace("include_name=include_name,", "").replace("include_object=include_object,", "")
    assert "op.drop_table('job_events', schema='jsworker')" in generated(project(own))


async def test_without_schemas_the_tables_are_not_seen(project: Project) -> None:
    own = ENV.replace("include_name=include_name,", "").replace("include_schemas=True,", "")
    assert "schema='jsworker'" not in generated(project(own))


def test_its_commands_print_sql(capsys: pytest.CaptureFixture[str]) -> None:
    [commands] = PAGE.blocks("sh")
    for line in commands.splitlines():
        assert run_line(line) == 0
        assert "COMMIT;" in capsys.readouterr().out
