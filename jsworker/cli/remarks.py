"""Remarks for people, on stderr."""

import sys


def tell(line: str) -> None:
    """Write one line for people to stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
