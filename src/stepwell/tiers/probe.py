"""What a file system can do, found by doing it once in the run's own folder."""

from __future__ import annotations

import mmap
import os

from stepwell.store.names import temporary
from stepwell.tiers.base import FileOps
from stepwell.tiers.posix import Abilities


def probe(root: str, ops: FileOps) -> Abilities:
    """Try a direct write and a hard link in `root`; leaves nothing behind. Raises `OSError` when not writable."""
    first = os.path.join(root, temporary(f"probe-{os.getpid()}-a"))
    second = os.path.join(root, temporary(f"probe-{os.getpid()}-b"))
    try:
        direct = _direct_write_works(first, ops)
        if not direct:
            ops.close(ops.create(first))
        links = _link_works(first, second, ops)
    finally:
        for path in (first, second):
            if os.path.lexists(path):
                ops.unlink(path)
    return Abilities(direct, links, filesystem_of(root))


def _direct_write_works(path: str, ops: FileOps) -> bool:
    try:
        fd = ops.create(path, direct=True)
    except OSError:
        if os.path.lexists(path):  # some file systems create the file before they refuse O_DIRECT
            ops.unlink(path)
        return False
    page = mmap.mmap(-1, 4096)
    try:
        with memoryview(page) as view:
            return ops.pwrite(fd, view, 0) == 4096
    except OSError as error:
        if error.errno == 28:  # a full disk says nothing about O_DIRECT, and must be heard of now
            raise
        ops.unlink(path)
        return False
    finally:
        ops.close(fd)
        page.close()


def _link_works(old: str, new: str, ops: FileOps) -> bool:
    try:
        ops.link(old, new)
    except OSError:
        return False
    return True


def filesystem_of(path: str) -> str:
    """The type of the file system that holds `path`, as the kernel calls it ("ext4", "tmpfs", "lustre")."""
    best, kind = "", "unknown"
    real = os.path.realpath(path)
    with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields = line.split(" ")
            point = fields[1].encode("utf-8", "surrogateescape").decode("unicode_escape", "surrogateescape")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, fields[2]
    return kind
