"""Lines reach a reader in their order; without one nobody waits, and what is dropped is counted and told."""

import fcntl
import io
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

import pytest

from jsworker.telemetry.line_writer import MOST_LINES, LineWriter
from jsworker.telemetry.logs import write_line

HIGH = 1100
"""A descriptor beyond what select.select can wait for."""


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


def test_a_full_pipe_is_waited_for_whatever_its_number(pipe: tuple[TextIO, TextIO]) -> None:
    """The thread that waits does not end, and so writes what comes later too."""
    reader, stream = pipe
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 64), hard))
    descriptor = fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.set_blocking(descriptor, False)
    try:
        with os.fdopen(descriptor, "w") as high:
            writer = LineWriter(high)
            line = "x" * 99 + "\n"
            for _ in range(MOST_LINES // 2):
                writer.write(line)
            assert not writer.drain(0.1)
            reading = threading.Thread(target=lambda: [reader.readline() for _ in range(MOST_LINES // 2)])
            reading.start()
            written = writer.drain(30.0)
            stream.close()
        reading.join(30.0)
        assert written
        assert writer.dropped == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_stream_that_was_closed_is_written_again_once_it_is_open(pipe: tuple[TextIO, TextIO]) -> None:
    reader, stream = pipe
    descriptor = os.dup(stream.fileno())
    writer = LineWriter(os.fdopen(descriptor, "w", closefd=False))
    os.close(descriptor)
    writer.write("nowhere\n")
    assert writer.drain(30.0)
    assert writer.dropped == 1
    os.dup2(stream.fileno(), descriptor)
    writer.write("here\n")
    assert reader.readline() == "here\n"
    os.close(descriptor)


def test_a_forked_process_writes_its_own_lines(pipe: tuple[TextIO, TextIO]) -> None:
    code = """
import os, sys
from jsworker.telemetry.line_writer import LineWriter
writer = LineWriter(sys.stderr)
writer.write("parent\\n")
assert writer.drain(30.0)
if not (child := os.fork()):
    writer.write("child\\n")
    os._exit(0 if writer.drain(30.0) else 1)
sys.exit(os.waitpid(child, 0)[1])
"""
    # Since Python 3.12 a fork beside threads warns, and says nothing about these lines.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "parent\nchild\n"


def test_long_lines_of_several_processes_stay_whole_in_a_pipe(pipe: tuple[TextIO, TextIO]) -> None:
    """Longer than a pipe holds, so that each is written in parts."""
    code = """
import sys
from jsworker.telemetry.line_writer import LineWriter
writer = LineWriter(sys.stderr)
for _ in range(20):
    writer.write(sys.argv[1] * 100_000 + "\\n")
    writer.write(sys.argv[1] + "\\n")
print("begun", flush=True)
assert writer.drain(60.0)
"""
    reader, stream = pipe
    writing = [
        subprocess.Popen([sys.executable, "-c", code, letter], stdout=subprocess.PIPE, stderr=stream)
        for letter in "abc"
    ]
    stream.close()
    for process in writing:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.stdout.close()
    written = [letter * size for letter in "abc" for size in (1, 100_000) for _ in range(20)]
    assert sorted(reader.read().splitlines()) == sorted(written)
    assert [process.wait(60.0) for process in writing] == [0, 0, 0]


def test_the_last_lines_before_the_end_are_written() -> None:
    code = """
import sys
from jsworker.telemetry.logs import configure_logs
import structlog
configure_logs(format="json", level="info")
for number in range(500):
    structlog.get_logger().info("line", number=number)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stderr.splitlines()) == 500


def test_the_last_lines_of_a_process_of_multiprocessing_are_written() -> None:
    code = """
import multiprocessing, sys
from jsworker.telemetry.line_writer import LineWriter
writer = LineWriter(sys.stderr)
writer.write("parent\\n")
assert writer.drain(30.0)

def work():
    for number in range(500):
        writer.write(f"{number}\\n")

process = multiprocessing.get_context("fork").Process(target=work)
process.start()
process.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["parent", *map(str, range(500))]


def test_the_end_does_not_wait_for_a_reader_that_reads_nothing() -> None:
    code = """
import sys
from jsworker.telemetry.line_writer import LineWriter
writer = LineWriter(sys.stderr)
for _ in range(2000):
    writer.write("x" * 99 + "\\n")
"""
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        assert process.wait(60.0) == 0


def test_what_is_no_file_is_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO()  # which has no descriptor
    monkeypatch.setattr(sys, "stderr", lines)
    write_line("at once")
    assert lines.getvalue() == "at once\n"
