"""The folders of embedded servers: those that killed test runs have left are deleted, and no others."""

import os
import time
from pathlib import Path

import pytest

from jsworker.embedded.resources import EXCLUSIVE, try_lock
from jsworker.embedded.servers import DataFolder
from jsworker.testing import servers_folder


def test_only_old_folders_whose_servers_have_ended_are_deleted(tmp_path: Path) -> None:
    days_ago = time.time() - 2 * 86_400
    left, in_use, new = (tmp_path / f"jsworker-testing-{number}" for number in range(3))
    other = tmp_path / "other"
    for folder in (left, in_use, new, other):
        (folder / "postgres").mkdir(parents=True)
    with DataFolder(in_use).open_lock("guard") as guard:
        assert try_lock(guard, EXCLUSIVE)
        for folder in (left, in_use, other):
            os.utime(folder, (days_ago, days_ago))
        servers_folder._delete_leftovers(tmp_path)
    assert [folder.exists() for folder in (left, in_use, new, other)] == [False, True, True, True]


def test_nothing_is_opened_in_what_is_no_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days_ago = time.time() - 2 * 86_400
    parent, elsewhere = tmp_path / "parent", tmp_path / "elsewhere"
    theirs, link = (parent / f"jsworker-testing-{name}" for name in ("theirs", "link"))
    for folder in (theirs, elsewhere):
        folder.mkdir(parents=True)
    link.symlink_to(elsewhere)
    for path in (theirs, link, elsewhere):
        os.utime(path, (days_ago, days_ago), follow_symlinks=False)
    with monkeypatch.context() as other_user:
        other_user.setattr(os, "geteuid", lambda: os.getuid() + 1)
        servers_folder._delete_leftovers(parent)
    assert list(theirs.iterdir()) == []
    servers_folder._delete_leftovers(parent)
    assert list(elsewhere.iterdir()) == []
    assert not theirs.exists()
