"""The logins of the fault suite's short form: everybody behind the shipped roles and users."""

import asyncio
from contextlib import suppress
from functools import partial

from jsworker.core.errors import JsworkerError
from jsworker.core.events import Events
from jsworker.core.priorities import HIGH, LOW, NORMAL
from jsworker.core.settings import Settings
from jsworker.ownership.database import Database
from jsworker.ownership.transitions.workers import installation_id
from jsworker.ownership.upgrading import upgrade_database
from jsworker.stream.jetstream import Stream
from jsworker.stream.message import consumer_of
from tests.faults.records import ROLE, prepare
from tests.faults.stores import PREFIX, STREAM, Access, Stores
from tests.faults.workload import KINDS
from tests.security.guarded import (
    HARNESS,
    apply_roles,
    make_logins,
    nats_permissions,
    nats_user,
    with_passwords,
)

LOGINS = {"owner": "faults_deploy", "worker": ROLE, "producer": "faults_producer"}


def migrate(stores: Stores) -> None:
    apply_roles(stores.admin_url)
    make_logins(stores.admin_url, LOGINS)
    upgrade_database(stores.url_of(LOGINS["owner"]))
    apply_roles(stores.admin_url)
    prepare(stores.admin_url, rights="")


async def operate(stores: Stores, ack_wait: float) -> None:
    """Make stream and consumers, and again after they were lost: what the operator's user is for."""
    settings = Settings(
        database_url=stores.url_of(ROLE),
        nats_url=stores.nats_url,
        stream=STREAM,
        subject_prefix=PREFIX,
        ack_wait=ack_wait,
        **nats_user("operator"),
    )
    while True:
        with suppress(JsworkerError):  # a server is away
            await ensure(settings)
        await asyncio.sleep(0.5)


async def ensure(settings: Settings) -> None:
    database = Database(settings.database_dsn(), statement_timeout=2.0)
    try:
        installation = await installation_id(database)
    finally:
        await database.close()
    stream = Stream(settings, installation_id=installation, events=Events(), client_name="operator")
    await stream.connect(timeout=2.0)
    try:
        await stream.ensure([consumer_of(each.kind, lane) for each in KINDS for lane in (NORMAL, HIGH, LOW)])
    finally:
        await stream.close()


def least_rights(ack_wait: float) -> Access:
    """Return the least rights that are shipped, for consumers with an ``ack_wait`` of so many seconds."""
    return Access(
        fleet=nats_user("worker"),
        producers=nats_user("producer"),
        harness=HARNESS,
        producer_role=LOGINS["producer"],
        nats_config=with_passwords(nats_permissions(stream=STREAM, prefix=PREFIX)),
        migrate=migrate,
        operate=partial(operate, ack_wait=ack_wait),
    )
