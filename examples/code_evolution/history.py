"""The history of a repository: where it is, which commits its main line has, and which of them to count."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from code_evolution import git
from code_evolution.git import NoRepository

FEWEST_SAMPLES = 24
EVEN_SAMPLES = 48
MOST_SAMPLES = 240

_LATEST = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Commit:
    """One commit: its full object id, and when it was committed, in UTC."""

    id: str
    date: datetime


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository on this machine.

    Attributes:
        path: the top of its work tree, or the bare repository; absolute.
        git_dir: where git keeps its objects and HEAD; absolute.
        commits: those to count, oldest first; at least one.
        history: how many commits the main line has that leads to HEAD.
        shallow: whether its history was cut off by a shallow clone.
    """

    path: Path
    git_dir: Path
    commits: Sequence[Commit]
    history: int
    shallow: bool

    @property
    def name(self) -> str:
        """The folder's name without ``.git``."""
        return git.shown(self.path.name.removesuffix(".git") or self.path.parent.name or "repository")


def open_repository(path: str | Path) -> Repository:
    """Find the repository at a folder or above it, and read its history.

    Raises:
        NoRepository: there is no folder, no repository at it or above it, or no commit yet.
        GitError: git is not installed, or the history cannot be read.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise NoRepository(f"{git.shown(folder)} does not exist or is no folder")
    found = git.run("-C", folder, "rev-parse", "--absolute-git-dir")
    if b"not a git repository" in found.stderr:
        raise NoRepository(f"no git repository at {git.shown(folder)} or in a folder above it")
    if found.returncode:
        raise git.broken(folder, found.stderr)
    git_dir = Path(_text(found.stdout))
    top = git.run("-C", folder, "rev-parse", "--show-toplevel")
    bare = git_dir.parent if git_dir.name == ".git" else git_dir
    where = Path(_text(top.stdout)) if top.returncode == 0 else bare
    if any("\udc80" <= letter <= "\udcff" for letter in f"{where}{git_dir}"):
        raise NoRepository(f"{git.shown(where)}: a path must be UTF-8 to be stored in a job")
    shallow = git.run(f"--git-dir={git_dir}", "rev-parse", "--is-shallow-repository")
    history = _first_parent_history(where, git_dir)
    return Repository(where, git_dir, sample(history), len(history), shallow.stdout == b"true\n")


def sample(history: Sequence[Commit]) -> list[Commit]:
    """Choose the commits to count, in the order of the history, always with the first and the last.

    The last commit of each month, when that gives at least ``FEWEST_SAMPLES``; else ``EVEN_SAMPLES`` at even
    distances, or all when there are fewer. More than ``MOST_SAMPLES`` are thinned at even distances.
    """
    last_of_month = {(commit.date.year, commit.date.month): place for place, commit in enumerate(history)}
    monthly = sorted({0, len(history) - 1, *last_of_month.values()})
    if len(monthly) >= FEWEST_SAMPLES:
        return evenly([history[place] for place in monthly], MOST_SAMPLES)
    return evenly(history, EVEN_SAMPLES)


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most so many items (2 or more) at even distances, always with the first and the last."""
    if len(items) <= most:
        return list(items)
    step = (len(items) - 1) / (most - 1)
    return [items[round(place * step)] for place in range(most)]


def _first_parent_history(where: Path, git_dir: Path) -> list[Commit]:
    head = git.run(f"--git-dir={git_dir}", "rev-parse", "--verify", "--quiet", "HEAD")
    if head.returncode:
        raise NoRepository(f"repository {git.shown(where)} has no commits: HEAD names none")
    main_line = ["rev-list", "--first-parent", "--reverse", "--timestamp", _text(head.stdout)]
    listing = git.run(f"--git-dir={git_dir}", *main_line)
    if listing.returncode:
        raise git.broken(where, listing.stderr)
    commits = []
    for line in listing.stdout.decode("ascii").splitlines():
        seconds, commit_id = line.split()
        # A committer's clock may be wrong by any amount; a date after the year 9999 becomes its last day.
        commits.append(Commit(commit_id, datetime.fromtimestamp(min(int(seconds), _LATEST), UTC)))
    return commits


def _text(output: bytes) -> str:
    # Only git's own line end is removed, because a path may itself end in white space.
    return os.fsdecode(output.removesuffix(b"\n"))
