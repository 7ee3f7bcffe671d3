"""Facts of an examination: PostgreSQL, NATS and monitoring ports are asked at the same time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from jsworker.core.errors import JsworkerError, MigrationMissing, SettingsError
from jsworker.core.settings import Settings
from jsworker.doctor.monitoring import ServerConfiguration, read_configuration
from jsworker.ownership.database import Database, check_level
from jsworker.ownership.queries.job_report import Rows, read_rows
from jsworker.ownership.queries.schema_report import Schema, read_schema
from jsworker.ownership.queries.server_report import (
    Link,
    MissingRight,
    OpenTransaction,
    Server,
    read_link,
    read_missing_rights,
    read_oldest_transaction,
    read_server,
)
from jsworker.stream.diagnostics import ConsumerReport, Inspector, NatsServer, StreamReport

T = TypeVar("T")

LATE_SECONDS: Final = 30.0
"""A relay publishes and promotes within a second; what is due for so long has none."""

_STATEMENT_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 3.0
_ASKED: Final = 60
"""Workers that are asked how they publish; those that were seen last."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why something could not be learnt, in words that follow a "because"."""

    because: str


Learnt: TypeAlias = T | Unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What was learnt; of PostgreSQL, of NATS, and of monitoring ports.

    Attributes:
        place: where PostgreSQL is, for messages.
        oldest: the oldest open transaction; None: there is none, or none that may be seen.
        account: known when JetStream answers.
        unconsumed: messages by subject, of subjects that no consumer takes.
        refused: workers that say that JetStream stores none of their messages.
    """

    settings: Settings
    place: str
    server: Learnt[Server]
    link: Learnt[Link]
    oldest: Learnt[OpenTransaction | None]
    revision: Learnt[str | None]
    rights: Learnt[list[MissingRight]]
    schema: Learnt[Schema]
    rows: Learnt[Rows]
    nats: Learnt[NatsServer]
    account: Learnt[object]
    stream: Learnt[StreamReport | None]
    consumers: Learnt[list[ConsumerReport]]
    unconsumed: Learnt[Mapping[str, int]]
    refused: Learnt[list[str]]
    monitoring: Mapping[str, Learnt[ServerConfiguration]]


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Database]:
    """Open the database of these settings, with time for slow statements; nothing connects yet."""
    statement_timeout = max(settings.statement_timeout, _STATEMENT_SECONDS)
    database = Database(settings.database_dsn(), statement_timeout=statement_timeout)
    try:
        yield database
    finally:
        await database.close()


async def gather(settings: Settings, monitoring: Sequence[str]) -> Facts:
    """Return what can be learnt; never fails because a server does not answer."""
    async with opened(settings) as database:
        inspector = Inspector(settings)
        postgres = asyncio.create_task(_of_postgres(database))
        configurations = asyncio.create_task(_of_monitoring(monitoring))
        try:
            nats = await _learn(_connect(inspector))
            of_postgres = await postgres
            return Facts(
                settings=settings,
                place=database.place,
                **of_postgres,
                nats=nats,
                **await _of_nats(inspector, nats, of_postgres["rows"]),
                monitoring=await configurations,
            )
        finally:
            postgres.cancel()
            configurations.cancel()
            await asyncio.gather(postgres, configurations, return_exceptions=True)
            await inspector.close()


def served_kinds(rows: Rows) -> list[str]:
    """Return the kinds of the workers that are alive."""
    return sorted({kind for worker in rows.workers if worker.alive for kind in worker.kinds})


async def _of_postgres(database: Database) -> dict[str, Learnt[Any]]:
    server = await _learn(read_server(database))
    if isinstance(server, Unknown):
        names = ("link", "oldest", "revision", "rights", "schema", "rows")
        return {"server": server} | dict.fromkeys(names, Unknown("PostgreSQL cannot be used"))
    revision = await _learn(database.migrated_to())
    facts: dict[str, Learnt[Any]] = {
        "server": server,
        "link": await _learn(read_link(database)),
        "oldest": await _learn(read_oldest_transaction(database)),
        "revision": revision,
    }
    no_tables = _why_no_tables(revision)
    if no_tables is not None:
        return facts | dict.fromkeys(("rights", "schema", "rows"), no_tables)
    return facts | {
        "rights": await _learn(read_missing_rights(database)),
        "schema": await _learn(read_schema(database)),
        "rows": await _learn(read_rows(database, late_after=LATE_SECONDS)),
    }


def _why_no_tables(revision: Learnt[str | None]) -> Unknown | None:
    if isinstance(revision, Unknown):  # it may be that only this one table is closed to the role
        return None
    try:
        check_level(revision)
    except MigrationMissing:
        return Unknown("the database is not migrated to this version")
    return None


async def _connect(inspector: Inspector) -> NatsServer:
    await inspector.connect(_CONNECT_SECONDS)
    return await inspector.server()


async def _of_nats(
    inspector: Inspector, nats: Learnt[NatsServer], rows: Learnt[Rows]
) -> dict[str, Learnt[Any]]:
    if isinstance(nats, Unknown):
        names = ("account", "stream", "consumers", "unconsumed", "refused")
        return dict.fromkeys(names, Unknown("NATS cannot be used"))
    kinds = [] if isinstance(rows, Unknown) else served_kinds(rows)
    found: dict[str, Learnt[Any]] = {
        "account": await _learn(inspector.account()),
        "stream": await _learn(inspector.stream()),
    }
    if isinstance(rows, Unknown):
        found["refused"] = Unknown("which workers there are is not known")
    else:
        alive = [worker.id for worker in rows.workers if worker.alive]
        found["refused"] = await _learn(inspector.refused(alive[:_ASKED]))
    match found["stream"]:
        case Unknown():
            consumers: Learnt[Any] = Unknown("the stream cannot be looked at")
        case None:
            consumers = Unknown("there is no stream")
        case _:
            consumers = await _learn(inspector.consumers(kinds))
    unconsumed = (
        consumers if isinstance(consumers, Unknown) else await _learn(inspector.unconsumed_subjects())
    )
    return found | {"consumers": consumers, "unconsumed": unconsumed}


async def _of_monitoring(addresses: Sequence[str]) -> dict[str, Learnt[ServerConfiguration]]:
    found = await asyncio.gather(*(_learn(read_configuration(address)) for address in addresses))
    return dict(zip(addresses, found, strict=True))


async def _learn(reading: Coroutine[Any, Any, T]) -> Learnt[T]:
    try:
        return await reading
    except SettingsError:
        raise
    except JsworkerError as error:
        return Unknown(" ".join(str(error).split()))
