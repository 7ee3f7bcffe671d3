"""The history of a repository: where it is, which commits its main line has, and which of them to count."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jsworker.demo import git
from jsworker.demo.git import RepositoryEmpty, RepositoryNotFound
from jsworker.demo.samples import evenly

FEWEST_SAMPLES = 24
EVEN_SAMPLES = 48
MOST_SAMPLES = 240

_LATEST = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository on this machine.

    Attributes:
        path: the top of its work tree, or the bare repository; absolute.
        git_dir: where git keeps its objects and HEAD; absolute.
        head: the commit that HEAD names, as a full object id.
        shallow: True when its history was cut off by a shallow clone.
    """

    path: Path
    git_dir: Path
    head: str
    shallow: bool

    @property
    def name(self) -> str:
        """What people call it: the folder's name, without ``.git``."""
        return git.shown(self.path.name.removesuffix(".git") or self.path.parent.name or "repository")


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit of a history.

    Attributes:
        id: its full object id, 40 or 64 hexadecimal digits.
        date: when it was committed, in UTC.
    """

    id: str
    date: datetime


def open_repository(path: str | Path) -> Repository:
    """Find the repository at a folder or above it.

    Args:
        path: a work tree, any folder inside one, or a bare repository.

    Raises:
        RepositoryNotFound: there is no folder, or no repository at it or above it.
        RepositoryEmpty: HEAD names no commit yet.
        RepositoryBroken: HEAD names something that cannot be read.
        GitMissing: git is not installed.
    """
    folder = _existing_folder(Path(path))
    git_dir = _git_dir(folder)
    top = _answer(git.run("-C", folder, "rev-parse", "--show-toplevel"))
    where = Path(top) if top else _named_by_git_dir(git_dir)
    _must_be_unicode(where, git_dir)
    head = _head(git_dir, where)
    shallow = _answer(git.run("rev-parse", "--is-shallow-repository", git_dir=git_dir)) == "true"
    return Repository(path=where, git_dir=git_dir, head=head, shallow=shallow)


def first_parent_history(repository: Repository) -> list[Commit]:
    """Return the commits of the main line that leads to HEAD, oldest first.

    Raises:
        RepositoryBroken: a commit on the way is missing or damaged.
        GitMissing: git is not installed.
    """
    listing = git.run(
        "rev-list", "--first-parent", "--timestamp", repository.head, git_dir=repository.git_dir
    )
    if listing.returncode:
        raise git.broken(repository.path, listing.stderr)
    commits = [_commit(line) for line in listing.stdout.decode("ascii").splitlines()]
    commits.reverse()
    return commits


def sample(commits: Sequence[Commit]) -> list[Commit]:
    """Choose the commits to count, in the order of the history, always with the first and the last.

    The last commit of each month, when that gives at least ``FEWEST_SAMPLES``; else ``EVEN_SAMPLES`` at even
    distances, or all when there are fewer. More than ``MOST_SAMPLES`` are thinned at even distances.
    """
    monthly = _last_of_each_month(commits)
    if len(monthly) >= FEWEST_SAMPLES:
        return evenly(monthly, MOST_SAMPLES)
    return evenly(commits, EVEN_SAMPLES)


def _existing_folder(path: Path) -> Path:
    folder = path.absolute()
    if not folder.exists():
        raise RepositoryNotFound(f"{git.shown(folder)} does not exist")
    if not folder.is_dir():
        raise RepositoryNotFound(f"{git.shown(folder)} is no folder, so no git repository")
    return folder


def _git_dir(folder: Path) -> Path:
    found = git.run("-C", folder, "rev-parse", "--absolute-git-dir")
    if found.returncode == 0:
        return Path(_text(found.stdout))
    if b"not a git repository" in found.stderr:
        raise RepositoryNotFound(f"no git repository at {git.shown(folder)} or in a folder above it")
    raise git.broken(folder, found.stderr)


def _named_by_git_dir(git_dir: Path) -> Path:
    return git_dir.parent if git_dir.name == ".git" else git_dir


def _must_be_unicode(*paths: Path) -> None:
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise RepositoryNotFound(
                f"{git.shown(path)}: a path must be UTF-8 to be stored in a job"
            ) from None


def _head(git_dir: Path, where: Path) -> str:
    def resolve(name: str) -> str | None:
        return _answer(git.run("rev-parse", "--verify", "--quiet", name, git_dir=git_dir))

    if commit := resolve("HEAD^{commit}"):
        return commit
    if named := resolve("HEAD"):
        raise git.broken(where, object_id=named)
    branches = git.run(
        "for-each-ref", "--count=3", "--format=%(refname:short)", "refs/heads", git_dir=git_dir
    )
    if branches.returncode or branches.stderr:
        raise git.broken(where, branches.stderr)
    others = ", ".join(branches.stdout.decode("utf-8", "replace").split())
    raise RepositoryEmpty(
        f"repository {git.shown(where)} has no commits"
        + (f" on the branch that HEAD names (others have some: {others})" if others else "")
    )


def _answer(done: subprocess.CompletedProcess[bytes]) -> str | None:
    return _text(done.stdout) if done.returncode == 0 else None


def _text(output: bytes) -> str:
    # Only git's own line end goes: a path may end in white space of its own.
    return os.fsdecode(output.removesuffix(b"\n"))


def _commit(line: str) -> Commit:
    seconds, commit_id = line.split()
    # Clocks of committers are wrong at times, by any amount; a date that no calendar holds stops at its end.
    return Commit(commit_id, datetime.fromtimestamp(min(int(seconds), _LATEST), UTC))


def _last_of_each_month(commits: Sequence[Commit]) -> list[Commit]:
    chosen = {0} if commits else set()
    chosen.add(len(commits) - 1)
    last_of = {(commit.date.year, commit.date.month): place for place, commit in enumerate(commits)}
    return [commits[place] for place in sorted(chosen | set(last_of.values()))]
