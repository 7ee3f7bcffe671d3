"""Access logs of a web server: made for the demo, and counted."""

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pydantic import BaseModel

_LINE: Final = re.compile(rb'^\S+ \S+ \S+ \[[^\]]+\] "[A-Z]+ \S+ [^"]+" ([0-9]{3}) ([0-9]+)$')


class Counts(BaseModel):
    """What lines of logs add up to; ``unreadable`` lines have another form."""

    requests: int = 0
    sent_bytes: int = 0
    by_status: dict[str, int] = {}
    unreadable: int = 0

    def add(self, other: "Counts") -> None:
        """Add the counts of other lines."""
        self.requests += other.requests
        self.sent_bytes += other.sent_bytes
        self.unreadable += other.unreadable
        for status, number in other.by_status.items():
            self.by_status[status] = self.by_status.get(status, 0) + number


def count(lines: Iterable[bytes]) -> Counts:
    """Return the counts of these lines."""
    found = Counts()
    for line in lines:
        match = _LINE.match(line.rstrip())
        if match is None:
            found.unreadable += 1
            continue
        status = match[1].decode()
        found.requests += 1
        found.sent_bytes += int(match[2])
        found.by_status[status] = found.by_status.get(status, 0) + 1
    return found


def write_sample(file: Path, *, lines: int, seed: int) -> None:
    """Write a log of so many lines, the same lines for the same seed."""
    dice = random.Random(seed)  # noqa: S311  # nosec B311  # sample data
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as log:
        for number in range(lines):
            status = dice.choices((200, 304, 404, 500), (90, 5, 4, 1))[0]
            address, size = f"192.0.2.{dice.randrange(256)}", dice.randrange(20_000)
            time = f"21/Nov/2026:{number % 24:02d}:00:00 +0000"
            log.write(f'{address} - - [{time}] "GET /page/{dice.randrange(500)} HTTP/1.1" {status} {size}\n')
