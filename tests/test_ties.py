"""Tensors that are one and the same under several names, and come to be, or cease to be, between saves and restores.

All ways in which three names can share tensors are saved one after another by one trainer, and each is put back into
all ways in which a live state can share them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stepwell
from stepwell.errors import StateMismatchError

NAMES = ("a", "b", "c")
# For each name the number of the tensor that it stands for.
WAYS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 1, 2)]
SIZE = 3000


def new(library: str, value: float) -> Any:
    if library == "numpy":
        return np.full(SIZE, value, dtype=np.float32)
    torch = pytest.importorskip("torch")
    return torch.full((SIZE,), value, dtype=torch.float32)


def state_of(library: str, way: tuple[int, ...], first: float) -> dict[str, Any]:
    """A state whose tensors have the values `first`, `first + 1`, …"""
    made = [new(library, first + number) for number in range(max(way) + 1)]
    return {name: made[number] for name, number in zip(NAMES, way, strict=True)}


def values_of(state: dict[str, Any]) -> list[float]:
    for tensor in state.values():
        assert (tensor == tensor[0]).all()
    return [float(state[name][0]) for name in NAMES]


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saved(run: Path, library: str) -> Path:
    """Each way, saved as a step; then once more in the other direction, so that ties come and go both ways."""
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=50), on_error="raise") as ckpt:
        for step, way in enumerate([*WAYS, *reversed(WAYS)]):
            ckpt.save(step, state_of(library, way, 10.0 * step))
    return run


def test_what_was_saved_is_what_each_name_stood_for(saved: Path) -> None:
    for step, way in enumerate([*WAYS, *reversed(WAYS)]):
        assert values_of(stepwell.load(saved, step)) == [10.0 * step + number for number in way]


def finer(live: tuple[int, ...], way: tuple[int, ...]) -> bool:
    """Whether all that share a live tensor shared a saved one."""
    pairs = [(i, k) for i in range(3) for k in range(i)]
    return all(way[i] == way[k] for i, k in pairs if live[i] == live[k])


@pytest.mark.parametrize("live", WAYS)
def test_each_goes_back_into_each_or_is_refused(saved: Path, library: str, live: tuple[int, ...]) -> None:
    with stepwell.Checkpointer(saved, on_error="raise") as ckpt:
        for step, way in enumerate(WAYS):
            state = state_of(library, live, -5.0)
            if not finer(live, way):
                with pytest.raises(StateMismatchError, match="saved apart"):
                    ckpt.restore(state, step=step)
                assert values_of(state) == [-5.0 + number for number in live], "nothing was changed"
                continue
            restored = ckpt.restore(state, step=step)
            assert restored is not None and restored.tier == "0"
            assert values_of(state) == [10.0 * step + number for number in way]


def test_into_several_places_from_memory_and_with_another_dtype(run: Path, library: str) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, state_of(library, (0, 0, 0), 7.0)).wait(timeout=60)
        state = state_of(library, (0, 1, 2), 0.0)
        restored = ckpt.restore(state)
        assert restored is not None and restored.tier == "memory"
        assert values_of(state) == [7.0, 7.0, 7.0]
        wide = {name: np.zeros(SIZE) for name in NAMES}
        if library == "torch":
            import torch

            wide = {name: torch.zeros(SIZE, dtype=torch.float64) for name in NAMES}
        ckpt.restore(wide, cast=True)
        assert values_of(wide) == [7.0, 7.0, 7.0]
