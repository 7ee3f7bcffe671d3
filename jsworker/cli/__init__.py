"""The command line."""

from jsworker.cli.app import main

__all__ = ["main"]
