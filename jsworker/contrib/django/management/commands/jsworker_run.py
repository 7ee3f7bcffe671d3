"""``manage.py jsworker_run``: workers for the project's jobs."""

import argparse
import inspect
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import module_has_submodule

from jsworker.contrib.django.configuration import environment, given, task_backends
from jsworker.core.processor import JobProcessor

_SETUP = "jsworker.contrib.django.setup"
_MIDDLEWARE = "jsworker.contrib.django.middleware:fresh_connections"


class Command(BaseCommand):
    """Becomes `jsworker run`."""

    help = (
        "Runs workers for TARGET…, else for JSWORKER['TARGETS'], else for all processors in modules `jobs` of"
        " the apps, and for tasks of Django. Options of `jsworker run` follow behind a lone --."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take targets, and leave options to `jsworker run`."""
        parser.add_argument(
            "arguments", nargs="*", metavar="TARGET", help="MODULE:CLASS, or options behind --"
        )

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        """Replace this process by the workers' supervisor, which needs nothing of Django."""
        options = [each for each in arguments if each.startswith("-")]
        first = arguments.index(options[0]) if options else len(arguments)
        targets = arguments[:first] or list(given().get("TARGETS", ())) or list(_targets())
        if not targets:
            raise CommandError("no processors: name targets, set JSWORKER['TARGETS'], or write APP/jobs.py")
        variables = {**os.environ, **environment()}
        for name, own in (("JSWORKER_PRELOAD", _SETUP), ("JSWORKER_MIDDLEWARE", _MIDDLEWARE)):
            named = [each.strip() for each in variables.get(name, "").split(",") if each.strip()]
            variables[name] = ",".join([own, *(each for each in named if each != own)])
        self.stdout.flush()
        command = [sys.executable, "-m", "jsworker", "run", *targets, *arguments[first:]]
        os.execve(sys.executable, command, variables)  # noqa: S606 -- this very Python, without a shell


def _targets() -> Iterator[str]:
    """Yield the processors that are defined in modules ``jobs`` of the apps."""
    for app in apps.get_app_configs():
        if module_has_submodule(app.module, "jobs"):
            module = import_module(f"{app.name}.jobs")
            for name, found in vars(module).items():
                is_processor = isinstance(found, type) and issubclass(found, JobProcessor)
                if is_processor and found.__module__ == module.__name__ and not inspect.isabstract(found):
                    yield f"{module.__name__}:{name}"
    if task_backends():
        yield "jsworker.contrib.django.tasks:DjangoTask"
