"""The job of the example: count the lines of one commit."""

import os
from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, StringConstraints

from code_evolution.git import GitError, GitKilled
from code_evolution.lines import count_lines
from jsworker import Fail, Job, JobProcessor

REMEMBERED_BLOBS = 200_000


class CommitToCount(BaseModel):
    """The payload: a commit by its full object id, its date, and its absolute git directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repository: Annotated[str, StringConstraints(pattern=r"^/", max_length=4096)]
    commit: Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-f]{40}|[0-9a-f]{64})$")]
    date: AwareDatetime


class CountLines(JobProcessor[CommitToCount]):
    """Counts the non-blank lines of a commit by language."""

    kind = "count-lines"
    concurrency = 2

    def __init__(self) -> None:
        self._memory: dict[bytes, int] = {}

    async def process(self, job: Job[CommitToCount]) -> dict[str, Any]:
        """Return date and commit of the payload, lines by language, and the id of this process."""

        async def report(stage: str, share: float) -> None:
            await job.update_progress(stage=stage, progress=share)

        if len(self._memory) > REMEMBERED_BLOBS:
            self._memory.clear()
        wanted = job.payload
        try:
            lines = await count_lines(wanted.repository, wanted.commit, memory=self._memory, progress=report)
        except GitKilled:
            raise  # the job is tried again
        except GitError as error:
            raise Fail(str(error)) from error  # no retry would mend a repository
        date = wanted.date.isoformat()
        return {"date": date, "commit": wanted.commit, "lines": lines, "pid": os.getpid()}
