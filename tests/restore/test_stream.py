"""Reading a step in pieces: the same bytes as a whole load, little memory, nothing unchecked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import flip_byte, pack_of

import stepwell
from stepwell.errors import DamagedError
from stepwell.restore import catalogue as catalogues
from stepwell.restore.read import OpenStep, open_step, read_room
from stepwell.restore.stream import CHUNKS_HELD, TensorStream
from stepwell.store.checksum import CHUNK_BYTES

STATE = {
    "a": np.arange(5_000_001, dtype=np.float64),  # nine and a half chunks
    "b": np.arange(7, dtype=np.float32),
    "c": np.arange(6_000_000, dtype=np.int8),
    "none": np.zeros((0, 3), dtype=np.int8),
}
KEY = "000000000001-0001"


@pytest.fixture
def opened(run: Path) -> Iterator[OpenStep]:
    with stepwell.Checkpointer(run) as checkpointer:
        checkpointer.save(1, STATE).wait()
    step = catalogues.read(run).newest
    assert step is not None
    found = open_step(str(run), step)
    yield found
    found.close()


@pytest.mark.parametrize("read_ahead", [True, False])
def test_all_pieces_make_the_tensor(opened: OpenStep, read_ahead: bool) -> None:
    with TensorStream(opened, read_ahead=read_ahead) as stream:
        for i in opened.layout.stored:
            joined = b"".join(bytes(stream.read(i, begin, end)) for begin, end in stream.ranges(i))
            assert joined == STATE[opened.layout.names[i]].tobytes()


def test_ranges_end_where_chunks_end(opened: OpenStep) -> None:
    index = opened.layout.names.index("c")
    offset = int(opened.layout.offsets[index])
    with TensorStream(opened) as stream:
        ranges = list(stream.ranges(index))
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == 6_000_000
    assert all((offset + end) % CHUNK_BYTES == 0 for _, end in ranges[:-1])


def test_any_order_and_any_range(opened: OpenStep) -> None:
    index = opened.layout.names.index("a")
    whole = STATE["a"].tobytes()
    random = np.random.default_rng(1)
    with TensorStream(opened) as stream:
        for begin in random.integers(0, len(whole) - 1, 60):
            end = min(len(whole), int(begin) + int(random.integers(1, 2 * CHUNK_BYTES)))
            assert stream.read(index, int(begin), end) == whole[begin:end]


def test_memory_is_bounded(opened: OpenStep, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counting(size: int) -> memoryview:
        made.append(size)
        return read_room(size)

    monkeypatch.setattr("stepwell.restore.stream.read_room", counting)
    with TensorStream(opened) as stream:
        for i in opened.layout.stored:
            for begin, end in stream.ranges(i):
                stream.read(i, begin, end)
    assert made == [CHUNK_BYTES] * CHUNKS_HELD


def test_a_damaged_chunk_is_never_given_out_and_the_others_are(run: Path, opened: OpenStep) -> None:
    header_bytes = opened.headers[0].header_bytes
    flip_byte(pack_of(run, KEY), header_bytes + 2 * CHUNK_BYTES + 5)
    index = opened.layout.names.index("a")
    whole = STATE["a"].tobytes()
    with TensorStream(opened) as stream:
        assert stream.read(index, 0, 100) == whole[:100]  # reads ahead into the damage, which harms nobody
        with pytest.raises(DamagedError, match=r"chunk 2 \(a\)"):
            stream.read(index, 2 * CHUNK_BYTES - 10, 2 * CHUNK_BYTES + 10)
        for number in range(3, 9):
            begin = number * CHUNK_BYTES
            assert stream.read(index, begin, begin + 10) == whole[begin : begin + 10]


def test_the_step_is_pinned_meanwhile(run: Path, opened: OpenStep) -> None:
    folder = run / "steps" / KEY
    with TensorStream(opened):
        assert len(list(folder.glob("pin-*"))) == 1
    assert list(folder.glob("pin-*")) == []
