"""A tier on any mounted file system.

Three ways to make something durable, from which everything else is built:

- `publish`: a small document appears whole under its name, or not at all, and is never overwritten.
- `PackWriter`: a large file is written in pieces under a temporary name and then given its name.
- `remove`: a name disappears for good.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.errors import PersistError
from stepwell.store import names
from stepwell.tiers.base import FileOps

_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EOPNOTSUPP}


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the probe found a file system able to do."""

    direct_io: bool
    hard_links: bool
    filesystem: str


class PosixTier:
    """Durable effects below one run folder. Raises the system's `OSError`; keeps no state but its arguments.

    Safe to use from several threads as long as they work on different files.
    """

    def __init__(self, root: str, ops: FileOps, abilities: Abilities) -> None:
        self.root, self.ops, self.abilities = os.path.abspath(root), ops, abilities

    def path(self, *parts: str) -> str:
        return os.path.join(self.root, *parts)

    def make_folders(self, folder: str) -> None:
        """`make_folders` below this run."""
        make_folders(self.ops, folder)

    def publish(self, path: str, data: bytes) -> bool:
        """Make `path` hold exactly `data`, durably, or raise; never overwrites.

        Returns True when this call published it and False when it was there with equal bytes. Raises
        `FileExistsError` when it was there with other bytes. Atomic; after a crash `path` is whole or absent.
        """
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, names.temporary(name))
        self._unlink_quietly(temporary)
        fd = self.ops.create(temporary)
        try:
            write_all(self.ops, fd, memoryview(data), 0)
            # The name must never point at bytes that a power loss can still take away.
            self.ops.fsync(fd)
        except BaseException:
            self._unlink_quietly(temporary)  # what a full disk needs most is space
            raise
        finally:
            self.ops.close(fd)
        published = True
        try:
            if self.abilities.hard_links:
                self.ops.link(temporary, path)
                self.ops.unlink(temporary)
            else:  # the lock of the run's single agent stands in for link's exclusiveness
                if os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, "exists", path)
                self.ops.rename(temporary, path)
        except FileExistsError:
            with open(path, "rb") as file:
                same = file.read(len(data) + 1) == data
            self._unlink_quietly(temporary)
            if not same:
                raise
            published = False
        # The commit is the name: until the folder is synced a power loss can take it back.
        self.ops.fsync_directory(folder)
        return published

    def remove(self, paths: Iterable[str]) -> None:
        """Remove names in one folder, then make that durable; names that are gone already are fine."""
        folders = set()
        for path in paths:
            self._unlink_quietly(path)
            folders.add(os.path.dirname(path))
        for folder in folders:
            self.ops.fsync_directory(folder)

    def _unlink_quietly(self, path: str) -> None:
        if os.path.lexists(path):
            try:
                self.ops.unlink(path)
            except FileNotFoundError:
                pass  # somebody else removed it: it is gone, which is what was asked for


class PackWriter:
    """One pack being written under a temporary name; gets its name in `finish`, or leaves nothing behind."""

    def __init__(self, tier: PosixTier, path: str) -> None:
        self.tier, self.path = tier, path
        folder, name = os.path.split(path)
        self.temporary = os.path.join(folder, names.temporary(name))
        self.direct = tier.abilities.direct_io
        tier._unlink_quietly(self.temporary)
        self.fd = tier.ops.create(self.temporary, direct=self.direct)

    def write(self, data: memoryview, offset: int) -> None:
        """Write one piece; with O_DIRECT, offset, length and address are multiples of 4096. Thread-safe."""
        write_all(self.tier.ops, self.fd, data, offset)

    def sync(self, size: int) -> None:
        """Cut the padding off and make the bytes durable. A failed fsync is final for this file (the kernel may have
        dropped the dirty pages): the caller abandons it and writes a new one from the slot."""
        self.tier.ops.ftruncate(self.fd, size)
        # The rename that follows must not become durable before the bytes it names.
        self.tier.ops.fsync(self.fd)
        fd, self.fd = self.fd, -1
        self.tier.ops.close(fd)

    def finish(self) -> None:
        """Give the synced pack its name; durable once the folder is synced."""
        self.tier.ops.rename(self.temporary, self.path)

    def abandon(self) -> None:
        """Close and remove the temporary file; never raises, since it runs while an error is on its way."""
        try:
            if self.fd >= 0:
                fd, self.fd = self.fd, -1
                self.tier.ops.close(fd)
            self.tier._unlink_quietly(self.temporary)
        except OSError:
            pass  # the next agent removes temporary files when it starts


def make_folders(ops: FileOps, folder: str) -> None:
    """Make a folder and all above it that are missing; durable when it returns."""
    missing = [folder]  # even when it is there: who made it may have been killed before the fsync
    at = os.path.dirname(folder)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for path in reversed(missing):
        made = True
        try:
            ops.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
            made = False
        try:
            # Without this a power loss could drop the folder together with a manifest that was fsynced inside it.
            ops.fsync_directory(os.path.dirname(path))
        except PermissionError:
            if made:
                raise
            # A folder that was given to us, in one that we may pass but not read (/scratch on many clusters).


def write_all(ops: FileOps, fd: int, data: memoryview, offset: int) -> None:
    """`pwrite` until everything is written; short writes are continued, a write of nothing raises ENOSPC."""
    while data:
        count = ops.pwrite(fd, data, offset)
        if count <= 0:
            raise PersistError("the file system accepts no more bytes", found=f"offset {offset}")
        data, offset = data[count:], offset + count


def is_permanent(error: BaseException) -> bool:
    """True when trying again cannot help until a person changes something."""
    return isinstance(error, OSError) and error.errno in {
        errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP,
        errno.EEXIST,
    }  # fmt: skip
