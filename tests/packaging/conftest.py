"""The project's own archives, and environments of their own to install them in."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def copy_of_the_project(folder: Path) -> Path:
    """Copy the project without what running it leaves behind: another test may be writing some of it."""
    left_behind = (".git", ".venv", ".*_cache", "__pycache__", "build", ".hypothesis")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left_behind))
    return folder


def build(project: Path, outdir: Path) -> None:
    """Build the sdist, and the wheel from that sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(outdir), str(project)]
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel into a new environment that shares this one's dependencies, and return its programs."""
    uv = shutil.which("uv")
    if find_spec("ensurepip"):
        run(sys.executable, "-m", "venv", str(folder))
        run(str(folder / "bin/pip"), "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    else:
        assert uv, "neither ensurepip nor uv: nothing makes an environment"
        run(uv, "venv", "--quiet", "--python", sys.executable, str(folder))
        run(uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", str(folder), str(wheel))
    [packages] = folder.glob("lib/python*/site-packages")
    # Searched last; .pth files in there, of which one leads to this project, are not read.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin"


def run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project's sdist and wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build(copy_of_the_project(folder / "project"), folder / "archives")
    return folder / "archives"


@pytest.fixture(scope="session")
def programs(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment in which the wheel is installed."""
    [wheel] = dist.glob("*.whl")
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")
