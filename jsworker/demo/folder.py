"""The demo's data folder: its servers' data, its workers' logs, and one demo at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jsworker.core.errors import JsworkerError
from jsworker.demo.git import shown
from jsworker.embedded.locks import EXCLUSIVE, try_lock
from jsworker.embedded.servers import default_data_folder

_SHOWN_LINES = 8


class FolderTaken(JsworkerError):
    """Another demo uses the data folder."""


class DemoFolder:
    """The data folder of the demo.

    Args:
        path: where it is; None takes ``jsworker/demo`` in the user's cache folder.

    Attributes:
        path: where it is, absolute.
        logs: the folder of the workers' logs; those of the latest run are kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = (path or default_data_folder().with_name("demo")).expanduser().resolve()
        self.logs = self.path / "logs"

    def ends_of_logs(self) -> str:
        """Return the last lines of each worker's log."""
        return "\n".join(end_of_log(log) for log in sorted(self.logs.glob("*.log")))

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the folder, so that no other demo counts, kills and cancels among this one's jobs.

        Raises:
            FolderTaken: another demo holds it, or it cannot be written to.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "demo.lock").open("ab")
        except OSError as error:
            raise FolderTaken(f"data folder {shown(self.path)} cannot be used: {error.strerror}") from error
        with lock:
            if not try_lock(lock, EXCLUSIVE):
                raise FolderTaken(
                    f"another demo runs in {shown(self.path)}: wait for its end, or take another folder with "
                    "--data"
                )
            yield


def end_of_log(log: Path) -> str:
    """Return a headline and the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join([f"the end of {shown(log)}:" if lines else f"{shown(log)} is empty", *lines])
