"""Eager copies into a slot, without an agent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.helpers import wait_until  # noqa: E402
from tests.snapshot.states import Gate, same_bits, slot_of  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import SlotMemoryError  # noqa: E402
from stepwell.snapshot import slot as module  # noqa: E402
from stepwell.snapshot.slot import copy_eager  # noqa: E402


def mixed_state() -> dict[str, Any]:
    """Large and small, contiguous and not, torch and numpy."""
    return {
        "large": torch.randn(3 << 20),
        "strided": torch.randn(900, 900).T,
        "small": torch.arange(7),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "array": np.random.default_rng(0).normal(size=(1000, 300)),
        "reversed": np.arange(1000)[::-1],
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    }


@pytest.mark.parametrize("fresh", [True, False], ids=["untouched pages", "touched pages"])
def test_every_tensor_arrives(fresh: bool) -> None:
    state = mixed_state()
    with slot_of(state) as (flat, layout, slot), ThreadPoolExecutor(2) as pool:
        slot.fresh = fresh
        copy_eager(slot, layout, flat, layout.stored, pool)
        for view, source in zip(slot.views(layout, flat), flat.tensors, strict=True):
            assert type(view) is type(source)
            if isinstance(view, np.ndarray):
                assert view.dtype == source.dtype and np.array_equal(view, source)
            else:
                assert same_bits(view, source)
        del view


@pytest.mark.parametrize("fresh", [True, False], ids=["untouched pages", "touched pages"])
def test_ctrl_c_comes_when_no_copy_is_on_its_way_any_more(monkeypatch: pytest.MonkeyPatch, fresh: bool) -> None:
    """The slot is given up then: a late copy would end up in somebody else's save."""
    state = {"large": torch.randn(3 << 20)}
    gate, ended = Gate(), threading.Event()
    monkeypatch.setattr(module, "memmove", gate)
    with slot_of(state) as (flat, layout, slot), ThreadPoolExecutor(2) as pool:
        slot.fresh = fresh
        write = slot.write
        monkeypatch.setattr(slot, "write", lambda data, offset: gate.pass_through(lambda: write(data, offset)))

        def interrupt() -> None:
            assert gate.entered.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            assert not ended.wait(0.2), "it did not wait for the copies"
            gate.open.set()

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            copy_eager(slot, layout, flat, layout.stored, pool)
        ended.set()
        assert gate.open.is_set() and not gate.under_way
        thread.join(60)


def test_an_error_of_one_copy_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: int) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(module, "memmove", broken)
    with (
        slot_of({"large": torch.randn(3 << 20)}) as (flat, layout, slot),
        ThreadPoolExecutor(2) as pool,
        pytest.raises(ValueError, match="no such page"),
    ):
        copy_eager(slot, layout, flat, layout.stored, pool)


def test_untouched_pages_are_taken_only_while_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def require(size: int, what: str) -> None:
        asked.append(size)
        if len(asked) == 2:
            raise SlotMemoryError("no more")

    monkeypatch.setattr(module, "require", require)
    monkeypatch.setattr(module, "STEP_BYTES", 1 << 20)
    monkeypatch.setattr(module, "WRITE_PIECE_BYTES", 1 << 18)
    with slot_of({"large": torch.ones(1 << 20)}) as (flat, layout, slot), ThreadPoolExecutor(2) as pool:
        slot.fresh = True
        with pytest.raises(SlotMemoryError):
            copy_eager(slot, layout, flat, layout.stored, pool)
        assert asked == [1 << 20, 1 << 20]
        assert os.fstat(slot.fd).st_blocks * 512 <= (1 << 20) + 8192, "no page beyond what was granted"


def test_an_interrupted_save_gives_its_slot_back(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a save, and one more save on the way out."""
    state = {"large": torch.ones(3 << 20)}
    with stepwell.Checkpointer(run, slots=1, slot_wait_seconds_max=5) as ckpt:
        ckpt.save(0, state).wait(timeout=60)
        wait_until(lambda: all(slot.free for slot in ckpt._slots))
        gate = Gate()
        monkeypatch.setattr(module, "memmove", gate)

        def interrupt() -> None:
            assert gate.entered.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
            gate.open.set()

        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, state)
        monkeypatch.setattr(module, "memmove", ctypes.memmove)
        state["large"].fill_(2)
        assert ckpt.save(2, state).wait(timeout=60).committed
    assert [step.step for step in stepwell.steps(run)] == [0, 2]
    assert (stepwell.load(run)["large"] == 2).all()
