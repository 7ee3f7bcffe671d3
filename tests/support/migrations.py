"""Migrating a database down, which jsworker leaves to alembic."""

from sqlalchemy import create_engine

from alembic import command
from jsworker.ownership.pool import driver_url
from jsworker.ownership.upgrading import _config, current_revision


def downgrade_database(url: str, revision: str) -> str | None:
    """Migrate a database down to ``revision`` (``base``: to nothing) and return where it is."""
    engine = create_engine(driver_url(url))
    try:
        with engine.begin() as connection:
            command.downgrade(_config(connection), revision)
    finally:
        engine.dispose()
    return current_revision(url)
