from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.conftest import Command
from tests.helpers import flip_byte, pack_of

import stepwell


def test_the_facts_of_the_newest_step(command: Command, branchy: Path) -> None:
    outcome = command("show", branchy)
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    for text in (
        "step 450 of attempt 2, the newest",
        "parent step 400 of attempt 2",
        "loss 0.222222, accuracy 0.45",
        "model.layers.2.weight float32 8×32 1.02 kB",
        "frozen int64 10 80 B",
        "epoch int 4",
        "name str 'gpt'",
        "random number generators: python, numpy",
        "blocked",
        "fsync",
    ):
        assert text in words


def test_the_document(command: Command, branchy: Path) -> None:
    document = command("show", branchy, "500", "--json").document
    assert (document["format"], document["version"]) == ("stepwell.show", 1)
    assert document["key"] == "000000000500-0001"
    assert document["branch"] == "abandoned"
    assert document["parent"] == "000000000400-0001"
    assert document["packs"] == [
        {"name": "node00000-00.safetensors", "bytes": os.path.getsize(pack_of(branchy, document["key"]))}
    ]
    tensors = {one["name"]: one for one in document["tensors"]}
    assert tensors["frozen"] == {
        "name": "frozen",
        "dtype": "int64",
        "shape": [10],
        "bytes": 80,
        "library": "numpy",
        "device": "cpu",
        "same_as": None,
    }
    assert len(tensors) == document["tensor_count"] == 4
    values = {one["name"]: one for one in document["values"]}
    assert values["epoch"] == {"name": "epoch", "type": "int", "text": "5"}
    assert document["telemetry"]["key"] == document["key"]
    assert document["telemetry"]["durable_seconds"] > 0


def test_patterns_choose_tensors(command: Command, branchy: Path) -> None:
    outcome = command("show", branchy, "--tensors", "model.*.1.*", "--tensors", "fro*")
    assert "model.layers.1.weight" in outcome.out and "frozen" in outcome.out
    assert "model.layers.0.weight" not in outcome.out
    document = command("show", branchy, "--tensors", "model.*", "--json").document
    assert [one["name"] for one in document["tensors"]] == [f"model.layers.{i}.weight" for i in range(3)]
    assert "no tensor of such a name" in command("show", branchy, "--tensors", "nothing*").out


def test_many_tensors_are_shown_by_groups(command: Command, tmp_path: Path) -> None:
    import numpy as np

    with stepwell.Checkpointer(tmp_path / "run") as checkpointer:
        model = {f"layer{i}": np.zeros(4, dtype=np.float32) for i in range(30)}
        checkpointer.save(1, {"model": model, "other": {"x": np.zeros(2, dtype=np.int8)}}).wait()
    words = " ".join(command("show", tmp_path / "run").out.split())
    assert "model.* 30 480 B 30 float32" in words
    assert "layer29" not in words
    assert "layer29" in command("show", tmp_path / "run", "--tensors", "*").out


def test_tied_tensors_say_so(command: Command, tmp_path: Path) -> None:
    import numpy as np

    shared = np.ones(100, dtype=np.float32)
    with stepwell.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": shared, "b": shared}).wait()
    assert "same as a" in command("show", tmp_path / "run").out
    tensors = command("show", tmp_path / "run", "--json").document["tensors"]
    assert [one["same_as"] for one in tensors] == [None, "a"]


def test_long_values_are_cut(command: Command, tmp_path: Path) -> None:
    import numpy as np

    state = {"x": np.zeros(1), "long": list(range(10_000)), "text": "y" * 5000, "raw": bytes(5000), "big": 10**400}
    with stepwell.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).wait()
    outcome = command("show", tmp_path / "run")
    assert "(10,000 items)" in outcome.out
    assert "5.00 kB (xxh3 " in outcome.out
    assert "an integer of 1329 bits" in outcome.out
    table = outcome.lines[outcome.out.splitlines().index("value  type") :]
    assert max(map(len, table)) < 90


def test_pickled_values_are_not_read_unless_asked_for(command: Command, tmp_path: Path) -> None:
    import numpy as np

    with stepwell.Checkpointer(tmp_path / "run", allow_pickle=True) as checkpointer:
        checkpointer.save(1, {"x": np.zeros(1), "odd": _Odd()}).wait()
    outcome = command("show", tmp_path / "run")
    assert outcome.code == 0
    assert "some are pickled" in outcome.out
    assert command("show", tmp_path / "run", "--json").document["values"] is None
    assert "an odd thing" in command("show", tmp_path / "run", "--allow-pickle").out


class _Odd:
    def __repr__(self) -> str:
        return "an odd thing"


def test_a_damaged_step_shows_what_its_manifest_says(command: Command, branchy: Path) -> None:
    flip_byte(pack_of(branchy, "000000000450-0002"), 100)
    outcome = command("show", branchy)
    assert outcome.code == 1
    assert "✗ the header" in outcome.out
    assert "parent" in outcome.out
    document = command("show", branchy, "--json").document
    assert document["tensors"] is None and "header" in document["problem"]


def test_a_step_without_a_readable_manifest(command: Command, branchy: Path) -> None:
    (branchy / "steps" / "000000000450-0002" / "manifest.json").write_bytes(b"\xff")
    outcome = command("show", branchy)
    assert outcome.code == 1
    assert "step 450 of attempt 2" in outcome.out and "cannot be read" in outcome.out


@pytest.mark.parametrize(
    "line", [b'{"event":"save","key":"000000000450-0002"', b"[" * 5000 + b'"000000000450-0002"', b'"000000000450-0002"']
)
def test_broken_telemetry_is_passed_over(command: Command, branchy: Path, line: bytes) -> None:
    with open(branchy / "telemetry" / "node00000.jsonl", "ab") as file:
        file.write(line)
    assert command("show", branchy, "--json").document["telemetry"]["step"] == 450


def test_without_telemetry_there_are_no_timings(command: Command, branchy: Path) -> None:
    (branchy / "telemetry" / "node00000.jsonl").unlink()
    (branchy / "telemetry").rmdir()
    outcome = command("show", branchy)
    assert outcome.code == 0
    assert "timings" not in outcome.out


def test_long_facts_are_wrapped_below_themselves(command: Command, branchy: Path) -> None:
    outcome = command("show", branchy, columns=80)
    facts = [line for line in outcome.lines if line.startswith("  ")]
    assert max(map(len, facts)) <= 80
