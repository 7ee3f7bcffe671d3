"""One running git whose answers are read as they come; it never outlives the block that started it."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import IO

from jsworker.demo import git

_BUFFER_BYTES = 256 * 1024


class GitStream:
    """The output of one running git; made by ``open_git``."""

    def __init__(
        self,
        git_dir: str,
        subcommand: str,
        commit: str | None,
        *,
        process: asyncio.subprocess.Process,
        output: asyncio.StreamReader,
        complaints: IO[bytes],
    ) -> None:
        self._git_dir = git_dir
        self._subcommand = subcommand
        self._commit = commit
        self._process = process
        self._output = output
        self._complaints = complaints

    async def read(self) -> bytes:
        """Return the next piece of output; empty at its end."""
        return await self._output.read(_BUFFER_BYTES)

    async def read_object(self, object_id: bytes) -> bytes:
        """Return the content of the object that ``cat-file --batch`` answers next, which is ``object_id``.

        Raises:
            RepositoryBroken: the object is missing or damaged.
            GitEnded: a signal ended git.
        """
        header = (await self._output.readline()).split()
        try:
            size = int(header[2])
            return (await self._output.readexactly(size + 1))[:-1]
        except (IndexError, asyncio.IncompleteReadError):
            if not header or self._output.at_eof():
                await self.finished()  # git gave up and says why
            raise git.broken(self._git_dir, object_id=object_id.decode()) from None

    async def finished(self) -> None:
        """Wait for the end of git.

        Raises:
            RepositoryBroken: git failed; the message names the object that it named, or gives its reason.
            GitEnded: a signal ended git.
        """
        while await self._output.read(_BUFFER_BYTES):
            pass
        code = await self._process.wait()
        if code < 0:
            raise git.ended(self._subcommand, code)
        if code > 0:
            self._complaints.seek(0)
            raise git.broken(self._git_dir, self._complaints.read(64 * 1024), commit=self._commit)


@asynccontextmanager
async def open_git(
    git_dir: str, subcommand: str, *options: str, commit: str | None = None, questions: bytes = b""
) -> AsyncIterator[GitStream]:
    """Run git on a repository for the length of a block; whatever ends the block ends git.

    Args:
        git_dir: the repository's absolute git directory.
        subcommand: git's subcommand.
        options: what follows it.
        commit: the object id of the commit that git is asked about, its last argument.
        questions: what git reads on its standard input; the event loop hands it over while answers are read.

    Raises:
        GitMissing: git is not installed or cannot be started.
    """
    arguments = [subcommand, *options, *([commit] if commit else [])]
    # A file, for a pipe that nobody reads fills up.
    with tempfile.TemporaryFile() as complaints:
        process = await _start(git.command(*arguments, git_dir=git_dir), complaints)
        try:
            output = _ask(process, questions)
            yield GitStream(
                git_dir, subcommand, commit, process=process, output=output, complaints=complaints
            )
        finally:
            await _end(process)


async def _start(command: list[str], complaints: IO[bytes]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=git.environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=complaints,
            limit=_BUFFER_BYTES,
        )
    except OSError as error:
        raise git.cannot_start(error) from error


def _ask(process: asyncio.subprocess.Process, questions: bytes) -> asyncio.StreamReader:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("git was started without pipes")
    process.stdin.write(questions)
    process.stdin.close()
    return process.stdout


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        # process.kill() would also ask for the exit status, which the event loop waits for.
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    # Some Pythons report the end of a process only once its output has been read to the end.
    await process.communicate()
