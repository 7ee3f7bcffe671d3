"""The processor that docker-compose.yml runs, to be replaced by your own."""  # noqa: INP001 -- a file to copy, no package

from collections import Counter

from pydantic import BaseModel

from jsworker import Job, JobProcessor


class Text(BaseModel):
    """What a job is given."""

    text: str


class CountWords(JobProcessor[Text]):
    """Counts how often each word of a text occurs."""

    async def process(self, job: Job[Text]) -> dict[str, int]:
        """Return the number of occurrences by word."""
        words = job.payload.text.lower().split()
        await job.update_progress(stage="count", progress=0.5, message=f"{len(words)} words")
        return dict(Counter(words))
