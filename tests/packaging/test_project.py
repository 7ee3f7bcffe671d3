"""The project itself: what the wheel and the sdist hold, what the locks pin, how make sets up."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import jsworker
from tests.packaging.conftest import ROOT, Releases

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
LOCK = ROOT / "requirements-dev.lock"
IMAGE_LOCK = ROOT / "deploy/requirements.lock"
BUILD_LOCK = ROOT / "deploy/build.lock"
OLDEST_LOCK = ROOT / "requirements-oldest.lock"


def tree(folder: str) -> set[str]:
    """The files under a folder of the project that are not made by running it."""
    files = (file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file())
    return {str(file) for file in files if "__pycache__" not in file.parts}


# Wheel and sdist


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(dist / f"jsworker-{VERSION}-py3-none-any.whl") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sdist(dist: Path) -> dict[str, bytes]:
    content = {}
    with tarfile.open(dist / f"jsworker-{VERSION}.tar.gz") as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member)
            content[member.name.removeprefix(f"jsworker-{VERSION}/")] = file.read() if file else b""
    return content


def test_wheel_holds_the_package_the_migrations_and_nothing_else(wheel: dict[str, bytes]) -> None:
    info = f"jsworker-{VERSION}.dist-info"
    metadata = {
        f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }
    migrations = {f"jsworker/{name}" for name in tree("alembic") | {"alembic.ini"}}
    assert set(wheel) == tree("jsworker") | migrations | metadata
    assert "jsworker/py.typed" in wheel
    assert [name for name in migrations if re.match(r"jsworker/alembic/versions/\w+\.py$", name)]


def test_wheel_tells_version_command_and_licence(wheel: dict[str, bytes]) -> None:
    info = f"jsworker-{VERSION}.dist-info"
    metadata = message_from_bytes(wheel[f"{info}/METADATA"])
    assert metadata["Version"] == VERSION == jsworker.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    assert wheel[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "jsworker = jsworker.__main__:main" in wheel[f"{info}/entry_points.txt"].decode()


def test_sdist_holds_the_sources_and_the_tests(sdist: dict[str, bytes]) -> None:
    sources = tree("jsworker") | tree("alembic") | tree("deploy") | tree("examples")
    sources |= {
        "alembic.ini",
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        LOCK.name,
        OLDEST_LOCK.name,
        ".dockerignore",
        "PKG-INFO",
    }
    assert sources <= set(sdist)
    assert f"tests/packaging/{Path(__file__).name}" in sdist
    assert not [name for name in sdist if re.search(r"\.venv|__pycache__|\.pyc$|_cache/|\.coverage", name)]


def test_no_archive_names_the_machine_that_built_it(
    releases: Releases, wheel: dict[str, bytes], sdist: dict[str, bytes]
) -> None:
    place = str(releases.machine.parent).encode()
    assert not [name for name, content in (*wheel.items(), *sdist.items()) if place in content]


# Locks


_PIN = r"(?m)^([a-z0-9.-]+)(\[[a-z, -]+\])?==(\S+)"


def pins(lock: Path) -> dict[str, set[str]]:
    """The versions that a lock allows, by package; more than one where Python versions differ."""
    found: dict[str, set[str]] = {}
    for name, _, version in re.findall(_PIN, lock.read_text()):
        found.setdefault(name, set()).add(version)
    return found


def requirements(*extras: str) -> list[Requirement]:
    """What the project asks for itself and through these extras, extras of the project resolved."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    asked = [Requirement(line) for line in lines]
    inner = [extra for requirement in asked if requirement.name == "jsworker" for extra in requirement.extras]
    others = [requirement for requirement in asked if requirement.name != "jsworker"]
    return others + (requirements(*inner) if inner else [])


@pytest.mark.parametrize(
    ("lock", "extras"), [(LOCK, ["dev"]), (IMAGE_LOCK, ["uvloop", "dashboard"])], ids=["dev", "image"]
)
def test_lock_pins_what_the_project_asks_for(lock: Path, extras: list[str]) -> None:
    pinned = pins(lock)
    for requirement in requirements(*extras):
        versions = pinned.get(canonicalize_name(requirement.name))
        assert versions, f"{requirement} is not in {lock.name}: make lock"
        assert all(requirement.specifier.contains(version) for version in versions), (
            f"{requirement}: make lock"
        )


def test_lock_names_each_extra_that_is_asked_for() -> None:
    """Else pip takes the newest release for a requirement with an extra, and misses its hash."""
    named = {
        name: set(re.findall(r"[a-z-]+", extras)) for name, extras, _ in re.findall(_PIN, LOCK.read_text())
    }
    asked = [
        Requirement(line)
        for name in named
        for line in (requires(name) if is_installed(name) else None) or ()
        if "[" in line.partition(";")[0]
    ]
    needed = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert any(one.name == "coverage" for one in needed)
    for requirement in needed:
        assert requirement.extras <= named[canonicalize_name(requirement.name)], f"{requirement}: make lock"


def is_installed(name: str) -> bool:
    return any(distributions(name=name))


def test_image_runs_the_versions_that_are_tested() -> None:
    tested = pins(LOCK)
    assert all(versions == tested.get(name) for name, versions in pins(IMAGE_LOCK).items())
    assert "pytest" not in pins(IMAGE_LOCK)


def test_build_tools_of_the_image_are_locked_and_those_that_are_tested() -> None:
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [Requirement(line) for line in text["build-system"]["requires"]]
    listed = (ROOT / "deploy/build.in").read_text().splitlines()
    asked += [Requirement(line) for line in listed if not line.startswith("#")]
    locked, tested = pins(BUILD_LOCK), pins(LOCK)
    for requirement in asked:
        (version,) = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: make lock"
    assert all(versions == tested.get(name, versions) for name, versions in locked.items())


