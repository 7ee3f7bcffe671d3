"""The git command as the demo runs it: it only reads, no matter who owns the repository, and only locally."""

import os
import re
import subprocess
from pathlib import Path

from jsworker.core.errors import JsworkerError

_OBJECT_ID = re.compile(r"(?<![\w-])(?:[0-9a-f]{64}|[0-9a-f]{40})(?!\w)")  # no pack-<id>.pack
_USERS_CHOICES = ("GIT_EXEC_PATH", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")


class GitError(JsworkerError):
    """git could not do what the demo asked."""


class GitMissing(GitError):
    """The git command cannot be started: install git."""


class GitEnded(GitError):
    """git was ended by a signal before it had answered."""


class RepositoryNotFound(GitError):
    """No git repository is there."""


class RepositoryEmpty(GitError):
    """The repository has no commits."""


class RepositoryBroken(GitError):
    """The repository cannot be read: an object or a reference is missing or damaged."""


def command(*arguments: str | Path, git_dir: str | Path | None = None) -> list[str]:
    """Return the command line of git for one repository.

    Args:
        arguments: the git subcommand and what follows it.
        git_dir: the repository's absolute git directory; None lets git search from the ``-C`` folder.
    """
    # People analyse repositories of other owners (a mounted volume, a container that runs as root). What
    # ownership guards against is configuration that starts programs; the plumbing used here starts none.
    trust = ["-c", "safe.directory=*", "-c", "safe.bareRepository=all"]
    where = [] if git_dir is None else [f"--git-dir={git_dir}"]
    return ["git", "--no-pager", *trust, *where, *map(str, arguments)]


def environment() -> dict[str, str]:
    """Return the environment of git: English messages, no locks, no questions, no fetching of objects.

    Variables that would point git to another repository, as inside a git hook, are left out.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k in _USERS_CHOICES}
    return kept | {
        "LC_ALL": "C",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",  # the same for git before 2.45
    }


def run(*arguments: str | Path, git_dir: str | Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git and return its exit code and output; any exit code is the caller's to judge.

    Raises:
        GitMissing: git is not installed or cannot be started.
        GitEnded: a signal ended it.
    """
    try:
        done = subprocess.run(  # noqa: S603 -- no shell; the arguments are ours, absolute paths and object ids
            command(*arguments, git_dir=git_dir),
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise cannot_start(error) from error
    if done.returncode < 0:
        raise ended(str(arguments[0]), done.returncode)
    return done


def cannot_start(error: OSError) -> GitMissing:
    """Return the error for a git that does not start."""
    if isinstance(error, FileNotFoundError):
        return GitMissing("git is not installed or not on the PATH")
    return GitMissing(f"git cannot be started: {error.strerror}")


def ended(subcommand: str, returncode: int) -> GitEnded:
    """Return the error for a git that a signal ended."""
    return GitEnded(f"git {subcommand} was ended by signal {-returncode}")


def broken(
    repository: str | Path, complaint: bytes = b"", *, object_id: str | None = None, commit: str | None = None
) -> RepositoryBroken:
    """Return the error for a repository that git cannot read, naming what is broken as far as it is known.

    Args:
        repository: the repository's path.
        complaint: what git wrote to its standard error output.
        object_id: the object in question; None takes the first that git names.
        commit: the commit that git was asked about.
    """
    text = complaint.decode("utf-8", "replace")
    named = _OBJECT_ID.search(text)
    lost = object_id or (named and named.group())
    if lost:
        fault = "was left out of this partial clone" if "promisor" in text else "is missing or damaged"
        return RepositoryBroken(f"repository {shown(repository)}: object {lost} {fault}")
    if "not a tree object" in text and commit:
        return RepositoryBroken(
            f"repository {shown(repository)}: commit {commit} or its tree is missing or damaged"
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), "git gave no reason")
    return RepositoryBroken(f"repository {shown(repository)} cannot be read: {first[:300]}")


def shown(path: str | Path) -> str:
    """Return a path for one line of text: as it is, or quoted with escapes when it would break the line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
