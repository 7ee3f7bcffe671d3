"""Prometheus's own tool reads what a worker shows (Debian package: prometheus). Run by ``make verify``."""

import asyncio
import subprocess
import urllib.request

import pytest

from jsworker import JobClient
from tests.supervisor.conftest import Supervise
from tests.supervisor.test_http import answers, base_of

pytestmark = pytest.mark.verify


def checked(text: str) -> "subprocess.CompletedProcess[str]":
    command = ["promtool", "check", "metrics", "--extended"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


async def test_metrics_follow_the_conventions(supervise: Supervise, client: JobClient) -> None:
    parent = supervise("Nap", processes=2, http_port=0)
    base = await base_of(parent)
    await client.enqueue_many("nap", [{"seconds": 0}] * 10)
    await answers(f"{base}/metrics", 200, "jsworker_queue_drift_jobs", 'outcome="completed"')
    with await asyncio.to_thread(urllib.request.urlopen, f"{base}/metrics") as answer:
        text = answer.read().decode()
    result = await asyncio.to_thread(checked, text)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_tool_finds_what_is_wrong() -> None:
    assert checked("# TYPE jobs counter\njobs 1\n").returncode != 0
