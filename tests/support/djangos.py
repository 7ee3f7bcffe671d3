"""Django in tests: set up once for a process, on the database of each test."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import django
from asgiref.sync import SyncToAsync
from django.db import connections
from sqlalchemy.engine import make_url

from jsworker.core.errors import MigrationMissing

T = TypeVar("T")

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "django_app.settings")
django.setup()
MigrationMissing.command = "jsworker db upgrade"  # of the other tests in this process

from django.core.management import call_command  # noqa: E402 -- behind the setup

from jsworker.contrib.django.enqueueing import _clients  # noqa: E402 -- as above


@contextmanager
def django_on(database_url: str, *, is_migrated: bool = False) -> Iterator[None]:
    """Let Django's connections lead to a database, which is migrated unless it is already."""
    url = make_url(database_url)
    place = {"HOST": url.host, "PORT": str(url.port), "USER": url.username, "PASSWORD": url.password or ""}
    settings = connections["default"].settings_dict
    before = dict(settings)
    settings.update(place, NAME=url.database)
    try:
        if not is_migrated:
            call_command("migrate", verbosity=0)
        yield
    finally:
        for client in _clients.values():
            client.close()
        _clients.clear()
        connections.close_all()
        # Of calls that were awaited: all of them run in one thread.
        SyncToAsync.single_thread_executor.submit(connections.close_all).result()
        settings.update(before)


def closing(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call, in a thread, what opens connections of Django; they are closed."""
    try:
        return call(*arguments, **named)
    finally:
        connections.close_all()
