from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Command
from tests.helpers import flip_byte, pack_of

import stepwell
from stepwell.restore.stream import TensorStream


def two_steps(run: Path, first: dict[str, Any], second: dict[str, Any]) -> Path:
    with stepwell.Checkpointer(run) as checkpointer:
        checkpointer.save(1, first).wait()
        checkpointer.save(2, second).wait()
    return run


def tensors(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in document["tensors"]}


def values(document: dict[str, Any]) -> dict[str, tuple[str, str | None, str | None]]:
    return {one["name"]: (one["place"], one["first"], one["second"]) for one in document["values"]}


def test_equal_steps(command: Command, tmp_path: Path) -> None:
    state = {"a": np.arange(5.0), "nan": np.full(2, np.nan), "v": [1, float("nan"), {1, 2}]}
    run = two_steps(tmp_path / "run", state, state)
    outcome = command("diff", run, 1, 2)
    assert outcome.code == 0, outcome.out
    assert outcome.lines[-1] == "equal: 2 tensors and all plain values"
    assert command("diff", run, "1", "newest", "--json").document["equal"] is True


def test_what_differs_and_by_how_much(command: Command, branchy: Path) -> None:
    outcome = command("diff", branchy, 100, 300)
    assert outcome.code == 1
    words = " ".join(outcome.out.split())
    assert "model.layers.0.weight all 200" in words
    assert "epoch 1 3" in words
    assert outcome.lines[-1] == "3 tensors differ, 1 equal; 2 plain values differ"
    document = command("diff", branchy, 100, 300, "--json").document
    assert (document["format"], document["version"], document["equal"]) == ("stepwell.diff", 1, False)
    one = tensors(document)["model.layers.0.weight"]
    assert (one["kind"], one["element_count"], one["elements"], one["max_difference"]) == ("bytes", 256, 256, 200.0)
    assert document["equal_tensor_count"] == 1


def test_names_and_forms_on_one_side_only(command: Command, tmp_path: Path) -> None:
    first = {"same": np.zeros(3), "shape": np.zeros(3), "dtype": np.zeros(3), "gone": np.zeros(1), "old": 1}
    second = {"same": np.zeros(3), "shape": np.zeros(4), "dtype": np.zeros(3, np.float32), "new": np.zeros(2), "neu": 2}
    run = two_steps(tmp_path / "run", first, second)
    document = command("diff", run, 1, 2, "--json").document
    found = {name: (one["kind"], one["first"], one["second"]) for name, one in tensors(document).items()}
    assert found == {
        "shape": ("form", "float64[3]", "float64[4]"),
        "dtype": ("form", "float64[3]", "float32[3]"),
        "gone": ("only in the first", "float64[1]", None),
        "new": ("only in the second", None, "float64[2]"),
    }
    assert values(document) == {"old": ("", "int 1", None), "neu": ("", None, "int 2")}
    text = command("diff", run, 1, 2).out
    assert "only in the first: float64[1]" in text and "missing" in text


def test_elements_are_counted_and_what_is_not_finite_is_told_apart(command: Command, tmp_path: Path) -> None:
    first = np.zeros(1000, dtype=np.float32)
    second = first.copy()
    second[[3, 700]] = [0.5, -2.0]
    second[10], second[11] = np.nan, np.inf
    run = two_steps(tmp_path / "run", {"x": first}, {"x": second})
    one = tensors(command("diff", run, 1, 2, "--json").document)["x"]
    assert (one["element_count"], one["not_finite_count"], one["max_difference"]) == (4, 2, 2.0)
    assert "4 (0.4%)" in command("diff", run, 1, 2).out
    assert "2 not finite" in command("diff", run, 1, 2).out


