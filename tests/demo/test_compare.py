"""The demo's comparison: nothing that differs by a single bit passes as identical."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.demo.compare import Part, compare, flatten, read_state, write_state


def a_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "random": ("MT19937", np.arange(4, dtype=np.uint32), (1, 2), None),
        "losses": [0.1, 1 / 3],
    }


def differences(found: dict[str, Any]) -> dict[str, str]:
    parts = compare(flatten(a_state()), flatten(found), {})
    return {part.name: part.difference for part in parts if part.difference}


def flip_bit(tensor: torch.Tensor, byte: int, bit: int) -> None:
    tensor.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit


def test_equal_states_are_equal() -> None:
    assert differences(a_state()) == {}


@pytest.mark.parametrize("name", ["weight", "half"])
def test_every_single_flipped_bit_is_found(name: str) -> None:
    size = a_state()["model"][name].numel() * a_state()["model"][name].element_size()
    for byte in range(size):
        for bit in range(8):
            state = a_state()
            flip_bit(state["model"][name], byte, bit)
            found = differences(state)
            assert list(found) == ["model"]
            assert f"model/{name}: 1 of {size} bytes differ, the first at byte {byte}" == found["model"]


def change(path: str, value: Any) -> dict[str, Any]:
    state = a_state()
    *folders, last = path.split("/")
    place: Any = state
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    place[int(last) if last.isdigit() else last] = value
    return state


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("losses/1", np.nextafter(1 / 3, 1).item()),
        ("losses/0", "0.1"),
        ("optim/param_groups/0/lr", 0.1 + 2**-56),
        ("optim/state/0/step", torch.tensor(-3.0)),
        ("model/weight", torch.arange(6.0).reshape(3, 2)),
        ("model/weight", torch.arange(6.0).reshape(2, 3).view(torch.int32)),
        ("model/extra", torch.zeros(0)),
        ("losses", [0.1]),
        ("losses", []),
        ("optim/state", {}),
        ("random", ("MT19937", np.array([0, 1, 2, 4], dtype=np.uint32), (1, 2), None)),
        ("random", ["MT19937", np.arange(4, dtype=np.uint32), (1, 2), None]),
    ],
)
def test_every_other_difference_is_found(path: str, value: Any) -> None:
    assert list(differences(change(path, value))) == [path.split("/")[0]]


def test_signed_zeros_differ_and_equal_nans_do_not() -> None:
    zero, minus_zero, nan = (flatten({"x": torch.tensor(value)}) for value in (0.0, -0.0, float("nan")))
    assert compare(zero, minus_zero, {})[0].difference is not None
    assert compare(nan, copy.deepcopy(nan), {})[0].difference is None


def test_a_part_that_neither_side_has_is_not_identical() -> None:
    parts = compare(flatten(a_state()), flatten(a_state()), {"model": "weights", "gone": "something"})
    assert [(part.name, part.difference) for part in parts[:2]] == [
        ("weights", None),
        ("something", "nothing to compare"),
    ]


def test_parts_are_counted() -> None:
    part = compare(flatten(a_state()), flatten(a_state()), {})[0]
    assert part == Part("model", tensor_count=2, value_count=0, bytes=30, difference=None)


def test_a_written_state_reads_back_equal(tmp_path: Path) -> None:
    write_state(a_state(), tmp_path / "state")
    parts = compare(flatten(a_state()), read_state(tmp_path / "state"), {})
    assert [part.difference for part in parts] == [None] * 4
