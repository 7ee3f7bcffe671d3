"""Producer processes, as the harness starts them."""

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsworker.embedded import start_with_parent
from tests.faults.fleet import ROOT, plain_environment, variables
from tests.faults.journal import FOLDER_VARIABLE


def start_producer(
    folder: Path,
    settings: Mapping[str, Any],
    name: str,
    *,
    rate: float,
    seed: int,
    most: int | None = None,
    further: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a producer process.

    Args:
        folder: where it records what it does.
        settings: its client's.
        name: the beginning of its unique keys.
        rate: jobs a second.
        seed: of its dice.
        most: jobs after which it ends; None: when it is told.
        further: environment variables.
    """
    environment = {
        **plain_environment(),
        **variables(settings),
        FOLDER_VARIABLE: str(folder),
        **(further or {}),
    }
    arguments = [name, str(rate), str(seed), *([str(most)] if most is not None else [])]
    with (folder / f"output-{name}.log").open("ab") as log:
        return start_with_parent(
            [sys.executable, "-m", "tests.faults.producer", *arguments],
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            death_signal=signal.SIGKILL,
        )
