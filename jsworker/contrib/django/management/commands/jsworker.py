"""``manage.py jsworker …``: jsworker's command line, with Django's settings."""

import argparse
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand

from jsworker.cli.app import run_command
from jsworker.contrib.django.configuration import environment


class Command(BaseCommand):
    """Runs a command of jsworker's command line."""

    help = "Runs jsworker's command line with the settings of Django: manage.py jsworker jobs --status failed"
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Accept all arguments, for jsworker to parse."""
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="as of jsworker itself")

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        """Run the command in this process."""
        before, variables = dict(os.environ), environment()
        try:
            os.environ.clear()  # a variable JSWORKER_..._FILE would contradict the setting from Django
            os.environ.update(variables)
            if code := run_command(arguments):
                sys.exit(code)
        finally:  # a test may have called this command
            os.environ.clear()
            os.environ.update(before)
