"""Which limit keys there may be: what a producer can bring into a row, an operator can act on."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from jsworker import JobClient, Limit
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
async def connection(database_url: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as opened:
        yield opened


async def test_an_operator_can_act_on_each_key_that_a_row_can_have(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    for key in KEPT:
        await connection.execute(ENQUEUE, [KIND, key])
        await connection.execute(INSERT, [uuid4(), KIND, key])
        await client.pause(KIND, key, reason="hostile")
        await client.limits.set(KIND, Limit(3), key=key)
    listed = {each["key"]: each for each in await client.limits.list()}
    for key in KEPT:
        found = listed[key]
        assert (found["max_running"], found["held"], found["reason"]) == (3, 1, "hostile"), ascii(key)
    assert {key.key: key.jobs for key in await waiting_keys(client.database)} == dict.fromkeys(KEPT, 0)
    for key in KEPT:
        await client.resume(KIND, key)
        assert (await client.limits.numbers(KIND, key=key)).max_running == 3
        await client.limits.reset(KIND, key=key)
    rows = await connection.execute("SELECT DISTINCT status FROM jsworker.jobs")
    assert await rows.fetchall() == [("queued",)]


async def test_neither_side_takes_a_key_that_breaks_a_line_or_is_too_long(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    for key in REFUSED:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="limit_key"):
            await connection.execute(ENQUEUE, [KIND, key])
        if key:  # the empty one is that of jobs without a key
            with pytest.raises(psycopg.errors.CheckViolation, match="jobs_limit_key"):
                await connection.execute(INSERT, [uuid4(), KIND, key])
        for act in (client.pause, client.resume, client.limits.reset):
            with pytest.raises(InvalidName, match="limit key"):
                await act(KIND, key=key)
        with pytest.raises(InvalidName, match="limit key"):
            await client.limits.set(KIND, Limit(3), key=key)


async def test_a_held_row_without_a_key_holds_up_no_other(
    connection: psycopg.AsyncConnection[tuple[Any, ...]], client: JobClient
) -> None:
    for kind, key in ((KIND, None), (f"{KIND}-2", "acme")):
        await connection.execute(INSERT, [uuid4(), kind, key])
    found = await waiting_keys(client.database)
    assert [(each.kind, each.key) for each in found] == [(f"{KIND}-2", "acme")]
