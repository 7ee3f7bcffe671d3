"""docs/results.md: its code and its command are run, and what it says of names is true."""

import json
import shlex

import pytest

from jsworker import Job, JobClient, JobProcessor, Worker, load_settings
from jsworker.core import exit_codes
from jsworker.stream import result_hints
from tests.support.documents import ROOT, Page

PAGE = Page("docs/results.md")


class CountWords(JobProcessor[dict[str, str]]):
    async def process(self, job: Job[dict[str, str]]) -> dict[str, int]:
        words = job.payload["text"].split()
        return {word: words.count(word) for word in words}


@pytest.mark.usefixtures("environment")
async def test_its_code_does_what_it_says() -> None:
    names, settings = PAGE.names(), load_settings()
    async with Worker([CountWords], settings):
        assert await names["count"](["a b a", "c"]) == [{"a": 2, "b": 1}, {"c": 1}]
        async with JobClient(settings) as client:
            job = await client.enqueue("count-words", {"text": "a"})
            await job.result(60)
            [listed] = await client.list(limit=1)
        told = json.loads(await names["report"](str(job.id)))
    assert (told["id"], told["status"], told["result"], told["timeline"]) == (
        str(job.id),
        "completed",
        {"a": 1},
        [],
    )
    assert told["finished_at"] == listed.to_dict()["finished_at"]
    assert await names["look"]("00000000-0000-4000-8000-000000000001") == "pruned, or never there"


@pytest.mark.usefixtures("environment")
def test_its_command_waits(capsys: pytest.CaptureFixture[str]) -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    [command] = PAGE.blocks("sh")
    assert run_command([*shlex.split(command)[1:-1], "0.1"]) == exit_codes.TIMED_OUT
    assert "has not ended within 0.1 s" in capsys.readouterr().err


def test_its_numbers_and_subjects_are_those_of_the_code() -> None:
    assert f"| {exit_codes.NOT_COMPLETED} |" in PAGE.text
    assert f"| {exit_codes.TIMED_OUT} |" in PAGE.text
    permissions = (ROOT / "deploy" / "nats" / "permissions.conf").read_text()
    for subject in (result_hints.AWAITED, result_hints.ENDED):
        assert f"`{subject}*`" in PAGE.text
        assert f'"{subject}*"' in permissions
    assert (result_hints.RENEW_SECONDS, result_hints.FORGET_SECONDS) == (5, 10)
