"""Rows as the demo might find them."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.ownership.rows import Sql


@pytest.fixture
def sql(database_url: str) -> Iterator[Sql]:
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        yield connection
