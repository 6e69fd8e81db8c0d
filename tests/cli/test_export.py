from __future__ import annotations

import datetime
import json
import os
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.conftest import Command, make_state
from tests.helpers import flip_byte, pack_of

import stepwell
from stepwell.restore.stream import TensorStream

safetensors = pytest.importorskip("safetensors")


def read(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    with safetensors.safe_open(str(path), "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


def save_one(run: Path, state: dict[str, Any], **options: Any) -> Path:
    with stepwell.Checkpointer(run, **options) as checkpointer:
        checkpointer.save(1, state).wait()
    return run


def test_safetensors(command: Command, branchy: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    outcome = command("export", branchy, 300, out)
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(f"{out}: step 300-1, 4 tensors, ")
    tensors, metadata = read(out)
    expected = make_state(300)
    assert sorted(tensors) == ["frozen", *(f"model.layers.{i}.weight" for i in range(3))]
    for i in range(3):
        np.testing.assert_array_equal(tensors[f"model.layers.{i}.weight"], expected["model"][f"layers.{i}.weight"])
    assert tensors["frozen"].dtype == np.int64
    assert metadata["stepwell_step"] == "000000000300-0001"
    assert json.loads(metadata["values"]) == {"epoch": 3, "name": "gpt", "losses": expected["losses"]}
    assert "random number generators, left out" in outcome.err
    assert list(tmp_path.iterdir()) == [branchy, out] or sorted(tmp_path.iterdir()) == sorted([branchy, out])


def test_patterns_and_strip(command: Command, branchy: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    outcome = command("export", branchy, "newest", out, "--names", "model.*", "--strip", "model.", "--json")
    document = outcome.document
    assert (document["format"], document["version"], document["tensor_count"]) == ("stepwell.export", 1, 3)
    assert document["bytes"] == os.path.getsize(out)
    assert document["lost"] == []
    tensors, metadata = read(out)
    assert sorted(tensors) == [f"layers.{i}.weight" for i in range(3)]
    assert "values" not in metadata


def test_what_is_there_is_not_overwritten(command: Command, branchy: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.safetensors"
    out.write_text("mine")
    outcome = command("export", branchy, 300, out)
    assert outcome.code == 3
    assert "--force" in outcome.err
    assert out.read_text() == "mine"
    assert command("export", branchy, 300, out, "--force").code == 0
    assert read(out)[0]["frozen"][3] == 3


def test_what_appears_meanwhile_is_not_overwritten(
    command: Command, branchy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.safetensors"
    original = TensorStream.__enter__

    def slow(self: TensorStream) -> TensorStream:
        out.write_text("somebody else's")
        return original(self)

    monkeypatch.setattr(TensorStream, "__enter__", slow)
    outcome = command("export", branchy, 300, out)
    assert outcome.code == 3
    assert out.read_text() == "somebody else's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt", "x.safetensors"]


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_damage_leaves_no_file(command: Command, branchy: Path, tmp_path: Path, form: str) -> None:
    if form == "torch":
        pytest.importorskip("torch")
    pack = pack_of(branchy, "000000000300-0001")
    flip_byte(pack, pack.stat().st_size // 2 + 2000)
    outcome = command("export", branchy, 300, tmp_path / "x", "--format", form)
    assert outcome.code == 1
    assert "step 300 is damaged" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["gpt"]


def test_a_full_disk_leaves_no_file(
    command: Command, branchy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr("stepwell.cli.export.os.fsync", full)
    outcome = command("export", branchy, 300, tmp_path / "x")
    assert outcome.code == 3
    assert "no space left on device" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["gpt"]


def test_targets_that_cannot_be(command: Command, branchy: Path, tmp_path: Path) -> None:
    assert command("export", branchy, 300, tmp_path).code == 2
    assert command("export", branchy, 300, tmp_path / "no" / "x").code == 3
    assert command("export", branchy, 300, tmp_path / "x", "--names", "nothing").code == 2
    assert command("export", branchy, 300, tmp_path / "x", "--format", "torch", "--strip", "model.").code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["gpt"]


def test_names_that_would_collide_are_refused(command: Command, tmp_path: Path) -> None:
    run = save_one(tmp_path / "run", {"a": {"x": np.zeros(1)}, "x": np.ones(1)})
    assert command("export", run, 1, tmp_path / "out", "--strip", "a.").code == 2
    assert command("export", run, 1, tmp_path / "out", "--strip", "x").code == 2


def test_tied_tensors_are_stored_once_as_safetensors_itself_has_it(command: Command, tmp_path: Path) -> None:
    shared = np.arange(6, dtype=np.float32)
    run = save_one(tmp_path / "run", {"embedding": shared, "head": shared})
    command("export", run, 1, tmp_path / "both")
    tensors, metadata = read(tmp_path / "both")
    assert list(tensors) == ["embedding"] and metadata["head"] == "embedding"
    command("export", run, 1, tmp_path / "one", "--names", "head")
    tensors, metadata = read(tmp_path / "one")
    assert list(tensors) == ["head"] and "embedding" not in metadata
    np.testing.assert_array_equal(tensors["head"], shared)


def test_tensors_across_chunks(command: Command, tmp_path: Path) -> None:
    big = np.random.default_rng(0).standard_normal(3_000_001).astype(np.float32)
    run = save_one(tmp_path / "run", {"small": np.arange(7, dtype=np.float64), "big": big, "b": np.ones(5, np.int8)})
    command("export", run, 1, tmp_path / "x")
    np.testing.assert_array_equal(read(tmp_path / "x")[0]["big"], big)


def test_values_that_json_cannot_hold_are_named(command: Command, tmp_path: Path) -> None:
    state = {
        "x": np.zeros(1),
        "when": datetime.date(2026, 1, 2),
        "pair": (1, 2),
        "nan": float("nan"),
        "long": "y" * (2 << 20),
        "raw": b"ab",
    }
    run = save_one(tmp_path / "run", state)
    document = command("export", run, 1, tmp_path / "x", "--json").document
    lost = {one["what"]: one["names"] for one in document["lost"]}
    assert lost["tuple as a JSON list"] == ["pair"]
    assert lost["datetime.date as text"] == ["when"]
    assert lost["float as text, infinite or NaN"] == ["nan"]
    assert lost["values too large for the header, left out"] == ["long"]
    assert lost["bytes as text"] == ["raw"]
    note = json.loads(read(tmp_path / "x")[1]["values"])
    assert note["pair"] == [1, 2] and "long" not in note


def test_dtypes_without_a_name_in_safetensors_are_named(command: Command, tmp_path: Path) -> None:
    run = save_one(tmp_path / "run", {"z": np.array([1 + 2j]), "x": np.zeros(1)})
    outcome = command("export", run, 1, tmp_path / "x")
    assert "complex128 as F64 of another shape, the same bytes: z" in outcome.err
    np.testing.assert_array_equal(read(tmp_path / "x")[0]["z"], [[1.0, 2.0]])


def test_pickled_values_need_leave(command: Command, tmp_path: Path) -> None:
    run = save_one(tmp_path / "run", {"x": np.zeros(1), "odd": Odd()}, allow_pickle=True)
    outcome = command("export", run, 1, tmp_path / "x")
    assert outcome.code == 2
    assert "pickle" in outcome.err
    assert command("export", run, 1, tmp_path / "x", "--allow-pickle").code == 0


class Odd:
    pass


def test_torch_loads_what_it_is_given(command: Command, tmp_path: Path) -> None:
    """Model, optimizer and scheduler of a training in torch, into fresh ones, with torch's own functions only."""
    torch = pytest.importorskip("torch")

    def training() -> tuple[Any, Any, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
        groups = [{"params": model[1].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    model, optimizer, scheduler = training()
    for _ in range(3):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    state = {"model": model, "optim": optimizer, "sched": scheduler, "half": torch.ones(3, dtype=torch.bfloat16)}
    run = save_one(tmp_path / "run", state)
    outcome = command("export", run, 1, tmp_path / "x.pt", "--format", "torch")
    assert outcome.code == 0, outcome.err
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)

    other_model, other_optimizer, other_scheduler = training()
    other_model.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optim"])
    other_scheduler.load_state_dict(loaded["sched"])
    assert torch.equal(loaded["half"], state["half"])
    assert other_scheduler.state_dict() == scheduler.state_dict()
    expected, found = optimizer.state_dict(), other_optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        for key, value in entries.items():
            assert torch.equal(found["state"][number][key], value)
    for name, value in model.state_dict().items():
        assert torch.equal(other_model.state_dict()[name], value)


def test_torch_names_what_became_something_else(command: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.arange(3)
    state = {
        "tied": [shared, shared],
        "array": np.arange(3, dtype=np.float32),
        "scalar": np.float32(2.5),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list, b=[1]),
        "named": Point(1, torch.zeros(2)),
        "when": datetime.date(2026, 1, 2),
        "plain": (None, True, 1, 2.5, "x", b"y", 1j, {1, 2}, torch.float16, torch.Size([1, 2])),
    }
    run = save_one(tmp_path / "run", state)
    document = command("export", run, 1, tmp_path / "x.pt", "--format", "torch", "--json").document
    lost = {one["what"]: one["names"] for one in document["lost"]}
    assert lost["numpy.ndarray as torch.Tensor"] == ["array"]
    assert lost["numpy.float32 as float"] == ["scalar"]
    assert lost["collections.defaultdict as dict"] == ["default"]
    assert lost["datetime.date as str"] == ["when"]
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["plain"] == state["plain"]
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert loaded["scalar"] == 2.5 and loaded["default"] == {"b": [1]}
    assert loaded["named"][0] == 1 and loaded["when"] == "2026-01-02"
    assert type(loaded["ordered"]) is OrderedDict


Point = namedtuple("Point", ["x", "y"])


def test_torch_patterns(command: Command, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    run = save_one(tmp_path / "run", {"model": torch.nn.Linear(2, 2), "epoch": 3, "list": [torch.ones(1), 5]})
    outcome = command("export", run, 1, tmp_path / "x.pt", "--format", "torch", "--names", "model.*")
    assert outcome.code == 0
    assert outcome.err == ""
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)) == ["model"]


def test_numbers_that_python_itself_would_not_write(command: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with stepwell.Checkpointer(run, on_error="raise") as checkpointer:
        checkpointer.save(1, {"huge": 10**6000, "w": np.ones(3)}).wait()
    outcome = command("export", run, 1, tmp_path / "out.safetensors", "--json")
    assert outcome.code == 0
    assert any("too large" in lost["what"] and lost["names"] == ["huge"] for lost in outcome.document["lost"])
    for name in ("show", "diff"):
        assert command(name, run, *([1, 1] if name == "diff" else [])).code == 0
