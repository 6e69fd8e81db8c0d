"""The few operations on files that Stepwell's promises rest on.

Everything that changes a tier goes through `FileOps`, so that one object can be swapped to record effects (power
loss), to fail them (full disk, I/O error) or to kill the process at any one of them (crash matrix). `OsFileOps` calls
the operating system and nothing else. Errors are the `OSError` of the system, untouched.
"""

from __future__ import annotations

import os
from typing import Protocol


class FileOps(Protocol):
    """Effects on files. Paths are absolute. Only these methods may change anything on a tier."""

    def mkdir(self, path: str) -> None:
        """Make one directory; an existing one is an error (`FileExistsError`)."""

    def create(self, path: str, *, direct: bool = False) -> int:
        """Create a file exclusively and open it for writing; `direct` asks for O_DIRECT. Returns the descriptor."""

    def open_append(self, path: str) -> int:
        """Open a log for appending, created when missing. Returns the descriptor."""

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at an offset; may write less than asked for. Returns the count of bytes written."""

    def append(self, fd: int, data: bytes) -> None:
        """Add one line to a log opened with `open_append`; not part of any promise."""

    def ftruncate(self, fd: int, size: int) -> None:
        """Cut or extend an open file."""

    def fsync(self, fd: int) -> None:
        """Make the file's bytes and size survive a power loss. After a failure the file must not be trusted."""

    def close(self, fd: int) -> None:
        """Close a descriptor that `create` or `open_append` returned."""

    def rename(self, old: str, new: str) -> None:
        """Rename atomically, replacing `new`."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name; an existing `new` is an error (`FileExistsError`)."""

    def unlink(self, path: str) -> None:
        """Remove a file's name."""

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""

    def fsync_directory(self, path: str) -> None:
        """Make the names in a directory survive a power loss."""


class OsFileOps:
    """`FileOps` by the operating system."""

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def create(self, path: str, *, direct: bool = False) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o666)

    def open_append(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def append(self, fd: int, data: bytes) -> None:
        os.write(fd, data)

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def fsync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
