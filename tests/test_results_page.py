"""docs/results.md: its code and its command are run, and what it says of names is true."""

import json
import re
import secrets
import shlex
from pathlib import Path
from typing import Any

import pytest

from jsworker import Job, JobClient, JobProcessor, Settings, Worker, load_settings
from jsworker.core import exit_codes
from jsworker.stream import result_hints

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text()


class CountWords(JobProcessor[dict[str, str]]):
    async def process(self, job: Job[dict[str, str]]) -> dict[str, int]:
        words = job.payload["text"].split()
        return {word: words.count(word) for word in words}


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, servers: Any, database_url: str) -> Settings:
    name = f"page-of-results-{secrets.token_hex(4)}"
    variables = {
        "DATABASE_URL": database_url,
        "NATS_URL": servers.nats.url,
        "STREAM": name,
        "SUBJECT_PREFIX": name,
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"JSWORKER_{name}", value)
    return load_settings()


async def test_its_code_does_what_it_says(settings: Settings) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks("python"):
        exec(block, names)  # noqa: S102 -- the page's own code
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


@pytest.mark.usefixtures("settings")
def test_its_command_waits(capsys: pytest.CaptureFixture[str]) -> None:
    from jsworker.cli.app import run_command  # noqa: PLC0415 -- the command line takes a while to import

    [command] = blocks("sh")
    assert run_command([*shlex.split(command)[1:-1], "0.1"]) == exit_codes.TIMED_OUT
    assert "has not ended within 0.1 s" in capsys.readouterr().err


def test_its_numbers_and_subjects_are_those_of_the_code() -> None:
    assert f"| {exit_codes.NOT_COMPLETED} |" in PAGE
    assert f"| {exit_codes.TIMED_OUT} |" in PAGE
    permissions = (ROOT / "deploy" / "nats" / "permissions.conf").read_text()
    for subject in (result_hints.AWAITED, result_hints.ENDED):
        assert f"`{subject}*`" in PAGE
        assert f'"{subject}*"' in permissions
    assert (result_hints.RENEW_SECONDS, result_hints.FORGET_SECONDS) == (5, 10)
