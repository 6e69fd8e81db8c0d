"""The bytes of a committed step: from packs or from a slot, in parallel, every chunk checked before it counts."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from stepwell.errors import DamagedError
from stepwell.restore.catalogue import Step, read_layout
from stepwell.state import Copy, Saved, decode_values
from stepwell.store import names, pack
from stepwell.store.checksum import CHUNK_BYTES, Digest, digest
from stepwell.store.layout import PAGE_BYTES, Layout, round_up
from stepwell.store.manifest import Manifest
from stepwell.store.pack import PackHeader

UNIT_BYTES = 2 * CHUNK_BYTES
PIECE_BYTES = 512 << 10
READ_THREADS = 4
HUGE_PAGE_BYTES = 2 << 20
PIN_BUMP_SECONDS = 5.0

_libc = ctypes.CDLL(None, use_errno=True)


class Source:
    """Where the data bytes of one pack lie: in its file, or in a slot of the agent that holds its image.

    `begin` is where they begin in `fd`. What lies in memory already is read from there, the rest with O_DIRECT where
    that is possible (`direct_fd`). Raises `DamagedError` when the bytes end too early, and the system's `OSError`.
    """

    def __init__(self, where: str, fd: int, begin: int, direct_fd: int = -1, *, is_file: bool) -> None:
        self.where, self.begin, self.is_file = where, begin, is_file
        self._fd, self._direct_fd = fd, direct_fd
        self._map: mmap.mmap | None = None
        if is_file:
            with suppress(OSError, ValueError):  # a file system without mmap cannot say what is cached
                self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)

    def in_memory(self, begin: int, end: int) -> bool:
        """Whether the bytes can be had without the disk: all of them are in the page cache, or in a slot.

        Asked with `mincore`, which reads nothing; a read that must not wait would make the kernel read ahead.
        """
        if not self.is_file or self._map is None:
            return not self.is_file
        first = (self.begin + begin) // PAGE_BYTES * PAGE_BYTES
        size = min(self.begin + end, len(self._map)) - first
        pages = (ctypes.c_ubyte * max(0, -(-size // PAGE_BYTES)))()
        address = np.frombuffer(self._map, dtype=np.uint8).ctypes.data + first
        asked = _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(max(0, size)), pages)
        return asked == 0 and all(page & 1 for page in bytes(pages))

    def read(self, begin: int, end: int, room: memoryview) -> memoryview:
        """The bytes [begin, end) as a view of `room`, which is page-aligned and has whole pages; `begin` is too."""
        if self._direct_fd >= 0 and not self.in_memory(begin, end):
            self._read_direct(begin, end, room)
        else:
            self.read_cached(begin, room[: end - begin])
        return room[: end - begin]

    def read_cached(self, begin: int, room: memoryview) -> None:
        """Fill `room` through the page cache, with the bytes from `begin` on."""
        have = 0
        while have < len(room):
            count = os.preadv(self._fd, [room[have:]], self.begin + begin + have)
            if count == 0:
                raise DamagedError("the pack ends too early", where=self.where, found=f"{begin + have} bytes of data")
            have += count

    def _read_direct(self, begin: int, end: int, room: memoryview) -> None:
        have, size = 0, end - begin
        try:
            have = os.preadv(self._direct_fd, [room[: round_up(size, PAGE_BYTES)]], self.begin + begin)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        if have < size:
            self.read_cached(begin + have, room[have:size])

    def close(self) -> None:
        """Let go of the descriptors."""
        self._map = None
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1


def file_source(path: str, header_bytes: int) -> Source:
    """A pack's file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags)
    try:
        direct_fd = os.open(path, flags | os.O_DIRECT)
    except OSError:
        direct_fd = -1
    return Source(path, fd, header_bytes, direct_fd, is_file=True)


