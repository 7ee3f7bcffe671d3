"""Alembic's entry: migrates schema jsworker over the connection that `jsworker db` hands in."""

from alembic import context
from jsworker.ownership.upgrading import run_migrations

run_migrations(context)
