import os
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
import pytest

from code_evolution.jobs import CommitToCount, CountLines
from jsworker.core import strict_json
from jsworker.core.errors import Fail, InvalidPayload, OwnershipLost
from jsworker.core.job import Job, MemberResult
from jsworker.core.processor import read_payload, write_payload

from .repositories import START, commit, git, new_repository, object_file


@dataclass
class RecordedOwnership:
    """Writes progress down instead of into a row; loses the job after so many reports."""

    lost_after: int | None = None
    told: list[tuple[str | None, float | None]] = field(default_factory=list)
    should_stop: bool = False
    cancelled: bool = False

    async def update_progress(self, stage: str | None, progress: float | None, message: str | None) -> None:  # noqa: ARG002 -- the port has it
        if len(self.told) == self.lost_after:
            raise OwnershipLost
        self.told.append((stage, progress))

    async def save_checkpoint(self, value: Any) -> None:
        raise NotImplementedError

    async def quiet(self, seconds: float) -> None:
        raise NotImplementedError

    def transaction(self, result: Any) -> AbstractAsyncContextManager[Any]:
        raise NotImplementedError

    def sync_transaction(self, result: Any) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def transactions(self, result: Any) -> AsyncIterator[AbstractAsyncContextManager[Any]]:
        raise NotImplementedError

    def sync_transactions(self, result: Any) -> Iterator[AbstractContextManager[Any]]:
        raise NotImplementedError

    def complete_statement(self, result: Any) -> Any:
        raise NotImplementedError

    def enqueue(
        self, kind: Any, payloads: Iterable[Any], unique_keys: Sequence[str | None] | None, options: Any
    ) -> list[UUID]:
        raise NotImplementedError

    async def add_to_batch(
        self, kind: Any, payloads: Iterable[Any], options: Mapping[str, Any]
    ) -> list[UUID]:
        raise NotImplementedError

    def add_to_batch_statement(self, kind: Any, payloads: Iterable[Any], options: Mapping[str, Any]) -> Any:
        raise NotImplementedError

    async def results_page(self, node: str, after: MemberResult | None) -> list[MemberResult]:
        raise NotImplementedError

    def wait_for(self, call: Coroutine[Any, Any, Any]) -> Any:
        raise NotImplementedError

    @property
    def steps(self) -> Any:
        raise NotImplementedError


def job_for(
    folder: Path, commit_id: str, ownership: RecordedOwnership, date: datetime = START
) -> Job[CommitToCount]:
    return Job(
        id=uuid4(),
        kind="count-lines",
        payload=CommitToCount(repository=str(folder / ".git"), commit=commit_id, date=date),
        attempt=1,
        fencing_token=1,
        cleared=False,
        clear_reason=None,
        deadline=None,
        checkpoint=None,
        _ownership=ownership,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = new_repository(tmp_path / "project")
    commit(folder, {"a.py": b"a = 1\n\nb = 2\n", "b.go": b"package b\n"})
    return folder


async def test_counts_a_commit_with_stages_and_gives_a_result_that_can_be_stored(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD")
    ownership = RecordedOwnership()

    result = await CountLines().process(job_for(project, head, ownership))

    assert result == {
        "date": "2021-01-10T12:00:00+00:00",
        "commit": head,
        "lines": {"Python": 2, "Go": 1},
        "pid": os.getpid(),
    }
    assert strict_json.dumps(result, what="result")
    assert [stage for stage, _ in ownership.told] == ["list", "count"]


async def test_a_broken_object_fails_the_job_for_good_in_one_line(project: Path) -> None:
    head, blob = git(project, "rev-parse", "HEAD", "HEAD:a.py").split()
    object_file(project / ".git", blob).unlink()

    with pytest.raises(Fail) as failure:
        await CountLines().process(job_for(project, head, RecordedOwnership()))

    assert str(failure.value) == f"repository {project}/.git: object {blob} is missing or damaged"


async def test_a_lost_job_stops_and_leaves_no_git_behind(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD")

    with pytest.raises(OwnershipLost):
        await CountLines().process(job_for(project, head, RecordedOwnership(lost_after=1)))

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
