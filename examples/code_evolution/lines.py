"""Counts the lines of one commit by language, straight from git's objects: no checkout needed."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping

from code_evolution import git
from code_evolution.languages import language_of

LARGEST_BLOB_BYTES = 2 * 1024 * 1024
BINARY_PROBE_BYTES = 8000

_SHARE_OF_LISTING = 0.1
_PROGRESS_INTERVAL = 0.25
_REGULAR_FILES = (b"100644", b"100755", b"100664")

Memory = MutableMapping[bytes, int]
Progress = Callable[[str, float], Awaitable[None]]


async def count_lines(git_dir: str, commit: str, *, memory: Memory, progress: Progress) -> dict[str, int]:
    """Count the non-blank lines of a commit by language.

    Binary files, links, submodules, blobs above 2 MB and files of no known language do not count; languages
    without a line are left out.

    Args:
        git_dir: the repository's absolute git directory.
        commit: the full object id of the commit.
        memory: the lines of blobs counted before; neighbouring commits share most of their blobs.
        progress: called with the stage (``list`` or ``count``) and the share done, 0.0 to 1.0.
    """
    await progress("list", 0.0)
    files = await _source_files(git_dir, commit)
    await progress("count", _SHARE_OF_LISTING)
    lines_of = await _count_blobs(git_dir, {blob for _, blob in files}, memory, progress)
    totals: Counter[str] = Counter()
    for language, blob in files:
        totals[language] += lines_of[blob]
    return {language: lines for language, lines in totals.most_common() if lines}


def count_text_lines(content: bytes) -> int:
    """Return the number of non-blank lines of a file; 0 when it is binary."""
    if b"\0" in content[:BINARY_PROBE_BYTES]:
        return 0
    return sum(map(bool, map(bytes.strip, content.splitlines())))


async def _source_files(git_dir: str, commit: str) -> list[tuple[str, bytes]]:
    """Return language and blob of each file of a commit that is written in a known language."""
    async with git.open_git(git_dir, "ls-tree", "-r", "-z", "--long", commit) as listing:
        entries = (await listing.read()).split(b"\0")[:-1]
    files: list[tuple[str, bytes]] = []
    for entry in entries:
        facts, _, path = entry.partition(b"\t")
        mode, _, blob, size = facts.split()
        language = language_of(os.fsdecode(path)) if mode in _REGULAR_FILES else None
        if language is None:
            continue
        if not size.isdigit():  # BAD: the object is missing or damaged
            raise git.broken(git_dir, asked_for=blob.decode())
        if int(size) <= LARGEST_BLOB_BYTES:
            files.append((language, blob))
    return files


async def _count_blobs(
    git_dir: str, blobs: set[bytes], memory: Memory, progress: Progress
) -> dict[bytes, int]:
    lines_of = {blob: memory[blob] for blob in blobs & memory.keys()}
    unknown = sorted(blobs - lines_of.keys())
    if not unknown:
        return lines_of
    questions = b"".join(blob + b"\n" for blob in unknown)
    async with git.open_git(git_dir, "cat-file", "--batch", "--buffer", questions=questions) as answers:
        reported_at = time.monotonic()
        for blob in unknown:
            lines_of[blob] = memory[blob] = count_text_lines(await _read_object(answers, git_dir, blob))
            if time.monotonic() - reported_at >= _PROGRESS_INTERVAL:
                share = len(lines_of) / len(blobs)
                await progress("count", _SHARE_OF_LISTING + (1 - _SHARE_OF_LISTING) * share)
                reported_at = time.monotonic()
    return lines_of


async def _read_object(answers: asyncio.StreamReader, git_dir: str, blob: bytes) -> bytes:
    header = (await answers.readuntil(b"\n")).split()
    if len(header) != len(("id", "type", "size")):  # git prints why it has no object
        raise git.broken(git_dir, asked_for=blob.decode())
    return (await answers.readexactly(int(header[2]) + 1))[:-1]
