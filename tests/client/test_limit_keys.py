"""Which limit keys there may be: what a producer can bring into a row, an operator can act on."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from jsworker import Limit
from jsworker.client import JobClient
from jsworker.core.errors import InvalidName
from jsworker.ownership.transitions.admission import waiting_keys

KIND = "of-hostile-keys"
KEPT = [
    "acme",
    " ",
    " acme ",
    "\u00a0",
    "\u00a0acme\u00a0",
    "\u3000acme",
    "a\u200bb",
    "\u202eemca",
    "\ufeffacme",
    "\ue000",
    "\U000e0001",
    "\U0001fae8\U0001f600",
    "a\u0301",
    "--all",
    "%s {0} $1 ; DROP TABLE jsworker.limits",
    "\u00e9" * 255,
]
REFUSED = ["", "a\nb", "\t", "a\r", "\x1b[31m", "\x7f", "\x85", "\x9f", "\u2028", "\u2029", "k" * 256]

ENQUEUE = "SELECT id FROM jsworker.enqueue(%s, '{}', limit_key => %s)"
INSERT = """
INSERT INTO jsworker.jobs (id, kind, payload, status, dispatch, queued_at, held_by, held_at, limit_key)
VALUES (%s, %s, '{}', 'scheduled', 1, now(), 'limit', now(), %s)
"""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        yield connection
        await connection.execute("DELETE FROM jsworker.jobs WHERE kind = %s", [KIND])
        await connection.execute("DELETE FROM jsworker.limits WHERE kind = %s", [KIND])


@pytest.mark.parametrize("key", KEPT, ids=ascii)
async def test_an_operator_can_act_on_each_key_that_a_row_can_have(
    key: str, database: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    await database.execute(ENQUEUE, [KIND, key])
    await database.execute(INSERT, [uuid4(), KIND, key])
    await client.pause(KIND, key, reason="hostile")
    await client.limits.set(KIND, Limit(3), key=key)
    [found] = [each for each in await client.limits.list() if (each["kind"], each["key"]) == (KIND, key)]
    assert (found["max_running"], found["held"], found["reason"]) == (3, 1, "hostile")
    waits = [each for each in await waiting_keys(client.database) if each.kind == KIND]
    assert [(each.key, each.jobs) for each in waits] == [(key, 0)]
    await client.resume(KIND, key)
    rows = await database.execute("SELECT status FROM jsworker.jobs WHERE kind = %s", [KIND])
    assert {row[0] for row in await rows.fetchall()} == {"queued"}
    assert (await client.limits.numbers(KIND, key=key)).max_running == 3
    await client.limits.reset(KIND, key=key)


@pytest.mark.parametrize("key", REFUSED, ids=ascii)
async def test_neither_side_takes_a_key_that_breaks_a_line_or_is_too_long(
    key: str, database: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="limit_key"):
        await database.execute(ENQUEUE, [KIND, key])
    if key:  # the empty one is that of jobs without a key
        with pytest.raises(psycopg.errors.CheckViolation, match="jobs_limit_key"):
            await database.execute(INSERT, [uuid4(), KIND, key])
    for act in (client.pause, client.resume):
        with pytest.raises(InvalidName, match="limit key"):
            await act(KIND, key)
    with pytest.raises(InvalidName, match="limit key"):
        await client.limits.set(KIND, Limit(3), key=key)
    with pytest.raises(InvalidName, match="limit key"):
        await client.limits.reset(KIND, key=key)


async def test_a_held_row_without_a_key_holds_up_no_other_kind(
    database: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    for kind, key in ((KIND, None), (f"{KIND}-2", "acme")):
        await database.execute(INSERT, [uuid4(), kind, key])
    try:
        found = [each for each in await waiting_keys(client.database) if each.kind.startswith(KIND)]
        assert [(each.kind, each.key) for each in found] == [(f"{KIND}-2", "acme")]
    finally:
        await database.execute("DELETE FROM jsworker.jobs WHERE kind = %s", [f"{KIND}-2"])
