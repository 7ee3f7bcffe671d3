"""Facts of an examination: what PostgreSQL and NATS answer, or why they do not."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, TypeAlias, TypeVar
from uuid import UUID

from jsworker.core.clock import boottime
from jsworker.core.errors import JsworkerError, MigrationMissing, SettingsError
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database, check_level
from jsworker.ownership.queries import job_report
from jsworker.ownership.queries.job_report import (
    DeadMessages,
    EndedSample,
    KeyLimit,
    Late,
    LeftBatches,
    QueuedKind,
    RefusalGroup,
    RegisteredWorker,
    SchedulesOfKind,
    SilentOwner,
    Statement,
)
from jsworker.ownership.queries.server_report import (
    Holder,
    Link,
    MissingRight,
    Schema,
    Server,
    read_holders,
    read_link,
    read_missing_rights,
    read_schema,
    read_server,
)
from jsworker.ownership.transitions import republish
from jsworker.ownership.transitions.republish import Posted
from jsworker.stream.diagnostics import ConsumerReport, Inspector, NatsServer, StreamReport

T = TypeVar("T")

LATE_SECONDS: Final = 30.0
"""A relay publishes and promotes within a second: if a job is overdue for so long, no relay runs, or NATS
does not take its message."""

_STATEMENT_SECONDS: Final = 10.0
_ALL_SECONDS: Final = 30.0
_LEAST_SECONDS: Final = 1.0
_CONNECT_SECONDS: Final = 3.0
_POSTED: Final = 300
_ASKED: Final = 60
"""At most so many workers are asked whether they can publish: those that were seen last."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why something could not be learnt, in words that follow a "because".

    Attributes:
        failed: whether the question itself failed; else a finding of its own tells what is wrong.
    """

    because: str
    failed: bool = False


Learnt: TypeAlias = T | Unknown
Login: TypeAlias = Literal["worker", "dashboard"]
"""What a login is for: a worker writes, a dashboard may be there to read alone."""

NO_POSTGRESQL: Final = Unknown("PostgreSQL cannot be used")
NO_NATS: Final = Unknown("NATS cannot be used")


@dataclass(kw_only=True, slots=True)
class Facts:
    """What was learnt of PostgreSQL and of NATS.

    Attributes:
        place: where PostgreSQL is, for messages.
        login: what this login of PostgreSQL is for, and so which rights it needs.
        installation: id that pairs this database with its stream; None: it has not been created yet.
        unpublished: queued jobs whose message is due and was not sent.
        overdue: scheduled jobs that are due and were not queued.
        posted: the oldest queued jobs whose message was published.
        unconsumed: number of messages by subject, for subjects that no consumer takes.
        refused: ids of workers that report that JetStream does not store their messages.
        answered_for_unknown_worker: something answers for a worker that has never lived.
    """

    settings: Settings
    place: str
    login: Login = "worker"
    server: Learnt[Server] = NO_POSTGRESQL
    link: Learnt[Link] = NO_POSTGRESQL
    revision: Learnt[str | None] = NO_POSTGRESQL
    rights: Learnt[list[MissingRight]] = NO_POSTGRESQL
    schema: Learnt[Schema] = NO_POSTGRESQL
    holders: Learnt[Sequence[Holder]] = NO_POSTGRESQL
    installation: Learnt[UUID | None] = NO_POSTGRESQL
    registered: Learnt[Sequence[RegisteredWorker]] = NO_POSTGRESQL
    unpublished: Learnt[Late] = NO_POSTGRESQL
    overdue: Learnt[Late] = NO_POSTGRESQL
    queues: Learnt[Sequence[QueuedKind]] = NO_POSTGRESQL
    posted: Learnt[Sequence[Posted]] = NO_POSTGRESQL
    schedules: Learnt[Sequence[SchedulesOfKind]] = NO_POSTGRESQL
    limits: Learnt[Sequence[KeyLimit]] = NO_POSTGRESQL
    left_batches: Learnt[LeftBatches] = NO_POSTGRESQL
    silent_owners: Learnt[Sequence[SilentOwner]] = NO_POSTGRESQL
    refusals: Learnt[Sequence[RefusalGroup]] = NO_POSTGRESQL
    ended: Learnt[EndedSample] = NO_POSTGRESQL
    dead_messages: Learnt[DeadMessages] = NO_POSTGRESQL
    nats: Learnt[NatsServer] = NO_NATS
    stream: Learnt[StreamReport | None] = NO_NATS
    consumers: Learnt[list[ConsumerReport]] = NO_NATS
    unconsumed: Learnt[Mapping[str, int]] = NO_NATS
    refused: Learnt[list[str]] = NO_NATS
    answered_for_unknown_worker: Learnt[bool] = NO_NATS


def opened(settings: Settings) -> Database:
    """Return the database of these settings, not connected yet, with at least 10 s for each statement."""
    statement_timeout = max(settings.statement_timeout, _STATEMENT_SECONDS)
    return Database(settings.database_dsn(), statement_timeout=statement_timeout)


async def gather(settings: Settings, login: Login = "worker") -> Facts:
    """Return what can be learnt; never fails because a server does not answer."""
    async with opened(settings) as database:
        facts = Facts(settings=settings, place=database.place, login=login)
        await _ask_postgresql(database, facts)
    inspector = Inspector(settings)
    try:
        facts.nats = await _learn(_connect(inspector))
        if not isinstance(facts.nats, Unknown):
            await _ask_nats(inspector, facts)
    finally:
        await inspector.close()
    return facts


def served_kinds(registered: Sequence[RegisteredWorker]) -> list[str]:
    """Return the kinds of the live workers that claim jobs: neither drained nor ending."""
    working = (worker for worker in registered if worker.alive and worker.state == "running")
    return sorted({kind for worker in working for kind in worker.kinds})


async def _ask_postgresql(database: Database, facts: Facts) -> None:
    facts.server = await _learn(read_server(database))
    if isinstance(facts.server, Unknown):
        return
    facts.link = await _learn(read_link(database))
    facts.revision = await _learn(database.migrated_to())
    if not isinstance(facts.revision, Unknown):  # else the role may lack rights on this table alone
        try:
            check_level(facts.revision)
        except MigrationMissing:
            not_migrated = Unknown("the database is not migrated to this version")
            for each in fields(facts):
                if getattr(facts, each.name) is NO_POSTGRESQL:  # not asked for yet: a fact of the tables
                    setattr(facts, each.name, not_migrated)
            return
    facts.rights = await _learn(read_missing_rights(database))
    facts.schema = await _learn(read_schema(database))
    await _ask_for_rows(database, facts)
    facts.holders = await _learn(read_holders(database))  # last, to see what the other questions wait for


async def _ask_for_rows(database: Database, facts: Facts) -> None:
    """Read facts from the rows. Each query has its own timeout, so that a slow one does not stop the others.

    A query gets at most 10 s of the 30 s for all of them; when these are used up, it still gets 1 s.
    """
    ends_at = boottime() + _ALL_SECONDS

    async def every(
        statement: Statement, row: Callable[..., T], values: Mapping[str, Any] | None = None
    ) -> Learnt[list[T]]:
        seconds = max(_LEAST_SECONDS, min(_STATEMENT_SECONDS, ends_at - boottime()))
        found = await _learn(database.run(statement, values, seconds=seconds))
        return found if isinstance(found, Unknown) else [row(*each) for each in found]

    async def only(
        statement: Statement, row: Callable[..., T], values: Mapping[str, Any] | None = None
    ) -> Learnt[T]:
        found = await every(statement, row, values)
        return found if isinstance(found, Unknown) else found[0]

    late = {"older_than": LATE_SECONDS}
    facts.registered = await every(job_report.WORKERS, RegisteredWorker)
    known = [] if isinstance(facts.registered, Unknown) else facts.registered
    served = sorted({kind for worker in known for kind in worker.kinds})
    facts.installation = await only(job_report.INSTALLATION, lambda installation: installation)
    facts.unpublished = await only(job_report.UNPUBLISHED, Late, late)
    facts.overdue = await only(job_report.OVERDUE, Late, late)
    facts.queues = await every(job_report.QUEUED, QueuedKind, {"served": served})
    facts.posted = await _learn(
        republish.posted(database, after=None, older_than=0.0, limit=_POSTED, seconds=_STATEMENT_SECONDS)
    )
    facts.schedules = await every(job_report.SCHEDULES, SchedulesOfKind)
    facts.silent_owners = await every(job_report.SILENT_OWNERS, SilentOwner)
    facts.refusals = await every(job_report.REFUSED, RefusalGroup)
    facts.ended = await only(job_report.ENDED, EndedSample)
    facts.dead_messages = await only(job_report.DEAD_MESSAGES, DeadMessages)
    facts.left_batches = await only(job_report.LEFT_BATCHES, LeftBatches)
    facts.limits = await every(job_report.LIMITS, KeyLimit, {"after_kind": "", "after_key": ""})


async def _connect(inspector: Inspector) -> NatsServer:
    await inspector.connect(_CONNECT_SECONDS)
    return await inspector.server()


async def _ask_nats(inspector: Inspector, facts: Facts) -> None:
    kinds: list[str] = []
    if isinstance(facts.registered, Unknown):
        facts.refused = Unknown("which workers there are is not known")
    else:
        kinds = served_kinds(facts.registered)
        alive = [worker.id for worker in facts.registered if worker.alive]
        facts.refused = await _learn(inspector.refused(alive[:_ASKED]))
    facts.answered_for_unknown_worker = await _learn(inspector.answered_for_unknown_worker())
    facts.stream = await _learn(inspector.stream())
    if isinstance(facts.stream, Unknown):
        facts.consumers = facts.unconsumed = Unknown("the stream cannot be looked at")
    elif facts.stream is None:
        facts.consumers = facts.unconsumed = Unknown("there is no stream")
    else:
        facts.consumers = await _learn(inspector.consumers(kinds))
        facts.unconsumed = await _learn(inspector.unconsumed_subjects())


async def _learn(reading: Coroutine[Any, Any, T]) -> Learnt[T]:
    try:
        return await reading
    except SettingsError:
        raise
    except JsworkerError as error:
        return Unknown(" ".join(str(error).split()), failed=True)
