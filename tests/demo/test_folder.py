from pathlib import Path

import pytest

from jsworker.demo.folder import DemoFolder


def test_it_lies_in_the_users_cache_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert DemoFolder(None).path == tmp_path / "jsworker" / "demo"
    assert DemoFolder(tmp_path / "mine").path == tmp_path / "mine"


def test_what_workers_said_last_is_shown_by_its_end(tmp_path: Path) -> None:
    folder = DemoFolder(tmp_path)
    with folder.taken():
        (folder.logs / "worker-1.log").write_text("".join(f"line {number}\n" for number in range(20)))
        (folder.logs / "worker-2.log").touch()

        lines = folder.ends_of_logs().splitlines()

    assert lines == [
        f"the end of {folder.logs}/worker-1.log:",
        *(f"line {number}" for number in range(12, 20)),
        f"{folder.logs}/worker-2.log is empty",
    ]