def test_actions_are_pinned_by_commit() -> None:
    text = "".join(file.read_text() for file in (ROOT / ".github/workflows").iterdir())
    uses = re.findall(r"uses: (.+)", text)
    assert uses
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in uses)


def test_both_supported_lines_of_sqlalchemy_are_tested() -> None:
    [asked] = [requirement for requirement in requirements() if requirement.name == "sqlalchemy"]
    [oldest] = pins(OLDEST_LOCK).pop("sqlalchemy")
    assert str(asked.specifier) == f"<2.2,>={oldest}"
    assert oldest.startswith("2.0.")
    assert all(version.startswith("2.1.") for version in pins(LOCK)["sqlalchemy"])


def test_the_lowest_version_of_each_dependency_is_tested() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [extras] = re.findall(r"(?m)^OLDEST_EXTRAS := \$\(addprefix --extra ,(.*)\)$", makefile)
    untested = {"embedded", "bench", "docs", "dev"}  # servers, and what only this project uses
    assert {*extras.split(), *untested} == set(PROJECT["optional-dependencies"])
    locked = pins(OLDEST_LOCK)
    [left_out] = re.findall(r"(?m)^NOT_OLDEST := (.*)$", makefile)
    asked = [one for one in requirements(*extras.split()) if one.name not in left_out.split()]
    for requirement in asked:
        lower = [each.version for each in requirement.specifier if each.operator == ">="]
        [version] = locked[canonicalize_name(requirement.name)]
        assert [Version(version)] == [Version(each) for each in lower], f"{requirement}: make lock"


@pytest.mark.parametrize(
    "lock", [LOCK, IMAGE_LOCK, BUILD_LOCK, OLDEST_LOCK], ids=["dev", "image", "build", "oldest"]
)
def test_lock_holds_a_hash_for_each_pin_and_no_address(lock: Path) -> None:
    text = lock.read_text()
    entries = [entry for entry in re.split(r"(?m)^(?=\S)", text) if entry and not entry.startswith("#")]
    assert len(entries) == sum(map(len, pins(lock).values()))
    assert all("--hash=sha256:" in entry for entry in entries)
    assert "//" not in text
    assert not re.search(r"(?m)^\s*-(?!-hash)", text)


# Make


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A project of the same Makefile, nothing to install, and a path that needs care."""
    folder = tmp_path / "a checkout's path"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / LOCK.name).touch()
    (folder / OLDEST_LOCK.name).touch()
    (folder / "pyproject.toml").write_text('[project]\nname = "nothing"\nversion = "0"\n')
    return folder


def make(folder: Path, *arguments: str, path: str = os.environ["PATH"]) -> "subprocess.CompletedProcess[str]":
    command = ["make", "--no-print-directory", "UV=", *arguments]
    environment = {"PATH": path, "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def path_with(folder: Path, **scripts: str) -> str:
    """A PATH on which these interpreters come first, as shell scripts."""
    folder.mkdir()
    for name, script in scripts.items():
        program = folder / name.replace("_", ".")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


SHIM = "echo 'command not found: this version is not chosen' >&2; exit 127"


def test_make_passes_over_an_interpreter_that_does_not_run(checkout: Path, tmp_path: Path) -> None:
    path = path_with(
        tmp_path / "bin", python3_14=SHIM, python3_13=SHIM, python3_12=f'exec "{sys.executable}" "$@"'
    )
    result = make(checkout, ".venv/.dependencies", path=path)
    assert result.returncode == 0, result.stderr
    assert "not chosen" not in result.stderr
    python = checkout / ".venv/bin/python"
    answer = subprocess.check_output([python, "-c", "import sys; print(sys.version)"], text=True)
    assert answer.strip() == sys.version


def test_make_says_in_one_line_that_no_interpreter_fits(checkout: Path, tmp_path: Path) -> None:
    path = path_with(
        tmp_path / "bin", python3_14=SHIM, python3_13=SHIM, python3_12=SHIM, python3_11=SHIM, python3=SHIM
    )
    result = make(checkout, ".venv/.dependencies", path=path)
    assert result.returncode == 2
    said, stopped = result.stderr.splitlines()
    assert said.startswith("no Python 3.11 to 3.14 with venv and ensurepip found")
    assert stopped.startswith("make: ***")


def test_make_sets_up_again_only_after_a_change(checkout: Path) -> None:
    dependencies, project, oldest = stamps = (
        ".venv/.dependencies",
        ".venv/.project",
        ".venv/oldest/.installed",
    )
    (checkout / oldest).parent.mkdir(parents=True)
    for stamp in stamps:
        (checkout / stamp).touch()

    def out_of_date() -> set[str]:
        return {stamp for stamp in stamps if make(checkout, "--question", stamp).returncode == 1}

    assert out_of_date() == set()
    for changed, stale in (
        ("pyproject.toml", {project}),
        (LOCK.name, {dependencies, project, oldest}),
        (OLDEST_LOCK.name, {oldest}),
    ):
        newer = (checkout / oldest).stat().st_mtime_ns + 10**9
        file = checkout / changed
        before = file.stat().st_mtime_ns
        os.utime(file, ns=(newer, newer))
        assert out_of_date() == stale
        os.utime(file, ns=(before, before))


def test_make_lists_every_target_a_person_types() -> None:
    phony = re.search(r"(?m)^\.PHONY: (.*)$", (ROOT / "Makefile").read_text())
    assert phony
    listed = re.findall(r"(?m)^make (\S+)", make(ROOT).stdout)
    assert sorted(listed) == sorted(phony[1].split())
    assert {"demo", "test", "check", "fix", "dev"} <= set(listed)
