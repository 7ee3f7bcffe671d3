"""The wheel: built twice it is the same, and it works where there is nothing of the repository."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import jsworker as jsworker_package
from tests.packaging.conftest import ROOT, Releases
from tests.supervisor.parent_process import ParentProcess
from tests.support.polling import eventually
from tests.support.servers import TestServers, ThrowawayPostgres

WORDS = """
from jsworker import Job, JobProcessor


class Double(JobProcessor[dict]):
    kind = "double"

    async def process(self, job: Job[dict]) -> int:
        return 2 * job.payload["n"]
"""


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_make_dist_gives_the_same_bytes_of_one_commit_wherever_and_whenever(releases: Releases) -> None:
    made = [releases.machine, releases.another]
    assert digests(made[0] / "dist") == digests(made[1] / "dist")
    [sdist] = (made[0] / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert {member.mtime for member in archive.getmembers()} == {releases.made_at}
    bills = [(folder / "build/jsworker.cdx.json").read_text() for folder in made]
    assert bills[0] == bills[1]
    bill = json.loads(bills[0])
    root = bill["metadata"]["component"]
    assert (root["name"], root["version"]) == ("jsworker", jsworker_package.__version__)
    locked = re.findall(r"(?m)^([a-z0-9.-]+)(?:\[.*\])?==", (ROOT / "deploy/requirements.lock").read_text())
    assert {part["name"] for part in bill["components"]} == set(locked)


def jsworker(programs: Path, folder: Path, environment: dict[str, str], *arguments: str) -> str:
    result = subprocess.run(
        [programs / "jsworker", *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def place_of_the_package(programs: Path, folder: Path) -> Path:
    command = [str(programs / "python"), "-c", "import jsworker; print(jsworker.__file__)"]
    return Path(subprocess.check_output(command, cwd=folder, text=True).strip())


async def test_an_installed_wheel_migrates_enqueues_and_runs(
    programs: Path, servers: TestServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "my_jobs.py").write_text(WORDS)
    postgres: ThrowawayPostgres = servers.postgres
    environment = {
        "JSWORKER_DATABASE_URL": postgres.create_database("installed_wheel"),
        "JSWORKER_NATS_URL": servers.nats.url,
        "JSWORKER_STREAM": "INSTALLED",
        "JSWORKER_SUBJECT_PREFIX": "installed",
    }
    assert place_of_the_package(programs, tmp_path).is_relative_to(programs.parent)
    assert jsworker(programs, tmp_path, environment, "db", "upgrade")
    job_id = jsworker(programs, tmp_path, environment, "enqueue", "double", "--payload", '{"n": 21}')
    parent = ParentProcess(
        "my_jobs:Double",
        folder=tmp_path,
        environment=environment,
        command=(str(programs / "jsworker"), "run"),
    )
    try:

        async def completed() -> None:
            row = jsworker(programs, tmp_path, environment, "job", job_id, "--json")
            assert '"status": "completed"' in row
            assert '"result": 42' in row

        await eventually(completed, seconds=60)
        parent.send(signal.SIGTERM)
        assert await parent.ends() == 0
    finally:
        parent.kill_all()


def test_others_see_its_types(programs: Path, tmp_path: Path) -> None:
    source = "from jsworker import Job\n\ndef wrong(job: Job) -> str:\n    return job.attempt\n"
    (tmp_path / "mine.py").write_text(source)
    # What jsworker itself imports has types too, which take five times as long to read.
    libraries = "nats.*,psycopg.*,pydantic.*,pydantic_settings.*,sqlalchemy.*,structlog.*"
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{libraries}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(programs / "python"), "mine.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'got "int", expected "str"' in result.stdout, result.stdout + result.stderr
