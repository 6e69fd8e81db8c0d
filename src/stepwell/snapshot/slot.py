"""A slot as the trainer sees it: a memfd that the agent owns, mapped here, holding the image of the packs."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from stepwell.agent.memory import STEP_BYTES, require
from stepwell.state import address_of
from stepwell.store.layout import Layout
from stepwell.units import format_bytes

if TYPE_CHECKING:
    from stepwell.snapshot.device import DeviceCopier
    from stepwell.state import Flat

log = logging.getLogger("stepwell")

Piece = TypeVar("Piece")

MADV_POPULATE_WRITE = 23
WRITE_PIECE_BYTES = 4 << 20
LARGE_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
COPY_THREADS = max(1, min(4, os.cpu_count() or 1))

_libc = ctypes.CDLL(None, use_errno=True)


class Slot:
    """One staging buffer in the trainer.

    `fresh` is True until its pages have been taken (by the agent's touch, or by the first save): a fresh slot is
    filled with `pwrite`, which takes pages three times faster than faults do; later ones by plain copies.
    """

    def __init__(self, index: int, fd: int, size: int, *, fresh: bool) -> None:
        self.index, self.fd, self.bytes, self.fresh = index, fd, size, fresh
        self.free = True
        self.used_at = 0  # of the saves that filled it, the number of the latest: the oldest is taken first
        self._map: mmap.mmap | None = None
        self._populated = False
        self._views: tuple[str, list[Any]] | None = None
        self._pinned_by: DeviceCopier | None = None
        self._pinned = False

    @property
    def map(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.bytes)
        return self._map

    @property
    def address(self) -> int:
        return np.frombuffer(self.map, dtype=np.uint8).ctypes.data

    def populate(self) -> None:
        """Fill this process's page table for the slot, step by step; a kernel without the call does it at first use."""
        if self._populated:
            return
        self._populated = True
        base = self.address
        for begin in range(0, self.bytes, STEP_BYTES):
            size = min(STEP_BYTES, self.bytes - begin)
            if _libc.madvise(ctypes.c_void_p(base + begin), ctypes.c_size_t(size), MADV_POPULATE_WRITE) != 0:
                return

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put bytes into the slot through its descriptor (no page faults)."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self.fd, view, offset)
            view, offset = view[count:], offset + count

    def write_all(self, pieces: list[tuple[memoryview, int]]) -> None:
        """`write` each (bytes, offset)."""
        for data, offset in pieces:
            self.write(data, offset)

    def views(self, layout: Layout, flat: Flat) -> list[Any]:
        """One destination per tensor (None for aliases), of its dtype and shape, over the slot; cached by layout."""
        if self._views is None or self._views[0] != layout.hash:
            self._views = (layout.hash, self._make_views(layout, flat))
        return self._views[1]

    def _make_views(self, layout: Layout, flat: Flat) -> list[Any]:
        torch = sys.modules.get("torch")
        raw = torch.frombuffer(self.map, dtype=torch.uint8) if torch is not None else None
        typed: dict[Any, Any] = {}
        views: list[Any] = []
        data = np.frombuffer(self.map, dtype=np.uint8)
        for i, tensor in enumerate(flat.tensors):
            if flat.alias_of[i] >= 0:
                views.append(None)
                continue
            spec, offset = flat.specs[i], layout.slot_offsets[i]
            if isinstance(tensor, np.ndarray):
                own = data[offset : offset + spec.nbytes]
                views.append(own.view(tensor.dtype.newbyteorder("=")).reshape(spec.shape))
                continue
            assert torch is not None and raw is not None
            dtype = tensor.dtype
            if dtype not in typed:
                item = tensor.element_size()
                typed[dtype] = (raw[: self.bytes // item * item].view(dtype), item)
            flat_view, item = typed[dtype]
            views.append(flat_view[offset // item : (offset + spec.nbytes) // item].view(tensor.shape))
        return views

    def pin(self, copier: DeviceCopier) -> None:
        """Register the slot for direct transfers, once; when that fails the copies are correct but slower."""
        if self._pinned_by is None:
            self._pinned_by = copier
            self._pinned = copier.register(self.address, self.bytes)
            if not self._pinned:
                log.warning(
                    "slot %d (%s) could not be pinned: copies from the accelerator are correct, but slower",
                    self.index,
                    format_bytes(self.bytes),
                )

    def drop(self) -> None:
        """Let go of the memory in this process; views that are still referenced keep their mapping."""
        if self._pinned and self._pinned_by is not None:
            self._pinned_by.unregister(self.address)
            self._pinned = False
        self._views = None
        self._map = None
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def copy_eager(slot: Slot, layout: Layout, flat: Flat, indices: list[int], pool: ThreadPoolExecutor) -> None:
    """Copy host tensors into the slot in parallel; complete when it returns.

    Raises `SlotMemoryError` when a fresh slot's pages no longer fit.
    """
    if slot.fresh:
        _write_fresh(slot, layout, flat, indices, pool)
        return
    small: list[int] = []
    pieces: list[tuple[int, int, int]] = []
    base, offsets = slot.address, layout.slot_offsets
    for i in indices:
        size = flat.specs[i].nbytes
        source = address_of(flat.tensors[i]) if size >= LARGE_BYTES else 0
        if not source:
            small.append(i)
            continue
        for begin in range(0, size, PIECE_BYTES):
            pieces.append((base + offsets[i] + begin, source + begin, min(PIECE_BYTES, size - begin)))
    # Plain copies by our own threads: a torch copy ends with a barrier of OpenMP, which spins when cores are busy.
    in_parallel(pool, pieces, lambda piece: memmove(*piece), lambda: _copy_small(slot, layout, flat, small))


class Pieces(Generic[Piece]):
    """Work that the threads of a pool share piece by piece. `ended` is set when nothing is left and none is under way.

    The trainer's thread only waits, because an exception of a signal handler can come anywhere in it.
    """

    def __init__(self, pieces: list[Piece], do: Callable[[Piece], object]) -> None:
        self.ended = threading.Event()
        self.error: Exception | None = None
        self._pieces, self._do = pieces, do
        self._next = self._under_way = 0
        self._lock = threading.Lock()
        if not pieces:
            self.ended.set()

    def help(self) -> None:
        """Do pieces until there is none to begin with; in a thread of the pool."""
        while True:
            with self._lock:
                if self._next >= len(self._pieces):
                    return
                piece = self._pieces[self._next]
                self._next += 1
                self._under_way += 1
            try:
                self._do(piece)
            except Exception as error:  # for whoever waits
                self.error = self.error or error
            with self._lock:
                self._under_way -= 1
                self._end_if_over()

    def stop(self) -> None:
        """Begin no more, and return when none is under way: Ctrl-C waits so long, since the memory is given up then."""
        with self._lock:
            self._next = len(self._pieces)
            self._end_if_over()
        interruption: BaseException | None = None
        while not self.ended.is_set():
            try:
                self.ended.wait()
            except BaseException as error:
                interruption = error
        if interruption is not None:
            raise interruption

    def _end_if_over(self) -> None:
        if self._next >= len(self._pieces) and not self._under_way:
            self.ended.set()


def in_parallel(
    pool: ThreadPoolExecutor,
    pieces: list[Piece],
    do: Callable[[Piece], object],
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    """Do all pieces in the pool, and something else in this thread. Nothing is under way when it returns or raises."""
    work = Pieces(pieces, do)
    try:
        for _ in range(min(COPY_THREADS, len(pieces))):
            pool.submit(work.help)
        meanwhile()
        work.ended.wait()
    finally:
        work.stop()
    if work.error is not None:
        raise work.error


def _copy_small(slot: Slot, layout: Layout, flat: Flat, indices: list[int]) -> None:
    """Small and strided tensors, by the library that they belong to; one call for all of torch's."""
    views = slot.views(layout, flat)
    ours = [i for i in indices if flat.specs[i].kind == "torch"]
    if ours:
        torch = sys.modules["torch"]
        with torch.no_grad():
            torch._foreach_copy_([views[i] for i in ours], [flat.tensors[i] for i in ours])
    for i in indices:
        if flat.specs[i].kind == "numpy":
            np.copyto(views[i], flat.tensors[i])


def _write_fresh(slot: Slot, layout: Layout, flat: Flat, indices: list[int], pool: ThreadPoolExecutor) -> None:
    """Fill untouched pages by writing, in steps of 64 MiB with the memory limit checked before each."""
    keep: list[Any] = []  # contiguous copies of strided tensors, alive until they are written
    batch: list[tuple[memoryview, int]] = []
    batch_bytes = 0

    def flush() -> None:
        nonlocal batch, batch_bytes
        require(batch_bytes, "a slot")
        share = max(1, len(batch) // (4 * COPY_THREADS))
        in_parallel(pool, [batch[begin : begin + share] for begin in range(0, len(batch), share)], slot.write_all)
        batch, batch_bytes = [], 0
        keep.clear()

    for i in indices:
        source = flat.tensors[i]
        size = flat.specs[i].nbytes
        if not size:
            continue
        address = address_of(source)
        if not address:
            source = contiguous_host_copy(source)
            keep.append(source)
            address = address_of(source)
        whole = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
        offset = layout.slot_offsets[i]
        for begin in range(0, size, WRITE_PIECE_BYTES):
            piece = whole[begin : begin + WRITE_PIECE_BYTES]
            batch.append((piece, offset + begin))
            batch_bytes += len(piece)
            if batch_bytes >= STEP_BYTES:
                flush()
    if batch:
        flush()


def contiguous_host_copy(tensor: Any) -> Any:
    """A tensor's own elements, contiguous and in host memory."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).astype(tensor.dtype.newbyteorder("="), copy=False).reshape(tensor.shape)
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
