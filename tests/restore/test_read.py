"""How the bytes of a pack are read: from memory where they are there, else with large direct reads."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import stepwell
from stepwell.restore import catalogue as catalogues
from stepwell.restore.read import OpenStep, Source, file_source, open_step, read_room
from stepwell.tiers.probe import filesystem_of

DATA_BYTES = 3 << 20


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "pack"
    path.write_bytes(b"\0" * 4096 + np.arange(DATA_BYTES, dtype=np.uint8).tobytes())
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file_source(str(path), 4096)


def test_what_is_cached_is_known_and_asking_caches_nothing(source: Source, tmp_path: Path) -> None:
    if filesystem_of(str(tmp_path)) == "tmpfs":
        pytest.skip("on tmpfs everything is in memory")
    assert not source.in_memory(0, DATA_BYTES)
    assert not source.in_memory(0, DATA_BYTES), "asking must not make the kernel read ahead"
    with open(source.where, "rb") as file:
        assert len(file.read()) == 4096 + DATA_BYTES
    assert source.in_memory(0, DATA_BYTES) and source.in_memory(1 << 20, 2 << 20)
    source.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize(
    ("begin", "end"), [(0, DATA_BYTES), (1 << 20, (2 << 20) + 12345), (DATA_BYTES - 4096, DATA_BYTES)]
)
def test_the_bytes_are_the_same_either_way(source: Source, begin: int, end: int, cached: bool) -> None:
    if cached:
        Path(source.where).read_bytes()
    room = read_room(4 << 20)
    got = source.read(begin, end, room)
    assert bytes(got) == np.arange(begin, end, dtype=np.int64).astype(np.uint8).tobytes()
    source.close()


def test_a_room_is_aligned_for_huge_pages() -> None:
    for size in (4096, 8 << 20):
        room = read_room(size)
        assert len(room) == size and np.frombuffer(room, dtype=np.uint8).ctypes.data % (2 << 20) == 0


def test_tensors_of_every_size_come_back_through_pieces_and_chunks(tmp_path: Path) -> None:
    """Sizes around a piece and a chunk, so that tensors begin and end within, at and across their borders."""
    sizes = [1, 4095, 512 << 10, (512 << 10) + 1, (4 << 20) - 4097, 4 << 20, (9 << 20) + 3, 7]
    state = {f"t{i}": np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(sizes)}
    run = tmp_path / "run"
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(1, state).wait(timeout=60)
        live = {name: np.zeros_like(value) for name, value in state.items()}
        restored = ckpt.restore(live)
        assert restored is not None and restored.tier == "memory"
        assert all(np.array_equal(live[name], state[name]) for name in state)
    catalogue = catalogues.read(run)
    for cached in (False, True):
        assert catalogue.newest is not None
        opened = open_step(catalogue.root, catalogue.newest)
        with open(opened.sources[0].where, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached:
                file.read()
        opened.close()
        loaded = stepwell.load(run)
        assert all(np.array_equal(loaded[name], state[name]) for name in state)


def test_a_step_that_gives_way_to_the_next_while_the_run_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step is kept: the next is committed and this one removed just after the first of the two was looked for."""
    run = tmp_path / "run"
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(10, step)})
    first, second = (run / "steps" / f"00000000000{step}-0001" / "manifest.json" for step in (1, 2))
    aside = tmp_path / "manifest.json"
    first.rename(aside)  # the first is being saved, and will be the newer one
    is_committed = catalogues.is_committed

    def changing(folder: str) -> bool:
        if folder == str(second.parent) and second.exists():
            aside.rename(first)
            second.unlink()
        return is_committed(folder)

    monkeypatch.setattr(catalogues, "is_committed", changing)
    assert [step.step for step in stepwell.steps(run)] == [1]
    assert stepwell.load(run)["w"][0] == 1


def test_a_newest_step_that_is_removed_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": np.full(10, step)})
    opened: list[str] = []

    def late(root: str, step: catalogues.Step) -> OpenStep:
        if not opened:
            shutil.rmtree(Path(root) / "steps" / step.key)
        opened.append(step.key)
        return open_step(root, step)

    monkeypatch.setattr(importlib.import_module("stepwell.restore.load"), "open_step", late)
    assert stepwell.load(run)["w"][0] == 1
    assert opened == ["000000000002-0001", "000000000001-0001"]
