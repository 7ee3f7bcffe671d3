"""The job of the demo: count the lines of one commit."""

import os
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints

from jsworker.core.errors import Fail
from jsworker.core.job import Job
from jsworker.core.processor import JobProcessor
from jsworker.demo.git import GitEnded, GitError
from jsworker.demo.lines import LineMemory, Stage, count_lines


class CommitToCount(BaseModel):
    """The payload: which commit of which repository.

    Attributes:
        repository: the absolute git directory, readable by the worker.
        commit: the full object id, 40 or 64 hexadecimal digits.
        date: when it was committed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)]
    commit: Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
    date: AwareDatetime


class CountLines(JobProcessor[CommitToCount]):
    """Counts the non-blank lines of a commit by language."""

    kind = "count-lines"
    concurrency = 2

    def __init__(self) -> None:
        self._memory = LineMemory()

    async def process(self, job: Job[CommitToCount]) -> dict[str, Any]:
        """Count the commit.

        Returns:
            ``date`` and ``commit`` of the payload, ``lines``: lines by language, and ``pid``: the process
            that counted them.

        Raises:
            Fail: the repository is not there or is damaged, or git is not installed; no retry would help.
            GitEnded: a signal ended git; the job is tried again.
        """

        async def tell(stage: Stage, share: float) -> None:
            await job.update_progress(stage=stage, progress=share)

        wanted = job.payload
        try:
            lines = await count_lines(wanted.repository, wanted.commit, memory=self._memory, progress=tell)
        except GitEnded:
            raise
        except GitError as error:
            raise Fail(str(error)) from error
        return {
            "date": wanted.date.isoformat(),
            "commit": wanted.commit,
            "lines": lines,
            "pid": os.getpid(),
        }
