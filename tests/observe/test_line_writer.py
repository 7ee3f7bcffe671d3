"""Lines reach a reader in their order; without one nobody waits, and what is dropped is counted and told."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from jsworker.observe.line_writer import MOST_LINES, LineWriter, writer_to


@pytest.fixture
def pipe() -> Iterator[tuple[TextIO, TextIO]]:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        yield reader, writer


def test_lines_keep_their_order(pipe: tuple[TextIO, TextIO]) -> None:
    reader, stream = pipe
    writer = LineWriter(stream)
    for number in range(1000):
        writer.write(f"{number}\n")
    assert writer.drain(30.0)
    assert [int(reader.readline()) for _ in range(1000)] == list(range(1000))
    assert writer.dropped == 0


def test_what_does_not_fit_is_dropped_counted_and_told_once_it_is_read_again(
    pipe: tuple[TextIO, TextIO],
) -> None:
    reader, stream = pipe
    told: list[int] = []
    writer = LineWriter(stream, on_dropped=told.append)
    line = "x" * 99 + "\n"
    began = time.monotonic()
    for _ in range(2 * MOST_LINES):
        writer.write(line)
    assert time.monotonic() - began < 30.0
    assert not writer.drain(0.1)
    dropped = writer.dropped
    assert 0 < dropped <= MOST_LINES
    read: list[str] = []

    def read_all() -> None:
        while len(read) < 2 * MOST_LINES - dropped:
            read.append(reader.readline())

    reading = threading.Thread(target=read_all)
    reading.start()
    assert writer.drain(30.0)
    reading.join(30.0)
    assert set(read) == {line}
    assert told == [dropped]


def test_a_reader_that_has_gone_ends_nobody(pipe: tuple[TextIO, TextIO]) -> None:
    reader, stream = pipe
    writer = LineWriter(stream)
    reader.close()
    writer.write("nobody\n")
    assert writer.drain(30.0)
    assert writer.dropped == 1


def test_a_forked_process_writes_its_own_lines(pipe: tuple[TextIO, TextIO]) -> None:
    code = """
import os, sys
from jsworker.observe.line_writer import LineWriter
writer = LineWriter(sys.stderr)
writer.write("parent\\n")
assert writer.drain(30.0)
if not (child := os.fork()):
    writer.write("child\\n")
    os._exit(0 if writer.drain(30.0) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "parent\nchild\n"


def test_the_last_lines_before_the_end_are_written() -> None:
    code = """
import sys
from jsworker.observe.logs import configure_logs
import structlog
configure_logs(format="json", level="info")
for number in range(500):
    structlog.get_logger().info("line", number=number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 500


def test_what_is_no_file_is_written_at_once() -> None:
    class Lines:
        def fileno(self) -> int:
            raise OSError("not a file")

    lines = Lines()
    assert writer_to(lines) is lines  # type: ignore[arg-type, comparison-overlap]
