"""The files of a page as modules, in a folder of the test, on the servers of these tests."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jsworker import SyncJobClient
from tests.docs.pages import files_of
from tests.testing.conftest import jsworker_servers

__all__ = ["jsworker_servers"]

Project = Callable[[str], Callable[[str], Any]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Write the files of a page; return what imports one of them by its module's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def write(page: str) -> Callable[[str], Any]:
        for name, content in files_of(page).items():
            (tmp_path / name).write_text(content)
        importlib.invalidate_caches()
        return importlib.import_module

    yield write
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}/"):
            client = getattr(module, "jobs", None)
            if isinstance(client, SyncJobClient):
                client.close()
            del sys.modules[name]
