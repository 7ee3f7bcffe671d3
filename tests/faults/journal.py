"""The unfenced record of one process: what it really did, whatever the database says about it."""

import json
import os
from pathlib import Path
from typing import Any

from jsworker.core.clock import boottime

FOLDER_VARIABLE = "FAULTS_FOLDER"
"""Where the processes of a fault run keep their records."""


def records_folder() -> Path:
    """Return the folder that the harness named."""
    return Path(os.environ[FOLDER_VARIABLE])


class Journal:
    """A file of one process, one JSON object a line, one write a line; a kill tears at most the last one."""

    def __init__(self, folder: Path, what: str) -> None:
        self._file = (folder / f"{what}-{os.getpid()}-{boottime():.3f}.jsonl").open("ab", buffering=0)

    def note(self, what: str, **facts: Any) -> None:
        """Append a line; ``at`` is this machine's boot time in seconds, the same in every process."""
        line = {"what": what, "at": round(boottime(), 4), "pid": os.getpid(), **facts}
        self._file.write(json.dumps(line, default=str).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_journals(folder: Path, what: str) -> list[dict[str, Any]]:
    """Return the whole lines of all processes' journals of one sort, in the order of time."""
    lines: list[dict[str, Any]] = []
    for path in folder.glob(f"{what}-*.jsonl"):
        lines += read_journal(path)
    return sorted(lines, key=lambda line: float(line["at"]))


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of one journal."""
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
