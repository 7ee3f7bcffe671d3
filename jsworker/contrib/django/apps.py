"""The app: `manage.py migrate` also creates or upgrades jsworker's tables."""

from contextlib import suppress
from typing import Any

from django.apps import AppConfig
from django.core.checks import register
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.base.base import NO_DB_ALIAS
from django.db.backends.signals import connection_created
from django.db.models.signals import post_migrate

from jsworker.contrib.django.configuration import (
    check_configuration,
    database_alias,
    jsworker_settings,
    names_at_start,
    settings_of_tests,
)
from jsworker.contrib.django.enqueueing import close_clients
from jsworker.core.errors import JsworkerError, MigrationMissing
from jsworker.core.settings import Settings
from jsworker.testing.runner_settings import of_runner


class JsworkerApp(AppConfig):
    """The app ``jsworker``."""

    name = "jsworker.contrib.django"
    label = "jsworker"
    verbose_name = "Jobs"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the check of the settings, and the tables' upgrade after Django's migrations."""
        # Not anew: a test that changes INSTALLED_APPS calls this again.
        if not names_at_start:
            with suppress(ImproperlyConfigured):  # an error of the check
                alias = database_alias()
                option = "" if alias == DEFAULT_DB_ALIAS else f" --database {alias}"
                MigrationMissing.command = f"manage.py migrate{option}"
        for alias, entry in connections.settings.items():
            names_at_start.setdefault(alias, entry.get("NAME"))
        of_runner[:] = [settings_of_tests]
        register(check_configuration)
        post_migrate.connect(_migrate, sender=self)
        connection_created.connect(_let_go)


def _let_go(connection: Any, **_: Any) -> None:
    if connection.alias == NO_DB_ALIAS:  # Django is about to copy or drop a test database
        close_clients()
        if settings := settings_of_tests():
            _delete_stream(settings)


def _delete_stream(settings: Settings) -> None:
    """Delete the tests' stream, unless no worker has used it: then NATS may be away."""
    from jsworker.ownership.throwaway import has_workers  # noqa: PLC0415 -- as below
    from jsworker.testing.shared_servers import delete_stream  # noqa: PLC0415 -- it imports all servers

    with suppress(JsworkerError):  # one that stays has a name of its own, and harms no later test
        if has_workers(settings.database_dsn()):
            delete_stream(settings)


def _migrate(using: str, **given: Any) -> None:
    if using != database_alias():
        return
    # They import alembic, which logs a dozen lines as it is loaded, if the application logs at INFO.
    from jsworker.ownership.throwaway import empty_database  # noqa: PLC0415
    from jsworker.ownership.upgrading import upgrade_database  # noqa: PLC0415

    upgrade_database(jsworker_settings().database_dsn())
    # `flush` emits the signal, too, but migrates nothing. It ends each TransactionTestCase.
    if "plan" not in given and (settings := settings_of_tests()):
        _delete_stream(settings)
        empty_database(settings.database_dsn())
