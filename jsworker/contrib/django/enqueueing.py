"""Enqueueing through Django's own connection: the job is there if, and only if, the transaction commits."""

from typing import Any, Final

from django.db import connections
from typing_extensions import Unpack

from jsworker.client.enqueueing import EnqueueOptions, Kind, enqueue_statement, kind_name
from jsworker.contrib.django.configuration import database_alias, jsworker_settings
from jsworker.core.errors import TransitionRefused
from jsworker.core.names import shown
from jsworker.ownership.driver_sql import for_psycopg
from jsworker.ownership.transitions.enqueue import Enqueued

_TRIES: Final = 3


def enqueue(
    kind: Kind,
    payload: Any,
    *,
    unique_key: str | None = None,
    using: str | None = None,
    **options: Unpack[EnqueueOptions],
) -> Enqueued:
    """Enqueue a job in the transaction that is open, else in one of its own; once committed it is published.

    Args:
        kind: the kind, or its processor, which checks the payload.
        payload: what the processor gets.
        unique_key: at most one live job of the kind has it.
        using: alias of the connection; None: ``JSWORKER["DATABASE"]``. Another must lead to that database.
        options: see ``EnqueueOptions``.

    Returns:
        The job's id, and whether it was created or a live one holds the unique key.

    Raises:
        InvalidName, InvalidPayload, InvalidJson, ValueError, TypeError: as ``enqueue_statement``.
        TransitionRefused: the key was taken and freed again several times in a row.
        DatabaseError: Django's, of the statement.
    """
    most = jsworker_settings().max_payload_bytes
    statement = enqueue_statement(kind, payload, unique_key=unique_key, max_payload_bytes=most, **options)
    with connections[using or database_alias()].cursor() as cursor:
        for _ in range(_TRIES):
            cursor.execute(*for_psycopg(statement))
            if row := cursor.fetchone():
                return Enqueued(*row[:2])
    held = f"unique key {shown(unique_key)} of kind {kind_name(kind)}"
    raise TransitionRefused(f"{held} is taken and freed too fast; try again")