@dataclass
class OpenStep:
    """A step whose manifest, layout, pack headers and values are read and checked; its tensors can be filled in."""

    step: Step
    manifest: Manifest
    layout: Layout
    headers: list[PackHeader]
    sources: list[Source]
    values: bytes
    tier: str
    touched: bool = False  # True once a destination may have been written to

    def saved(self, *, allow_pickle: bool) -> Saved:
        """What `state.match` needs. Raises `DamagedError` for values that cannot be decoded."""
        return Saved(
            names=self.layout.names,
            specs=self.layout.specs,
            alias_of=self.layout.alias_of,
            skeleton=self.layout.skeleton,
            values=decode_values(self.values, allow_pickle=allow_pickle),
        )

    def fill(self, copies: Iterable[Copy], progress: Callable[[int], None] | None = None) -> int:
        """Read, check and deliver the bytes of the copies, in parallel. Returns the bytes delivered.

        Only the chunks that are needed are read; a tensor that goes to several places is read for each of them. Raises
        `DamagedError` that names what was damaged; what has been delivered by then stays.
        """
        left, total = list(copies), 0
        while left:
            plans: list[list[_Target]] = [[] for _ in self.sources]
            planned: set[int] = set()
            again: list[Copy] = []
            for copy in left:
                if copy.index in planned:  # the targets of one pass must not overlap
                    again.append(copy)
                    continue
                planned.add(copy.index)
                size = self.layout.specs[copy.index].nbytes
                begin = int(self.layout.offsets[copy.index])
                plans[int(self.layout.pack_index[copy.index])].append(_Target(begin, begin + size, copy))
                total += size
                if not size and copy.store is not None:
                    copy.store(np.empty(0, dtype=np.uint8))
            for targets in plans:
                targets.sort(key=lambda target: target.begin)
            self.touched = True
            self._run(plans, progress, only_needed=True)
            left = again
        return total

    def damage(self, progress: Callable[[int], None] | None = None) -> list[str]:
        """Read and check every chunk; each damaged one in words, with the tensors that lie in it."""
        return self._run([[] for _ in self.sources], progress, only_needed=False)

    def _run(
        self, plans: list[list[_Target]], progress: Callable[[int], None] | None, *, only_needed: bool
    ) -> list[str]:
        rooms = threading.local()
        stop = threading.Event()
        found: list[str] = []

        def work(unit: tuple[int, int, int]) -> None:
            if stop.is_set():
                return
            index, begin, end = unit
            if not hasattr(rooms, "view"):
                rooms.view = read_room(UNIT_BYTES)
            targets = _overlapping(plans[index], begin, end)
            try:
                bad = self._deliver(index, begin, end, targets, rooms.view)
            except OSError as error:  # a bad sector, a lost mount: as good as damaged
                bad = [f"{os.path.basename(self.sources[index].where)} cannot be read: {error.strerror}"]
            if bad:
                found.extend(bad)
                if only_needed:
                    stop.set()
            if progress:
                progress(end - begin)

        with ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read") as pool, pinned(self) as bump:

            def guarded(unit: tuple[int, int, int]) -> None:
                bump()
                work(unit)

            try:
                for _ in pool.map(guarded, self._units(plans, only_needed=only_needed)):
                    pass
            finally:
                stop.set()
        if found and only_needed:
            raise DamagedError(
                f"step {self.manifest.step} is damaged", where=self.sources[0].where, found="; ".join(found[:5])
            )
        return found

    def _units(self, plans: list[list[_Target]], *, only_needed: bool) -> Iterator[tuple[int, int, int]]:
        for index, header in enumerate(self.headers):
            for begin in range(0, header.data_bytes, UNIT_BYTES):
                end = min(begin + UNIT_BYTES, header.data_bytes)
                if not only_needed:
                    yield index, begin, end
                    continue
                # A chunk is the smallest thing that can be checked: skip the half of a unit that nobody needs.
                middle = min(begin + CHUNK_BYTES, end)
                first = bool(_overlapping(plans[index], begin, middle))
                second = middle < end and bool(_overlapping(plans[index], middle, end))
                if first or second:
                    yield index, begin if first else middle, end if second else middle

    def _deliver(self, index: int, begin: int, end: int, targets: list[_Target], room: memoryview) -> list[str]:
        """Read [begin, end) of a pack into its targets; which chunks of it are damaged, in words.

        What is in memory goes straight into its target and is checked while it is in the processor's cache; what is
        on disk comes in one large read.
        """
        source, bad = self.sources[index], []
        data = None if source.in_memory(begin, end) else source.read(begin, end, room)
        for low in range(begin, end, CHUNK_BYTES):
            high = min(low + CHUNK_BYTES, end)
            digest = Digest()
            for at in range(low, high, PIECE_BYTES):
                till = min(at + PIECE_BYTES, high)
                inside = _overlapping(targets, at, till)
                alone = len(inside) == 1 and inside[0].begin <= at and inside[0].end >= till
                if data is not None:
                    piece = data[at - begin : till - begin]
                else:
                    piece = _memory_at(inside[0].at(at), till - at) if alone else room[: till - at]
                    source.read_cached(at, piece)
                digest.update(piece)
                if data is not None or not alone:
                    _scatter(piece, at, till, inside)
            if digest.digest() != self.headers[index].digests[low // CHUNK_BYTES]:
                bad.append(self._damaged(index, low, high))
                continue
            for target in _overlapping(targets, low, high):
                if target.copy.store is not None:
                    target.delivered(min(high, target.end) - max(low, target.begin))
        return bad

    def _damaged(self, index: int, low: int, high: int) -> str:
        """A chunk in words: its pack, its number, and what lies in it."""
        layout = self.layout
        inside = [
            layout.names[i]
            for i in layout.stored
            if layout.pack_index[i] == index and layout.offsets[i] < high and layout.offsets[i] + layout.sizes[i] > low
        ]
        if high > self.headers[index].values_begin:
            inside.append("plain values")
        shown = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
        return f"{os.path.basename(self.sources[index].where)} chunk {low // CHUNK_BYTES} ({shown})"

    def header_bytes(self, index: int) -> bytes:
        """The raw header of a pack on disk."""
        with open(self.sources[index].where, "rb") as file:
            return file.read(self.headers[index].header_bytes)

    def close(self) -> None:
        for source in self.sources:
            source.close()


class _Target:
    """Where the bytes [begin, end) of a pack go. Bytes for `copy.store` are gathered first, then handed over."""

    __slots__ = ("_address", "_left", "_room", "begin", "copy", "end")
    _lock = threading.Lock()  # one for all: it is held for a moment, and only for tensors that are handed over

    def __init__(self, begin: int, end: int, copy: Copy) -> None:
        self.begin, self.end, self.copy = begin, end, copy
        self._address = copy.address
        self._left = end - begin
        self._room: np.ndarray | None = None

    def at(self, position: int) -> int:
        """The host address for a pack position; the room for a tensor that is handed over is made at first use."""
        if not self._address:
            with self._lock:
                if not self._address:
                    self._room = np.empty(self.end - self.begin, dtype=np.uint8)
                    self._address = self._room.ctypes.data
        return self._address + position - self.begin

    def delivered(self, count: int) -> None:
        assert self.copy.store is not None
        with self._lock:
            self._left -= count
            if self._left:
                return
            room, self._room = self._room, None
        if room is not None:
            self.copy.store(room)


def read_room(size: int) -> memoryview:
    """Memory to read into, of huge pages where the system gives them to who asks.

    A direct read is cut into requests by the physical pages that it fills: with pages of 4 KiB one disk gave 0.6 GB/s,
    with huge ones 3 GB/s.
    """
    whole = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        whole.madvise(mmap.MADV_HUGEPAGE)
    begin = -np.frombuffer(whole, dtype=np.uint8).ctypes.data % HUGE_PAGE_BYTES
    return memoryview(whole)[begin : begin + size]


def _memory_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


def _scatter(piece: memoryview, begin: int, end: int, targets: list[_Target]) -> None:
    """Copy the bytes [begin, end) of a pack to where they belong."""
    base = np.frombuffer(piece, dtype=np.uint8).ctypes.data - begin
    for target in targets:
        low, high = max(begin, target.begin), min(end, target.end)
        ctypes.memmove(target.at(low), base + low, high - low)


def _overlapping(targets: list[_Target], begin: int, end: int) -> list[_Target]:
    """The targets (sorted, disjoint) that have bytes in [begin, end)."""
    low = bisect_right(targets, begin, key=lambda target: target.begin)
    if low and targets[low - 1].end > begin:
        low -= 1
    high = low
    while high < len(targets) and targets[high].begin < end:
        high += 1
    return [target for target in targets[low:high] if target.end > target.begin]


@contextmanager
def pinned(opened: OpenStep) -> Iterator[Callable[[], None]]:
    """Hold a pin in the step's folder, so that no pruner takes the packs away; without write access, no pin."""
    if not opened.sources[0].is_file:
        yield lambda: None
        return
    path = os.path.join(os.path.dirname(opened.sources[0].where), f"pin-{uuid.uuid4().hex[:16]}")
    count, last = 0, time.monotonic()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.write(fd, b"0")
    except OSError:
        yield lambda: None
        return

    def bump() -> None:
        nonlocal count, last
        if time.monotonic() - last > PIN_BUMP_SECONDS:
            last, count = time.monotonic(), count + 1
            with suppress(OSError):
                os.pwrite(fd, str(count).encode(), 0)

    try:
        yield bump
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)


