"""Queries to a database from outside, made only when they cannot slow down what is measured."""

from typing import LiteralString

import psycopg


async def count(url: str, question: LiteralString) -> int:
    """Return the one number of a statement."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        row = await (await connection.execute(question)).fetchone()
    if row is None:
        raise ValueError(f"no row: {question}")
    return int(row[0])


async def times(url: str, question: LiteralString) -> dict[str, float]:
    """Return the rows (id, seconds) of a statement."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        rows = await (await connection.execute(question)).fetchall()
    return {str(row[0]): float(row[1]) for row in rows}


def tidy(url: str) -> None:
    """Vacuum and checkpoint now: PostgreSQL itself would do so within a minute, in the middle of a run."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM (ANALYZE)")
        connection.execute("CHECKPOINT")
