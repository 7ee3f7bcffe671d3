"""The image: what its Dockerfile says, and what the linter of Dockerfiles says of it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jsworker
from tests.deployment.files import DEPLOY, ROOT

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def hadolint(file: Path) -> "subprocess.CompletedProcess[str]":
    linter = Path(sys.executable).parent / "hadolint"
    command = [str(linter), "--failure-threshold", "style", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_linter_finds_nothing() -> None:
    result = hadolint(DEPLOY / "Dockerfile")
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("python:3.13-slim AS build", "python AS build", "DL3006"),
        ('ENTRYPOINT ["jsworker"]', "ENTRYPOINT jsworker", "DL3025"),
        ("WORKDIR /src", "WORKDIR src", "DL3000"),
    ],
)
def test_linter_finds_what_is_wrong(good: str, bad: str, rule: str, tmp_path: Path) -> None:
    assert DOCKERFILE.count(good) == 1
    file = tmp_path / "Dockerfile"
    file.write_text(DOCKERFILE.replace(good, bad))
    result = hadolint(file)
    assert result.returncode == 1
    assert rule in result.stdout


def stages() -> list[list[list[str]]]:
    """The instructions of each stage, as words."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", DOCKERFILE)).splitlines()
    found: list[list[list[str]]] = []
    for words in filter(None, map(str.split, lines)):
        if words[0] == "FROM":
            found.append([])
        found[-1].append(words)
    return found


def test_image_runs_jsworker_without_privileges_in_exec_form() -> None:
    *_, final = stages()
    assert final[0] == ["FROM", "python:3.13-slim"]
    last = {instruction: " ".join(words) for instruction, *words in final}
    assert last["USER"] == "10001:10001"
    assert json.loads(last["ENTRYPOINT"]) == ["jsworker"]
    assert json.loads(last["CMD"]) == ["--help"]
    assert "HEALTHCHECK" not in last


def test_image_holds_wheels_built_before_and_no_build_tools() -> None:
    build, final = stages()
    assert build[0] == ["FROM", "python:3.13-slim", "AS", "build"]
    assert not [words for words in final if words[0] in ("COPY", "ADD")]
    (run,) = [" ".join(words) for words in final if words[0] == "RUN"]
    assert "--mount=type=bind,from=build,source=/wheels,target=/wheels" in run
    assert "pip install --no-cache-dir --no-index --no-deps" in run
    assert not re.search("apt|gcc|hatchling", DOCKERFILE)


def test_image_is_built_by_locked_tools_alone() -> None:
    build, _ = stages()
    commands = [" ".join(words[1:]).split(" && ") for words in build if words[0] == "RUN"]
    pips = [command for each in commands for command in each]
    assert len(pips) == 3
    for pip in pips:
        assert pip.startswith("pip ")
        assert "--require-hashes" in pip or "--no-index" in pip, pip
        assert "--only-binary :all:" in pip or "--no-build-isolation" in pip, pip


def test_image_is_named_by_the_version_of_the_project() -> None:
    version = jsworker.__version__
    for text in (DOCKERFILE, (ROOT / "docs/kubernetes.md").read_text()):
        assert set(re.findall(r"\bjsworker:(\d\S+)", text.replace("\\n", " "))) == {version}


def test_image_is_built_from_files_that_exist_and_reach_the_builder() -> None:
    build, _ = stages()
    sources = {source for instruction, *words in build if instruction == "COPY" for source in words[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert "*" in (ROOT / ".dockerignore").read_text().splitlines()
    assert sources == allowed
    assert all((ROOT / source).exists() for source in sources)