def open_step(root: str, step: Step, known: Layout | None = None) -> OpenStep:
    """Open a step from its packs; `known` spares reading its layout again.

    Raises `DamagedError` when manifest, layout, a header or the values are damaged.
    """
    if step.manifest is None or step.problem is not None:
        raise DamagedError(f"step {step.step} cannot be read", where=step.key, found=step.problem)
    layout = _layout(root, step.manifest.layout, known)
    folder = os.path.join(root, names.STEPS, step.key)

    def header_of(index: int) -> tuple[bytes, int, str]:
        reference = step.manifest.packs[index]  # type: ignore[union-attr]
        path = os.path.join(folder, reference.name)
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW)) as file:
            return file.read(layout.packs[index].header_bytes), os.fstat(file.fileno()).st_size, path

    def source_of(index: int, header: PackHeader, path: str) -> Source:
        return file_source(path, header.header_bytes)

    return _open(step, layout, header_of, source_of, "0")


def open_slot(root: str, step: Step, fd: int, size: int, known: Layout | None = None) -> OpenStep:
    """Open a step from the agent's slot that holds it; its descriptor stays the caller's.

    The manifest on disk vouches for the headers in the slot, and those for every chunk.
    """
    if step.manifest is None:
        raise DamagedError(f"step {step.step} cannot be read", where=step.key, found=step.problem)
    layout = _layout(root, step.manifest.layout, known)
    if layout.slot_bytes(step.manifest.values_bytes) > size:
        raise DamagedError("the slot is too small for its step", where=step.key, found=size)

    def header_of(index: int) -> tuple[bytes, int, str]:
        plan = layout.packs[index]
        head = os.pread(fd, plan.header_bytes, plan.image_offset)
        return head, step.manifest.packs[index].bytes, f"memory tier, step {step.key}"  # type: ignore[union-attr]

    def source_of(index: int, header: PackHeader, where: str) -> Source:
        return Source(where, os.dup(fd), layout.packs[index].image_offset + header.header_bytes, is_file=False)

    return _open(step, layout, header_of, source_of, "memory")


