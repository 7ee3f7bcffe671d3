"""What the demo has to do: the commits of all repositories that are to be counted, one job each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jsworker.demo.history import Commit, Repository, first_parent_history, open_repository, sample
from jsworker.demo.processor import CommitToCount


@dataclass(frozen=True, slots=True)
class Project:
    """One repository and what is to be counted of it.

    Attributes:
        repository: where it is.
        history: how many commits its main line has.
        commits: those to count, in the order of the history.
    """

    repository: Repository
    history: int
    commits: Sequence[Commit]


@dataclass(frozen=True, slots=True)
class Task:
    """What one job does.

    Attributes:
        project: the place of its project among all.
        label: what to call it.
        payload: what the job is told.
    """

    project: int
    label: str
    payload: CommitToCount


def read_projects(paths: Sequence[Path]) -> list[Project]:
    """Read the history of repositories and choose the commits to count; a repository given twice counts once.

    Args:
        paths: work trees, folders inside one, or bare repositories; none means the working directory.

    Raises:
        RepositoryNotFound: no repository is there.
        RepositoryEmpty: it has no commits.
        RepositoryBroken: its history cannot be read.
        GitMissing: git is not installed.
    """
    found = [open_repository(path) for path in paths or [Path.cwd()]]
    projects: list[Project] = []
    for repository in {each.git_dir: each for each in found}.values():
        history = first_parent_history(repository)
        projects.append(Project(repository, len(history), sample(history)))
    return projects


def tasks_of(projects: Sequence[Project]) -> list[Task]:
    """Return the jobs of all projects, one project after the other."""
    return [
        Task(
            project=place,
            label=f"{project.repository.name} {commit.id[:8]}",
            payload=CommitToCount(
                repository=str(project.repository.git_dir), commit=commit.id, date=commit.date
            ),
        )
        for place, project in enumerate(projects)
        for commit in project.commits
    ]
