"""The folder for the data of embedded servers while tests run."""

import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from jsworker.embedded.servers import DataFolder

# Used only as the parent of a folder with a random name.
_MEMORY: Final = Path("/dev/shm")  # noqa: S108  # nosec B108
_ENOUGH_MEMORY_BYTES: Final = 2 * 1024**3
_PREFIX: Final = "jsworker-testing-"
_LEFT_FOR_SECONDS: Final = 24 * 3600.0


def new_folder() -> Path:
    """Return a new path for the data of embedded servers; the folder is not made.

    The path is in memory, if there is room: a database is copied there in a tenth of the time.
    """
    in_memory = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _ENOUGH_MEMORY_BYTES
    parent = _MEMORY if in_memory else Path(tempfile.gettempdir())
    _delete_leftovers(parent)
    return parent / f"{_PREFIX}{secrets.token_hex(8)}"


def _delete_leftovers(parent: Path) -> None:
    """Delete folders that killed test runs have left behind and that may take up memory."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another run has deleted the folder first
            status = folder.lstat()
            # The parent is open to all users: opening a file in a folder of theirs may block, or create one.
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            is_old = time.time() - status.st_mtime > _LEFT_FOR_SECONDS
            # Nothing changes the folder itself while a run lasts, however long.
            if is_own and is_old and not DataFolder(folder).has_guard():
                shutil.rmtree(folder, ignore_errors=True)
