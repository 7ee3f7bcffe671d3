"""Flask: one client for each process of an application."""

from typing import Final

from flask import Flask, current_app

from jsworker.client.sync_client import SyncJobClient
from jsworker.core.settings import load_settings
from jsworker.core.settings.variables import PREFIX

_NAME: Final = "jsworker"


class FlaskJobs:
    """The extension: ``jobs = FlaskJobs(app)``, or ``jobs = FlaskJobs()`` and later ``jobs.init_app(app)``.

    ``jobs.client`` then is the client of the application that serves the request. It connects with its first
    call in each process, also in processes that a server forks.
    """

    def __init__(self, app: Flask | None = None) -> None:
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Create an application's client from its configuration (``JSWORKER_…``) and the environment.

        Raises SettingsError for a setting that is wrong or missing.
        """
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in app.config.items()
            if name.startswith(PREFIX)
        }
        app.extensions[_NAME] = SyncJobClient(load_settings(**given))

    @property
    def client(self) -> SyncJobClient:
        """The client of the current application; RuntimeError: it has none, or there is no application."""
        client: SyncJobClient | None = current_app.extensions.get(_NAME)
        if client is None:
            raise RuntimeError("the application has no client of jsworker: FlaskJobs(app)")
        return client