def _layout(root: str, layout_hash: str, known: Layout | None) -> Layout:
    return known if known is not None and known.hash == layout_hash else read_layout(root, layout_hash)


def _open(
    step: Step,
    layout: Layout,
    header_of: Callable[[int], tuple[bytes, int, str]],
    source_of: Callable[[int, PackHeader, str], Source],
    tier: str,
) -> OpenStep:
    manifest = step.manifest
    assert manifest is not None
    if len(manifest.packs) != len(layout.packs):
        raise DamagedError(
            "the manifest and its layout disagree", where=step.key, expected=len(layout.packs), found=manifest.packs
        )
    headers: list[PackHeader] = []
    sources: list[Source] = []
    try:
        for index, plan in enumerate(layout.packs):
            data, file_bytes, where = header_of(index)
            header = pack.parse(data, file_bytes, where)
            last = index == len(layout.packs) - 1
            expected = (
                manifest.run, manifest.key, manifest.layout, manifest.packs[index].header_xxh3_128,
                plan.header_bytes, plan.data_bytes, manifest.values_bytes if last else 0, manifest.packs[index].name,
            )  # fmt: skip
            found = (
                header.run, header.key, header.layout, header.hash,
                header.header_bytes, header.values_begin, header.values_bytes, plan.name,
            )  # fmt: skip
            if expected != found:
                raise DamagedError(
                    "a pack is not the one its manifest names", where=where, expected=expected, found=found
                )
            headers.append(header)
            sources.append(source_of(index, header, where))
        opened = OpenStep(step, manifest, layout, headers, sources, b"", tier)
        opened.values = _read_values(opened)
        return opened
    except OSError as error:
        for source in sources:
            source.close()
        if isinstance(error, FileNotFoundError):
            raise DamagedError("a pack is missing", where=error.filename) from None
        raise DamagedError("a pack cannot be read", where=error.filename or step.key, found=error.strerror) from error
    except BaseException:
        for source in sources:
            source.close()
        raise


def _read_values(opened: OpenStep) -> bytes:
    header, source = opened.headers[-1], opened.sources[-1]
    begin, end = header.values_begin, header.data_bytes
    if begin == end:
        return b""
    first = begin // CHUNK_BYTES * CHUNK_BYTES
    room = read_room(round_up(end - first, PAGE_BYTES))
    data = source.read(first, end, room)
    for low in range(first, end, CHUNK_BYTES):
        high = min(low + CHUNK_BYTES, end)
        if digest(data[low - first : high - first]) != header.digests[low // CHUNK_BYTES]:
            found = opened._damaged(len(opened.headers) - 1, low, high)
            raise DamagedError(f"step {opened.manifest.step} is damaged", where=source.where, found=found)
    return bytes(data[begin - first :])
