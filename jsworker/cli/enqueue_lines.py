"""``jsworker enqueue --from``: a job for each line of a file; all are checked before the first job."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import typer

from jsworker.cli.enqueued_batches import EnqueuedBatches, JobBatch
from jsworker.cli.interruption import run_in_batches
from jsworker.cli.output import progress_bar, progress_wanted, remark
from jsworker.client.enqueueing import JobOptions, Kind, new_jobs
from jsworker.core import strict_json
from jsworker.core.contents import Contents
from jsworker.core.errors import InvalidPayload
from jsworker.core.exit_codes import WRONG_USAGE, WrongUsage
from jsworker.core.names import shown
from jsworker.core.settings import load_settings
from jsworker.ownership.refusals import needed_right

_BATCH: Final = 10_000
_BATCH_BYTES: Final = 2**24
_LONGEST_LINE: Final = 2**26
_MOST_SHOWN: Final = 20
_LARGE_BYTES: Final = 2**20
"""No progress is shown for a shorter file."""


class Line(NamedTuple):
    """A payload, its unique key, and how many bytes of the file it takes."""

    payload: Any
    key: str | None
    size: int


def enqueue_lines(
    source: str, kind: Kind, options: dict[str, Any], *, key_field: str | None, as_json: bool
) -> None:
    """Enqueue a job for each line of a file, ``-`` for stdin, whose JSON value is its payload.

    ``options`` are those of ``JobClient.enqueue_many``; ``key_field`` is the field of each payload that holds
    its unique key. The ids are printed as they come.
    """
    with _opened(source) as (name, file):
        total = os.fstat(file.fileno()).st_size if progress_wanted(as_json=as_json) else 0
        total = total if total >= _LARGE_BYTES else 0
        lines = _checked(name, file, kind, options, key_field=key_field, total=total)
        file.seek(0)
        jobs = EnqueuedBatches(lines, as_json=as_json)
        try:
            with enqueuers_right(options):
                run_in_batches(_enqueue(file, kind, options, jobs, key_field=key_field, total=total))
        finally:  # committed jobs are printed, whatever came after the commit
            jobs.report()


@contextmanager
def _opened(source: str) -> Iterator[tuple[str, BinaryIO]]:
    """Open a file for reading twice; stdin, or a file that cannot seek, is copied to a temporary file."""
    with ExitStack() as opened:
        try:
            if source == "-":
                given: Any = sys.stdin.buffer
            else:
                given = opened.enter_context(Path(source).open("rb"))
            if source == "-" or not given.seekable():
                copy = opened.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(given, copy)
                copy.seek(0)
                given = copy
        except OSError as error:
            raise WrongUsage(f"--from {shown(source)} cannot be read: {error.strerror}") from None
        yield "stdin" if source == "-" else source, given


def _checked(
    name: str, file: BinaryIO, kind: Kind, options: dict[str, Any], *, key_field: str | None, total: int
) -> int:
    """Check every line, name the first wrong ones on stderr, return the number of payloads; enqueue nothing.

    Raises:
        typer.Exit: there are wrong lines.
        WrongUsage: a line is too long, or there is no line.
    """
    settings = load_settings()
    contents = Contents.of(settings)  # payloads are longer if they are encrypted
    job_options = JobOptions.of(settings.max_payload_bytes, options, contents)  # type: ignore[arg-type] # each by its name
    lines = wrong = 0
    with progress_bar("checked", total) as advance:
        for number, text in _texts(file):
            if len(text) == _LONGEST_LINE:
                raise WrongUsage(f"{name}:{number}: longer than {_LONGEST_LINE} bytes")
            try:
                line = _line(text, key_field)
                new_jobs(kind, [line.payload], [line.key], job_options)
            except ValueError as error:  # of a line that cannot be enqueued
                wrong += 1
                if wrong <= _MOST_SHOWN:
                    remark(f"{name}:{number}: {' '.join(str(error).split())}")
            else:
                lines += 1
            advance(len(text))
    if wrong:
        more = f", of which the first {_MOST_SHOWN} are named" if wrong > _MOST_SHOWN else ""
        remark(f"{wrong} of {lines + wrong} lines are wrong{more}; nothing was enqueued")
        raise typer.Exit(WRONG_USAGE)
    if not lines:
        raise WrongUsage(f"--from {name} holds no line")
    return lines


def _texts(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while text := file.readline(_LONGEST_LINE):
        number += 1
        if text.strip():
            yield number, text


def _line(text: bytes, key_field: str | None) -> Line:
    payload = strict_json.loads(text.removeprefix(b"\xef\xbb\xbf"), what="payload")
    if key_field is None:
        return Line(payload, None, len(text))
    key = payload.get(key_field) if isinstance(payload, dict) else None
    if not isinstance(key, str | int) or isinstance(key, bool):
        raise InvalidPayload(f"payload has no text or number in field {shown(key_field)}, its unique key")
    return Line(payload, str(key), len(text))


def enqueuers_right(options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Name the missing right when the login may not enqueue with these options."""
    if options["debounce"] is None:
        return needed_right("enqueue", "INSERT on jsworker.jobs", "jsworker_producer")
    roles = "jsworker_debouncer beside jsworker_producer"
    return needed_right("enqueue --debounce", "INSERT and UPDATE on jsworker.jobs", roles)


async def _enqueue(
    file: BinaryIO,
    kind: Kind,
    options: dict[str, Any],
    jobs: EnqueuedBatches,
    *,
    key_field: str | None,
    total: int,
) -> None:
    lines = (_line(text, key_field) for _, text in _texts(file))
    batches = (
        JobBatch(
            payloads=[line.payload for line in batch],
            keys=None if key_field is None else [line.key for line in batch],
            progress=sum(line.size for line in batch),
        )
        for batch in _batches(lines)
    )
    with progress_bar("enqueued", total) as advance:
        await jobs.enqueue(kind, batches, options, advance)


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    batch: list[Line] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += line.size
        if len(batch) == _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
