"""Reading the facts: PostgreSQL, NATS and the monitoring ports at the same time, as far as they answer."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from jsworker.core.errors import JsworkerError, MigrationMissing, SettingsError
from jsworker.core.settings import Settings
from jsworker.doctor.facts import Facts, Found, Learnt, Oldest, PostgresFacts, Revision, Unknown
from jsworker.doctor.monitoring import ServerConfiguration, read_configuration
from jsworker.ownership.database import Database
from jsworker.ownership.queries.job_report import Rows, read_rows
from jsworker.ownership.queries.schema_report import read_schema
from jsworker.ownership.queries.server_report import (
    read_clock,
    read_link,
    read_missing_rights,
    read_oldest_transaction,
    read_server,
)
from jsworker.ownership.revision import check_level
from jsworker.stream.diagnostics import AccountState, ConsumerReport, Inspector, NatsServer
from jsworker.worker.recovery.earlier_lives import FORGOTTEN_AFTER_SECONDS

T = TypeVar("T")

LATE_SECONDS: Final = 30.0
"""A relay publishes and promotes within a second; what is due for so long has none."""

_PATIENCE_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 3.0
_ASKED: Final = 60
"""Workers that are asked how they publish; those that were seen last."""


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Database]:
    """Open the database of these settings, with the patience of people; nothing connects yet."""
    patience = max(settings.statement_timeout, _PATIENCE_SECONDS)
    database = Database(settings.database_dsn(), statement_timeout=patience)
    try:
        yield database
    finally:
        await database.close()


async def gather(settings: Settings, monitoring: Sequence[str]) -> Facts:
    """Return what can be learnt; never fails because a server does not answer.

    Args:
        settings: what is examined.
        monitoring: addresses of nats-servers' monitoring ports.

    Raises:
        SettingsError: a URL, a credentials file or a certificate of NATS cannot be used.
    """
    async with opened(settings) as database:
        inspector = Inspector(settings)
        postgres = asyncio.create_task(_of_postgres(database))
        configurations = asyncio.create_task(_of_monitoring(monitoring))
        try:
            nats = await _learn(_connect(inspector))
            found = await postgres
            kinds = _kinds_of_workers(found.rows)
            account, stream, consumers = await _of_stream(inspector, nats, kinds)
            return Facts(
                settings=settings,
                place=database.place,
                **{name: getattr(found, name) for name in PostgresFacts.__dataclass_fields__},
                nats=nats,
                account=account,
                stream=stream,
                consumers=consumers,
                unconsumed=consumers
                if isinstance(consumers, Unknown)
                else await _learn(inspector.unconsumed()),
                monitoring=await configurations,
                refused=await _refused(inspector, nats, found.rows),
            )
        finally:
            postgres.cancel()
            configurations.cancel()
            await asyncio.gather(postgres, configurations, return_exceptions=True)
            await inspector.close()


async def _of_postgres(database: Database) -> PostgresFacts:
    clock = await _learn(read_clock(database))
    if isinstance(clock, Unknown):
        away = Unknown("PostgreSQL cannot be used")
        return PostgresFacts(
            clock=clock,
            **dict.fromkeys(("link", "server", "oldest", "rights", "revision", "schema", "rows"), away),
        )
    revision = await _learn(_revision(database))
    no_tables = _why_no_tables(revision)
    late, forgotten = LATE_SECONDS, FORGOTTEN_AFTER_SECONDS
    return PostgresFacts(
        clock=clock,
        link=await _learn(read_link(database)),
        server=await _learn(read_server(database)),
        oldest=await _learn(_oldest(database)),
        rights=await _learn(read_missing_rights(database)) if no_tables is None else no_tables,
        revision=revision,
        schema=await _learn(read_schema(database)) if no_tables is None else no_tables,
        rows=await _learn(read_rows(database, late_after=late, forgotten_after=forgotten))
        if no_tables is None
        else no_tables,
    )


async def _revision(database: Database) -> Revision:
    return Revision(await database.migrated_to())


async def _oldest(database: Database) -> Oldest:
    return Oldest(await read_oldest_transaction(database))


def _why_no_tables(revision: Learnt[Revision]) -> Unknown | None:
    if isinstance(revision, Unknown):  # it may be that only this one table is closed to the role
        return None
    try:
        check_level(revision.found)
    except MigrationMissing:
        return Unknown("the database is not migrated to this version")
    return None


async def _connect(inspector: Inspector) -> NatsServer:
    await inspector.connect(_CONNECT_SECONDS)
    return await inspector.server()


async def _of_stream(
    inspector: Inspector, nats: Learnt[NatsServer], kinds: Sequence[str]
) -> tuple[Learnt[AccountState], Learnt[Found], Learnt[list[ConsumerReport]]]:
    if isinstance(nats, Unknown):
        away = Unknown("NATS cannot be used")
        return away, away, away
    stream = await _learn(_stream(inspector))
    if isinstance(stream, Unknown):
        return await _learn(inspector.account()), stream, Unknown("the stream cannot be looked at")
    if stream.stream is None:
        return await _learn(inspector.account()), stream, Unknown("there is no stream")
    return await _learn(inspector.account()), stream, await _learn(inspector.consumers(kinds))


async def _refused(inspector: Inspector, nats: Learnt[NatsServer], rows: Learnt[Rows]) -> Learnt[list[str]]:
    if isinstance(nats, Unknown):
        return Unknown("NATS cannot be used")
    if isinstance(rows, Unknown):
        return Unknown("which workers there are is not known")
    alive = [worker.id for worker in rows.workers if worker.alive]
    return await _learn(inspector.refused(alive[:_ASKED]))


async def _stream(inspector: Inspector) -> Found:
    return Found(await inspector.stream())


async def _of_monitoring(addresses: Sequence[str]) -> dict[str, Learnt[ServerConfiguration]]:
    found = await asyncio.gather(*(_learn(read_configuration(address)) for address in addresses))
    return dict(zip(addresses, found, strict=True))


def _kinds_of_workers(rows: Learnt[Rows]) -> list[str]:
    if isinstance(rows, Unknown):
        return []
    return sorted({kind for worker in rows.workers if worker.alive for kind in worker.kinds})


async def _learn(reading: Coroutine[Any, Any, T]) -> Learnt[T]:
    try:
        return await reading
    except SettingsError:
        raise
    except JsworkerError as error:
        return Unknown(" ".join(str(error).split()))
