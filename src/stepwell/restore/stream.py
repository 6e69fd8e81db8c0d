"""The tensors of a step as checked bytes in small pieces: for work that must not hold a whole state in memory."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from stepwell.errors import DamagedError
from stepwell.restore.read import OpenStep, pinned, read_room
from stepwell.store.checksum import CHUNK_BYTES, digest

CHUNKS_HELD = 8
CHUNKS_AHEAD = 3
READ_THREADS = 2


class TensorStream:
    """Reads ranges of a step's tensors, each chunk checked before any of its bytes is given out.

    Holds at most 8 chunks (32 MiB), and reads ahead; it is fast when tensors are asked for in the order of
    `layout.stored`. Use as a context manager: meanwhile the step is pinned, so that no pruner takes it away.
    Raises `DamagedError` for a chunk that is not what was written. For one thread.
    """

    def __init__(self, opened: OpenStep, *, read_ahead: bool = True) -> None:
        self.opened = opened
        self._ahead = CHUNKS_AHEAD if read_ahead else 0
        self._chunks: OrderedDict[tuple[int, int], tuple[Future[memoryview | None], memoryview]] = OrderedDict()
        self._stack = ExitStack()

    def __enter__(self) -> TensorStream:
        self._bump = self._stack.enter_context(pinned(self.opened))
        self._pool = self._stack.enter_context(ThreadPoolExecutor(READ_THREADS, thread_name_prefix="read"))
        return self

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    def ranges(self, index: int) -> Iterator[tuple[int, int]]:
        """One tensor cut where its chunks end: [begin, end) in bytes of the tensor. Reads nothing."""
        size = self.opened.layout.specs[index].nbytes
        position = self._place(index, 0)[1]
        begin = 0
        while begin < size:
            end = min(size, (position + begin) // CHUNK_BYTES * CHUNK_BYTES + CHUNK_BYTES - position)
            yield begin, end
            begin = end

    def read(self, index: int, begin: int, end: int) -> memoryview:
        """The bytes [begin, end) of one tensor; good until the next one is asked for."""
        view = self._from_chunk(index, begin, end)
        if begin + len(view) == end:
            return view
        joined = bytearray(view)
        while begin + len(joined) < end:
            joined += self._from_chunk(index, begin + len(joined), end)
        return memoryview(joined)

    def digest_at(self, index: int, begin: int) -> bytes:
        """The checksum of the chunk in which byte `begin` of a tensor lies. Reads nothing."""
        pack, position = self._place(index, begin)
        return self.opened.headers[pack].digests[position // CHUNK_BYTES]

    def _place(self, index: int, begin: int) -> tuple[int, int]:
        layout = self.opened.layout
        return int(layout.pack_index[index]), int(layout.offsets[index]) + begin

    def _from_chunk(self, index: int, begin: int, end: int) -> memoryview:
        """The bytes from `begin` to `end`, or to the end of the chunk that `begin` lies in."""
        pack, position = self._place(index, begin)
        number = position // CHUNK_BYTES
        view = self._chunk(pack, number)
        if view is None:
            where = self.opened.sources[pack].where
            raise DamagedError(
                f"step {self.opened.manifest.step} is damaged",
                where=where,
                found=f"{os.path.basename(where)} chunk {number} ({self.opened.layout.names[index]})",
                todo="`stepwell verify` names everything that is damaged",
            )
        low = position - number * CHUNK_BYTES
        return view[low : low + end - begin]

    def _chunk(self, pack: int, number: int) -> memoryview | None:
        self._bump()
        last = len(self.opened.headers[pack].digests) - 1
        for wanted in range(number, min(number + self._ahead, last) + 1):
            if (pack, wanted) in self._chunks:
                self._chunks.move_to_end((pack, wanted))
            else:
                room = self._room()
                self._chunks[pack, wanted] = self._pool.submit(self._read, pack, wanted, room), room
        return self._chunks[pack, number][0].result()

    def _room(self) -> memoryview:
        """A buffer for a chunk: a new one, or that of the chunk that was used longest ago."""
        if len(self._chunks) < CHUNKS_HELD:
            return read_room(CHUNK_BYTES)
        _, (future, room) = self._chunks.popitem(last=False)
        future.exception()  # waits: nobody may be reading into the buffer any more
        return room

    def _read(self, pack: int, number: int, room: memoryview) -> memoryview | None:
        """The bytes of a chunk; None when they are not those that were written."""
        header = self.opened.headers[pack]
        begin = number * CHUNK_BYTES
        data = self.opened.sources[pack].read(begin, min(begin + CHUNK_BYTES, header.data_bytes), room)
        return data if digest(data) == header.digests[number] else None
