"""Enqueueing through Django's own connection: the job exists if, and only if, the transaction commits."""

from typing import Any, Final, overload

from django.db import connections, transaction
from typing_extensions import Unpack

from jsworker.client.enqueueing import enqueue_statement, kind_name
from jsworker.client.sync_client import SyncJobClient
from jsworker.contrib.django.configuration import database_alias, jsworker_settings, sources
from jsworker.core.enqueue_options import EnqueueOptions
from jsworker.core.errors import TransitionRefused
from jsworker.core.names import shown
from jsworker.core.processor import Payload, ProcessorOf
from jsworker.core.settings import Settings
from jsworker.ownership.pool import for_psycopg
from jsworker.ownership.transitions.enqueue import Enqueued

_TRIES: Final = 3


_clients: Final[dict[frozenset[tuple[str, str]], SyncJobClient]] = {}


def jobs_client() -> SyncJobClient:
    """Return this process's client, with Django's settings, for operations other than enqueueing.

    All threads share it. It does not use Django's connections; see ``SyncJobClient``.
    """
    made_of = sources()
    return _clients.get(made_of) or _clients.setdefault(made_of, SyncJobClient(jsworker_settings()))


def close_clients() -> None:
    """Close the clients that ``jobs_client`` has returned; the next call of it returns a new one."""
    while _clients:
        _clients.popitem()[1].close()


@overload
def enqueue(
    kind: type[ProcessorOf[Payload, Any]],
    payload: Payload,
    *,
    unique_key: str | None = None,
    using: str | None = None,
    **options: Unpack[EnqueueOptions],
) -> Enqueued: ...


@overload
def enqueue(
    kind: str,
    payload: Any,
    *,
    unique_key: str | None = None,
    using: str | None = None,
    **options: Unpack[EnqueueOptions],
) -> Enqueued: ...


def enqueue(
    kind: str | type[Any],
    payload: Any,
    *,
    unique_key: str | None = None,
    using: str | None = None,
    **options: Unpack[EnqueueOptions],
) -> Enqueued:
    """Enqueue a job in the open transaction; without one, in a transaction of its own.

    After the commit it is published: in the background if ``NATS_URL`` is set, else by a worker within half a
    second, and always by a worker after a transaction of over five seconds, or while autocommit is off and no
    ``atomic`` block is open.

    Args:
        kind: the kind, or its processor, which checks the payload.
        payload: what the processor gets.
        unique_key: at most one live job of the kind has it.
        using: alias of the connection; None: ``JSWORKER["DATABASE"]``. Others must lead to the same database.
        options: see ``EnqueueOptions``.

    Returns:
        The job's id, and whether it was created; if not, the id is that of the job that has the unique key:
        a live one, or with ``unique_for`` perhaps one that has ended.

    Raises:
        InvalidName, InvalidPayload, InvalidJson, ValueError, TypeError: as ``enqueue_statement``.
        TransitionRefused: the key was taken and freed again several times in a row.
        DatabaseError: Django's, of the statement.
    """
    client = jobs_client()
    most = client.settings.max_payload_bytes
    statement = enqueue_statement(
        kind, payload, unique_key=unique_key, max_payload_bytes=most, codec=client.codec, **options
    )
    connection = connections[using or database_alias()]
    with connection.cursor() as cursor:
        for _ in range(_TRIES):
            cursor.execute(*for_psycopg(statement))
            if row := cursor.fetchone():
                _publish_after_commit(connection, client.settings)
                return Enqueued(*row[:2])
    held = f"unique key {shown(unique_key)} of kind {kind_name(kind)}"
    raise TransitionRefused(f"{held} is taken and freed too fast; try again")


def _publish_after_commit(connection: Any, settings: Settings) -> None:
    """Publish this transaction's jobs after its commit, once for all of them, if ``NATS_URL`` is set."""
    if not settings.nats_is_set or any(call is _publish for _, call, *_ in connection.run_on_commit):
        return
    # Django calls nothing after a commit of transactions that the application begins and ends by itself.
    if not (connection.in_atomic_block or connection.get_autocommit()):
        return
    # robust=True: errors are only logged. The rows are committed, and workers publish what is left.
    transaction.on_commit(_publish, using=connection.alias, robust=True)


def _publish() -> None:
    jobs_client().publish_pending(wait=False)
