"""The project's own archives, and environments of their own to install them in."""

import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


def copy_of_the_project(folder: Path) -> Path:
    """Copy the project without what running it leaves behind: another test may be writing some of it."""
    left_behind = (".git", ".venv", ".*_cache", "__pycache__", "build", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_behind))
    return folder


def make_release(project: Path, at: int) -> None:
    """Run ``make dist`` in a clone whose commit is of this time."""
    who = {f"GIT_{role}_{what}": "test" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {"GIT_AUTHOR_DATE": f"{at} +0000", "GIT_COMMITTER_DATE": f"{at} +0000"}
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    for command in (
        ["git", "init", "--quiet"],
        ["git", "commit", "--quiet", "--allow-empty", "--message", "a release"],
        # This environment has what the lock holds: nothing is installed.
        ["make", f"VENV={sys.prefix}", f"--old-file={sys.prefix}/.project", "dist"],
    ):
        run(*command, folder=project, environment=environment | who | when)


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that shares this one's dependencies, and return its programs."""
    uv = shutil.which("uv")
    if find_spec("pip"):
        # Setting up another pip would take longer than all that this one has to do.
        run(sys.executable, "-m", "venv", "--without-pip", str(folder))
        pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin/python"))
        run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    elif find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", str(folder))
        run(str(folder / "bin/pip"), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    else:
        assert uv, "neither pip nor ensurepip nor uv: nothing makes an environment"
        run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
        run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(folder), str(wheel))
    [packages] = folder.glob("lib/python*/site-packages")
    # Searched last; .pth files in there, of which one leads to this project, are not read.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def run(*command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> None:
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


class Releases(NamedTuple):
    """Two copies of the project, and when their releases were made.

    Attributes:
        machine: among what running the project leaves behind, at a path that nothing else names.
        another: without it, at another path, and with files of another time.
        made_at: the time of either's commit.
    """

    machine: Path
    another: Path
    made_at: int


def make_releases(folder: Path) -> Releases:
    """Make both, or find what another process of this test session has made."""
    releases = Releases(folder / "machine/project", folder / "else where/project", made_at=1_700_000_000)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "made").exists():
            return releases
        shutil.rmtree(folder, ignore_errors=True)
        for project in (releases.machine, releases.another):
            copy_of_the_project(project)
        for left in (
            ".venv/bin/python",
            "tests/__pycache__/test_project.pyc",
            "jsworker/__pycache__/job.pyc",
        ):
            (releases.machine / left).parent.mkdir(parents=True, exist_ok=True)
            (releases.machine / left).write_text("made by running")
        for file in releases.another.rglob("*"):
            os.utime(file, (1_000_000_000, 1_000_000_000))
        for project in (releases.machine, releases.another):
            make_release(project, releases.made_at)
        (folder / "made").touch()
    return releases


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """The project's releases, made once for all processes of the test session."""
    base = tmp_path_factory.getbasetemp()
    return make_releases((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "releases")


@pytest.fixture(scope="session")
def dist(releases: Releases) -> Path:
    """A folder with the project's sdist, and the wheel made from that sdist."""
    return releases.machine / "dist"


@pytest.fixture(scope="session")
def programs(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which the wheel is installed."""
    [wheel] = dist.glob("*.whl")
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")
