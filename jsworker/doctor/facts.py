"""Facts: all that an examination could learn, and why it could not learn the rest."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from jsworker.core.settings import Settings
from jsworker.doctor.monitoring import ServerConfiguration
from jsworker.ownership.queries.job_report import Rows
from jsworker.ownership.queries.schema_report import Schema
from jsworker.ownership.queries.server_report import Clock, Link, MissingRight, OpenTransaction, Server
from jsworker.stream.diagnostics import AccountState, ConsumerReport, NatsServer, StreamReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why something could not be learnt, in words that follow a "because"."""

    because: str


Learnt: TypeAlias = T | Unknown


@dataclass(frozen=True, slots=True)
class Revision:
    """The migration at which the database is; None: never migrated."""

    found: str | None


@dataclass(frozen=True, slots=True)
class Oldest:
    """The oldest open transaction; None: there is none, or none that may be seen."""

    transaction: OpenTransaction | None


@dataclass(frozen=True, slots=True)
class Found:
    """The stream; None: there is none of this name."""

    stream: StreamReport | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PostgresFacts:
    """What was learnt of PostgreSQL.

    Attributes:
        clock: PostgreSQL's clock beside this machine's; known as soon as the server answers.
    """

    clock: Learnt[Clock]
    link: Learnt[Link]
    server: Learnt[Server]
    oldest: Learnt[Oldest]
    rights: Learnt[list[MissingRight]]
    revision: Learnt[Revision]
    schema: Learnt[Schema]
    rows: Learnt[Rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts(PostgresFacts):
    """What was learnt.

    Attributes:
        place: where PostgreSQL is, for messages.
        monitoring: what each monitoring address told, by the address.
        refused: workers that say that JetStream stores none of their messages.
        unconsumed: messages by subject, of subjects that no consumer takes.
    """

    settings: Settings
    place: str
    nats: Learnt[NatsServer]
    account: Learnt[AccountState]
    stream: Learnt[Found]
    consumers: Learnt[list[ConsumerReport]]
    monitoring: Mapping[str, Learnt[ServerConfiguration]]
    refused: Learnt[list[str]] = field(default_factory=list)
    unconsumed: Learnt[Mapping[str, int]] = field(default_factory=dict)
