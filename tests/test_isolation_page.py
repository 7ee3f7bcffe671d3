"""docs/isolation.md: its job runs by its commands, and the names that it gives are those that exist."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from jsworker.core.settings import Settings, variable_of
from jsworker.telemetry.metrics import ISOLATED_ENDS
from jsworker.worker.isolation.isolated_process import Cause
from tests.deployment.metric_names import LABELS, VALUES
from tests.support.documents import Page
from tests.support.polling import eventually

PAGE = Page("docs/isolation.md")


@pytest.mark.usefixtures("environment")
async def test_its_job_is_done_by_its_commands(tmp_path: Path) -> None:
    [code], [commands] = PAGE.blocks("python"), PAGE.blocks("sh")
    (tmp_path / "primes.py").write_text(code)
    run, enqueue = ([sys.executable, "-m", *shlex.split(line)] for line in commands.splitlines())
    with subprocess.Popen(run, cwd=tmp_path) as worker:  # noqa: ASYNC220 -- starts at once
        try:
            asked = subprocess.run(enqueue, cwd=tmp_path, capture_output=True, text=True, check=True)  # noqa: ASYNC221
            show = [sys.executable, "-m", "jsworker", "job", asked.stdout.strip(), "--json"]

            async def is_done() -> None:
                shown = subprocess.run(show, capture_output=True, text=True, check=True)  # noqa: ASYNC221
                assert json.loads(shown.stdout)["result"] == 1229

            await eventually(is_done, seconds=120.0)
        finally:
            worker.terminate()


def test_its_names_are_those_that_exist() -> None:
    assert set(re.findall(r"JSWORKER_[A-Z_]+", PAGE.text)) <= {
        variable_of(name) for name in Settings.model_fields
    }
    assert set(re.findall(r"jsworker_\w+", PAGE.text)) <= set(LABELS)
    assert {*re.findall(r"`(crashed in isolation)`", PAGE.text)} <= VALUES["cause"]


def test_it_names_each_cause_of_an_end() -> None:
    rows = re.findall(r"(?m)^\| `([a-z ]+)` \|", PAGE.text.partition("| cause |")[2])
    assert rows == [*ISOLATED_ENDS]
    assert {*get_args(Cause)} == {*ISOLATED_ENDS, "not needed"}
