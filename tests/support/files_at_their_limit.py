"""A process that may open no more files."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LEAST_OPENED = 64


@contextmanager
def no_more_files() -> Iterator[list[int]]:
    """Let this process open no file in the block; yield the open files, some of which a test may close."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + _LEAST_OPENED, hard))
        with suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield opened
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in opened:
            os.close(each)
