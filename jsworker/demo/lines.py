"""Counts the lines of one commit by language, straight from git's objects: no checkout needed."""

import os
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from jsworker.demo import git
from jsworker.demo.git_stream import open_git
from jsworker.demo.languages import language_of

LARGEST_BLOB_BYTES = 2 * 1024 * 1024
BINARY_PROBE_BYTES = 8000
REMEMBERED_BLOBS = 200_000

_SHARE_OF_LISTING = 0.1
_PROGRESS_INTERVAL = 0.25
_REGULAR_FILES = (b"100644", b"100755", b"100664")

Stage = Literal["list", "count"]
Progress = Callable[[Stage, float], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a commit that is written in a known language.

    Attributes:
        language: its language.
        blob: the object id of its content.
    """

    language: str
    blob: bytes


class LineMemory:
    """Remembers how many lines a blob has; neighbouring commits share most of their blobs.

    Args:
        most: blobs to remember; those not asked for longest are forgotten first.
    """

    def __init__(self, most: int = REMEMBERED_BLOBS) -> None:
        self._most = most
        self._lines: OrderedDict[bytes, int] = OrderedDict()

    def recall(self, blob: bytes) -> int | None:
        """Return the number of lines of a blob, or None when it is not remembered."""
        lines = self._lines.get(blob)
        if lines is not None:
            self._lines.move_to_end(blob)
        return lines

    def remember(self, blob: bytes, lines: int) -> None:
        """Remember the number of lines of a blob."""
        self._lines[blob] = lines
        self._lines.move_to_end(blob)
        if len(self._lines) > self._most:
            self._lines.popitem(last=False)


async def count_lines(git_dir: str, commit: str, *, memory: LineMemory, progress: Progress) -> dict[str, int]:
    """Count the non-blank lines of a commit by language.

    Binary files, links, submodules, blobs above 2 MB and files of no known language do not count.

    Args:
        git_dir: the repository's absolute git directory.
        commit: the full object id of the commit.
        memory: line counts of blobs seen before.
        progress: told the stage and the share done, 0.0 to 1.0, at most four times a second within a stage.

    Returns:
        Lines by language, most first; languages without a line are left out.

    Raises:
        RepositoryBroken: an object of the commit is missing or damaged; the message names it.
        GitMissing: git is not installed.
        GitEnded: a signal ended git.
    """
    await progress("list", 0.0)
    files = await _source_files(git_dir, commit)
    await progress("count", _SHARE_OF_LISTING)
    lines_of = await _lines_of_blobs(git_dir, {file.blob for file in files}, memory, progress)
    totals: Counter[str] = Counter()
    for file in files:
        totals[file.language] += lines_of[file.blob]
    return {language: lines for language, lines in totals.most_common() if lines}


def count_text_lines(content: bytes) -> int:
    """Return the number of non-blank lines of a file; 0 when it is binary."""
    if b"\0" in content[:BINARY_PROBE_BYTES]:
        return 0
    return sum(map(bool, map(bytes.strip, content.splitlines())))


async def _source_files(git_dir: str, commit: str) -> list[SourceFile]:
    files: list[SourceFile] = []
    async with open_git(git_dir, "ls-tree", "-r", "-z", "--long", commit=commit) as listing:
        pending = b""
        while piece := await listing.read():
            *entries, pending = (pending + piece).split(b"\0")
            files.extend(_source_files_of(git_dir, entries))
        await listing.finished()
    return files


def _source_files_of(git_dir: str, entries: Iterable[bytes]) -> Iterator[SourceFile]:
    for entry in entries:
        facts, _, path = entry.partition(b"\t")
        mode, _kind, blob, size = facts.split()
        language = language_of(os.fsdecode(path)) if mode in _REGULAR_FILES else None
        if language is None:
            continue
        if not size.isdigit():  # git says BAD
            raise git.broken(git_dir, object_id=blob.decode())
        if int(size) <= LARGEST_BLOB_BYTES:
            yield SourceFile(language, blob)


async def _lines_of_blobs(
    git_dir: str, blobs: set[bytes], memory: LineMemory, progress: Progress
) -> dict[bytes, int]:
    recalled = {blob: memory.recall(blob) for blob in blobs}
    known = {blob: lines for blob, lines in recalled.items() if lines is not None}
    unknown = sorted(blobs - known.keys())
    if not unknown:
        return known
    questions = b"".join(blob + b"\n" for blob in unknown)
    async with open_git(git_dir, "cat-file", "--batch", "--buffer", questions=questions) as answers:
        told_at = time.monotonic()
        for blob in unknown:
            known[blob] = count_text_lines(await answers.read_object(blob))
            memory.remember(blob, known[blob])
            if time.monotonic() - told_at >= _PROGRESS_INTERVAL:
                share = len(known) / len(blobs)
                await progress("count", _SHARE_OF_LISTING + (1 - _SHARE_OF_LISTING) * share)
                told_at = time.monotonic()
        await answers.finished()
    return known
