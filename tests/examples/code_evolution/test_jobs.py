import os
from pathlib import Path

import psutil
import pytest

from code_evolution.jobs import CommitToCount, CountLines
from jsworker.core import strict_json
from jsworker.core.errors import Fail, InvalidPayload, OwnershipLost
from jsworker.core.processor import read_payload, write_payload
from jsworker.testing import run_job

from .repositories import START, commit, git, new_repository, object_file


def head_of(folder: Path) -> CommitToCount:
    head = git(folder, "rev-parse", "HEAD")
    return CommitToCount(repository=str(folder / ".git"), commit=head, date=START)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = new_repository(tmp_path / "project")
    commit(folder, {"a.py": b"a = 1\n\nb = 2\n", "b.go": b"package b\n"})
    return folder


async def test_counts_a_commit_with_stages(project: Path) -> None:
    run = await run_job(CountLines, head_of(project))

    assert run.result == {
        "date": "2021-01-10T12:00:00+00:00",
        "commit": git(project, "rev-parse", "HEAD"),
        "lines": {"Python": 2, "Go": 1},
        "pid": os.getpid(),
    }
    assert [report.stage for report in run.reports] == ["list", "count"]


async def test_a_broken_object_fails_the_job_for_good_in_one_line(project: Path) -> None:
    blob = git(project, "rev-parse", "HEAD:a.py")
    object_file(project / ".git", blob).unlink()

    with pytest.raises(Fail) as failure:
        await run_job(CountLines, head_of(project))

    assert str(failure.value) == f"repository {project}/.git: object {blob} is missing or damaged"


async def test_a_lost_job_stops_and_leaves_no_git_behind(project: Path) -> None:
    with pytest.raises(OwnershipLost):
        await run_job(CountLines, head_of(project), lost_after=1)

    assert [child for child in psutil.Process().children() if child.name() == "git"] == []


def test_the_payload_survives_its_way_through_json() -> None:
    payload = CommitToCount(repository="/srv/pro ject", commit="a" * 40, date=START)

    assert (
        read_payload(CountLines, strict_json.loads(write_payload(CountLines, payload), what="payload"))
        == payload
    )


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("repository", "relative/path"),
        ("repository", "--upload-pack=touch /tmp/x"),
        ("repository", ""),
        ("commit", "HEAD"),
        ("commit", "--all"),
        ("commit", "A" * 40),
        ("commit", "a" * 39),
        ("commit", "a" * 41),
        ("commit", "a" * 40 + "\n"),
        ("date", "2021-01-10T12:00:00"),
        ("date", "yesterday"),
        ("extra", 1),
    ],
)
def test_refuses_payloads_that_could_mean_something_else_to_git(field_name: str, value: object) -> None:
    payload = {"repository": "/srv/project", "commit": "a" * 40, "date": START.isoformat()} | {
        field_name: value
    }

    with pytest.raises(InvalidPayload, match=f"^payload of kind count-lines: {field_name}: "):
        read_payload(CountLines, payload)
