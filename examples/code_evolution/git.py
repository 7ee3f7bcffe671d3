"""Runs the git command: it only reads, fetches nothing, and works on repositories of any owner."""

import asyncio
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_OBJECT_ID = re.compile(r"(?<![\w-])(?:[0-9a-f]{64}|[0-9a-f]{40})(?!\w)")  # not the id in pack-<id>.pack
_KEPT_VARIABLES = ("GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
_BUFFER_BYTES = 256 * 1024


class GitError(Exception):
    """git is not installed, or a repository cannot be read: an object is missing or damaged."""


class NoRepository(GitError):
    """There is no git repository, or it has no commits."""


class GitKilled(GitError):
    """A signal ended git before it had answered."""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[bytes]:
    """Run git and return its exit code and output."""
    try:
        return subprocess.run(  # noqa: S603 -- no shell; the arguments are ours, absolute paths and object ids
            _command(arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise _cannot_start(error) from error


@asynccontextmanager
async def open_git(
    git_dir: str, *arguments: str, questions: bytes = b""
) -> AsyncIterator[asyncio.StreamReader]:
    """Run git for the length of a block that reads its output; whatever ends the block ends git.

    Args:
        git_dir: the repository's absolute git directory.
        arguments: the subcommand and what follows it.
        questions: what git reads on its standard input.

    Raises:
        GitError: git cannot be started, or failed; the message names the object that git named.
        GitKilled: a signal ended git.
    """
    # git writes its errors into a file: a pipe that is not read meanwhile would fill up.
    with tempfile.TemporaryFile() as complaints:
        try:
            process = await asyncio.create_subprocess_exec(
                *_command([f"--git-dir={git_dir}", *arguments]),
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                limit=_BUFFER_BYTES,
            )
        except OSError as error:
            raise _cannot_start(error) from error
        try:
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("git was started without pipes")
            process.stdin.write(questions)
            process.stdin.close()
            complete = False
            with suppress(asyncio.IncompleteReadError):  # why git ended too early is found out below
                yield process.stdout
                complete = True
            await process.stdout.read()
            code = await process.wait()
            if code < 0:
                raise GitKilled(f"git {arguments[0]} was ended by signal {-code}")
            if code > 0 or not complete:
                complaints.seek(0)
                raise broken(git_dir, complaints.read(64 * 1024), asked_for=arguments[-1])
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            # Some Pythons report the end of a process only once its output has been read to the end.
            await process.communicate()


def broken(repository: str | Path, complaint: bytes = b"", *, asked_for: str = "") -> GitError:
    """Return the error for a repository that git cannot read, naming the object as far as it is known."""
    text = complaint.decode("utf-8", "replace")
    if "not a tree object" in text:
        lost = f"commit {asked_for} or its tree is missing or damaged"
        return GitError(f"repository {shown(repository)}: {lost}")
    if named := _OBJECT_ID.search(text or asked_for):
        # git 2.53 lists the object as unreadable, without a word.
        left_out = "promisor" in text or (not text and any(Path(repository).glob("objects/pack/*.promisor")))
        fault = "was left out of this partial clone" if left_out else "is missing or damaged"
        return GitError(f"repository {shown(repository)}: object {named.group()} {fault}")
    first = next((line.strip() for line in text.splitlines() if line.strip()), "git gave no reason")
    return GitError(f"repository {shown(repository)} cannot be read: {first[:300]}")


def shown(path: str | Path) -> str:
    """Return a path for one line of text: as it is, or quoted with escapes when it would break the line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def environment() -> dict[str, str]:
    """Return the environment of git: English messages, no locks, no questions, no fetching of objects.

    Variables that would point git to another repository, as inside a git hook, are left out.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k in _KEPT_VARIABLES}
    return kept | {
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",  # the same for git before 2.45
    }


def _command(arguments: Sequence[str | Path]) -> list[str]:
    # People analyse repositories of other owners (a mounted volume, a container that runs as root). git
    # checks owners because configuration may start programs; the plumbing used here starts none.
    trust = ["-c", "safe.directory=*", "-c", "safe.bareRepository=all"]
    return ["git", "--no-pager", *trust, *map(str, arguments)]


def _cannot_start(error: OSError) -> GitError:
    if isinstance(error, FileNotFoundError):
        return GitError("git is not installed or not on the PATH")
    return GitError(f"git cannot be started: {error.strerror}")
