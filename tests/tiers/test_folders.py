"""Folders that somebody else made."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from stepwell.tiers.base import OsFileOps
from stepwell.tiers.posix import make_folders


class Unreadable(OsFileOps):
    """A parent that may be passed but not read, mode 0711, as /scratch of many clusters is (root could read it)."""

    def __init__(self, parent: Path) -> None:
        self.parent = str(parent)

    def fsync_directory(self, path: str) -> None:
        if path == self.parent:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        super().fsync_directory(path)


def test_a_run_in_a_folder_that_was_given_to_us(tmp_path: Path) -> None:
    mine = tmp_path / "me"
    mine.mkdir()
    ops = Unreadable(tmp_path)
    make_folders(ops, str(mine))
    make_folders(ops, str(mine / "runs" / "gpt"))
    assert (mine / "runs" / "gpt").is_dir()
    with pytest.raises(PermissionError):  # its name could vanish with everything in it
        make_folders(ops, str(tmp_path / "other"))
