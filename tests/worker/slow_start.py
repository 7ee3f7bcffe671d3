"""Processors whose module keeps a process in quarantine from starting; their owner has imported it before."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from jsworker.core.job import Job
from jsworker.core.processor import Backoff, JobProcessor

if "isolated_child" in sys.argv[0] and os.environ.get("IMPORT") == "blocks":
    time.sleep(600)
if "isolated_child" in sys.argv[0] and os.environ.get("IMPORT") == "exits":
    os._exit(3)
if "isolated_child" in sys.argv[0] and os.environ.get("IMPORT", "").startswith("/"):
    while not Path(os.environ["IMPORT"]).exists():
        time.sleep(0.05)


class SlowStart(JobProcessor):
    """Always in quarantine, because no stall is left to its jobs."""

    kind = "slow-start"
    max_stalls = 1
    backoff = Backoff(first=3600.0, longest=3600.0)

    async def process(self, job: Job[dict[str, Any]]) -> int:  # noqa: ARG002 -- a processor's shape
        return os.getpid()
