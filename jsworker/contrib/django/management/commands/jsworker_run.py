"""``manage.py jsworker_run``: workers for the project's jobs."""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.utils.module_loading import module_has_submodule

from jsworker.contrib.django.configuration import MIDDLEWARE, environment, given, preceded_by, task_backends
from jsworker.core.errors import InvalidTarget
from jsworker.core.targets import find_processors

_SETUP = "jsworker.contrib.django.setup"


class Command(BaseCommand):
    """Replaces its own process by `jsworker run`."""

    help = (
        "Runs workers for TARGET…, else for JSWORKER['TARGETS'], else for all processors in modules `jobs` of"
        " the apps, and for tasks of Django. Options of `jsworker run` come last: jsworker_run --processes 2"
    )

    def run_from_argv(self, argv: list[str]) -> None:
        """Pass the first option that is not Django's, and all after it, on to `jsworker run`."""
        own = self.create_parser(*argv[:2])._option_string_actions  # noqa: SLF001 -- argparse has no public list of options
        options = (place for place, each in enumerate(argv) if place > 1 and each.startswith("-"))
        foreign = (at for at in options if not {argv[at].partition("=")[0], argv[at][:2]} & own.keys())
        at = next(foreign, len(argv))  # a lone -- counts as not Django's
        super().run_from_argv([*argv[:at], "--", *argv[at:]] if argv[at : at + 1] != ["--"] else argv)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Accept targets, then options for `jsworker run`."""
        parser.add_argument(
            "arguments", nargs="*", metavar="TARGET", help="MODULE:CLASS; then options of `jsworker run`"
        )

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        """Replace this process by the workers' supervisor, which does not use Django."""
        options = [each for each in arguments if each.startswith("-")]
        first = arguments.index(options[0]) if options else len(arguments)
        named = given().get("TARGETS") or []
        named = [named] if isinstance(named, str) else list(named)
        try:
            targets = arguments[:first] or named or list(_targets())
        except InvalidTarget as error:
            raise CommandError(str(error)) from None
        if not targets:
            raise CommandError("no processors: name targets, set JSWORKER['TARGETS'], or write APP/jobs.py")
        variables = environment()
        for name, own in (("JSWORKER_PRELOAD", _SETUP), ("JSWORKER_MIDDLEWARE", MIDDLEWARE)):
            variables[name] = preceded_by(own, variables.get(name, ""))
        variables["PYTHONPATH"] = _python_path()
        self.stdout.flush()
        command = [sys.executable, "-m", "jsworker", "run", *targets, *arguments[first:]]
        os.execve(sys.executable, command, variables)  # noqa: S606 -- this very Python, without a shell


def _python_path() -> str:
    """Return what precedes Python's own modules on the path: manage.py's folder, --pythonpath, PYTHONPATH."""
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    own = takewhile(lambda each: Path(each).name != zipped, sys.path)
    return os.pathsep.join(map(os.path.abspath, own))


def _targets() -> Iterator[str]:
    """Yield each app's module ``jobs`` if it defines processors, and ``DjangoTask`` if tasks are jobs."""
    for app in apps.get_app_configs():
        if module_has_submodule(app.module, "jobs") and find_processors(f"{app.name}.jobs"):
            yield f"{app.name}.jobs"
    if task_backends():
        yield "jsworker.contrib.django.tasks:DjangoTask"