@pytest.mark.parametrize(
    ("first", "second", "place", "texts"),
    [
        (1, 1.0, "", ("int 1", "float 1.0")),
        (True, 1, "", ("bool True", "int 1")),
        (0.0, -0.0, "", ("0.0", "-0.0")),
        ([1, 2, 3], [1, 5, 3], "[1]", ("2", "5")),
        ([1, 2], [1, 2, 3], "", ("2 items", "3 items")),
        ([1, 2], [5, 2, 3], "[0]", ("1", "5")),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "['a']['b']", ("1", "2")),
        ({"a": 1}, {"b": 1}, "['a']", ("1", None)),
        ({1: 1}, {1: 1, 2: 2}, "[2]", (None, "2")),
        ({1, 2}, {1, 3}, "", ("{1, 2}", "{1, 3}")),
        (b"abc", b"abd", "", ("b'abc'", "b'abd'")),
    ],
)
def test_values_differ_with_their_place(
    command: Command, tmp_path: Path, first: object, second: object, place: str, texts: tuple[str | None, str | None]
) -> None:
    run = two_steps(tmp_path / "run", {"x": np.zeros(1), "v": first}, {"x": np.zeros(1), "v": second})
    document = command("diff", run, 1, 2, "--json").document
    # A mapping or list of plain values is one value; with a dict inside it, its parts have names of their own.
    (name, found), *rest = values(document).items()
    assert rest == []
    assert (name.removeprefix("v") + found[0]).replace(".a.b", "['a']['b']") == place
    assert found[1:] == texts


def test_long_bytes_of_one_length_are_told_apart(command: Command, tmp_path: Path) -> None:
    run = two_steps(tmp_path / "run", {"x": np.zeros(1), "v": bytes(3000)}, {"x": np.zeros(1), "v": b"x" * 3000})
    _, first, second = values(command("diff", run, 1, 2, "--json").document)["v"]
    assert first is not None and first.startswith("3.00 kB (xxh3 ")
    assert second is not None and second.startswith("3.00 kB (xxh3 ") and second != first


def test_the_generators_are_one_value(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with stepwell.Checkpointer(run) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.zeros(1)}).wait()
            np.random.random()
    document = command("diff", run, 1, 2, "--json").document
    assert list(values(document)) == ["__rng__"]


def test_patterns(command: Command, branchy: Path) -> None:
    outcome = command("diff", branchy, 100, 300, "--names", "fro*", "--names", "name")
    assert outcome.code == 0
    assert "1 tensor and" in outcome.out


def test_pickled_values_are_not_compared_unless_asked_for(command: Command, tmp_path: Path) -> None:
    with stepwell.Checkpointer(tmp_path / "run", allow_pickle=True) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": np.zeros(1), "odd": Odd(7)}).wait()
    outcome = command("diff", tmp_path / "run", 1, 2)
    assert outcome.code == 1
    assert "none was compared" in outcome.out
    assert command("diff", tmp_path / "run", 1, 2, "--json").document["values"] is None
    assert command("diff", tmp_path / "run", 1, 2, "--allow-pickle").code == 0


class Odd:
    def __init__(self, number: int) -> None:
        self.number = number


def test_equal_chunks_of_one_layout_are_not_read(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six chunks of 4 MiB; only the one that differs (and the last, which has the plain values) is read."""
    frozen = np.zeros(5 << 20, dtype=np.float32)
    changed = frozen.copy()
    changed[(2 << 20) + 5] = 3.0
    run = two_steps(tmp_path / "run", {"x": frozen, "n": 1}, {"x": changed, "n": 2})
    read = []
    original = TensorStream._read

    def counting(self: TensorStream, pack: int, number: int, room: memoryview) -> memoryview | None:
        read.append(number)
        return original(self, pack, number, room)

    monkeypatch.setattr(TensorStream, "_read", counting)
    one = tensors(command("diff", run, 1, 2, "--json").document)["x"]
    assert (one["element_count"], one["max_difference"]) == (1, 3.0)
    assert sorted(read) == [2, 2]


def test_damage_is_said(command: Command, branchy: Path) -> None:
    pack = pack_of(branchy, "000000000300-0001")
    flip_byte(pack, pack.stat().st_size // 2 + 2000)
    outcome = command("diff", branchy, 100, 300)
    assert outcome.code == 1
    assert "step 300 is damaged" in outcome.err


def test_many_differences_are_summed_up_unless_a_pattern_asks_for_them(command: Command, tmp_path: Path) -> None:
    def state(number: float) -> dict[str, Any]:
        layers = {f"layer{i}": {"weight": np.full(3, number + i), "bias": np.full(2, -2 * number)} for i in range(30)}
        return {"model": layers}

    run = two_steps(tmp_path / "run", state(1), state(3))
    outcome = command("diff", run, 1, 2)
    words = " ".join(outcome.out.split())
    assert "model.*.weight 30 2 model.*.bias 30 4" in words
    assert len(outcome.lines) == 6
    assert "model.layer29.weight all 2" in " ".join(command("diff", run, 1, 2, "--names", "*").out.split())
