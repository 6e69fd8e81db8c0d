"""Predictions against checkpoints that are really written: bytes within 1 %, files exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import safetensors.torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import UsageError  # noqa: E402
from stepwell.plan import models  # noqa: E402
from stepwell.plan.inspect import inspect  # noqa: E402
from stepwell.plan.layout import Layout, files  # noqa: E402
from stepwell.plan.state import recipe_named, state_bytes  # noqa: E402

V, H, F, L, HEADS, KV = 4000, 384, 1024, 4, 6, 2
CONFIG = models._dense("llama", V, H, F, L, HEADS, KV)


class Block(torch.nn.Module):
    """A layer of the Llama family, its parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        head = H // HEADS
        shapes = {
            "q": (H, H), "k": (head * KV, H), "v": (head * KV, H), "o": (H, H), "gate": (F, H), "up": (F, H),
            "down": (H, F), "norm1": (H,), "norm2": (H,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))


@pytest.fixture(scope="module")
def training() -> dict[str, Any]:
    """A small Llama after one step of Adam, 120 MB with its moments."""
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(V, H),
            "layers": torch.nn.ModuleList(Block() for _ in range(L)),
            "head": torch.nn.Linear(H, V, bias=False),
        }
    )
    model.register_parameter("norm", torch.nn.Parameter(torch.randn(H)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.fixture(scope="module")
def predicted() -> tuple[models.Model, Any]:
    model = models.from_config(CONFIG, "small", "test")
    return model, state_bytes(model, recipe_named("adamw-fp32"), rank_count=1)


def plain(training: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in training.items()}


def tensors(training: dict[str, Any]) -> dict[str, Any]:
    found = dict(training["model"].state_dict())
    for index, state in training["optim"].state_dict()["state"].items():
        found |= {f"optim.{index}.{name}": tensor for name, tensor in state.items()}
    return found


def test_the_count_is_that_of_the_model(training: dict[str, Any], predicted: tuple[models.Model, Any]) -> None:
    count = sum(parameter.numel() for parameter in training["model"].parameters())
    assert count == predicted[0].parameter_count and 12 * count > 100e6


def write(tool: str, training: dict[str, Any], folder: Path) -> Path:
    if tool == "torch.save":
        torch.save(plain(training), folder / "state.pt")
        return folder / "state.pt"
    if tool == "safetensors":
        safetensors.torch.save_file(tensors(training), folder / "model.safetensors")
        return folder / "model.safetensors"
    if tool == "dcp":
        dcp.save(plain(training), checkpoint_id=folder / "dcp", no_dist=True)
        return folder / "dcp"
    with stepwell.Checkpointer(folder / "run", on_error="raise") as ckpt:
        ckpt.save(1, training).wait(timeout=60)
    return folder / "run"


@pytest.mark.parametrize("tool", ["torch.save", "safetensors", "dcp", "stepwell"])
def test_what_a_tool_writes_is_what_was_predicted(
    tool: str, training: dict[str, Any], predicted: tuple[models.Model, Any], tmp_path: Path
) -> None:
    model, state = predicted
    path = write(tool, training, tmp_path)
    found = inspect(str(path))
    layout = Layout(1, sharding="ddp" if tool in ("torch.save", "safetensors") else "fsdp")
    expected = files(tool, layout, model, state)
    assert found.tool == tool
    assert found.state_bytes == pytest.approx(expected.written_bytes, rel=0.01)
    assert found.stored_bytes == pytest.approx(expected.written_bytes, rel=0.01)
    if tool == "safetensors":
        assert expected.file_count == 2 and found.file_count == 1, "one shard needs no index"
    else:
        assert found.file_count == expected.file_count
    if found.tensor_count:
        assert found.tensor_count == len(tensors(training))


def test_a_folder_of_shards_and_one_of_anything(training: dict[str, Any], tmp_path: Path) -> None:
    whole = tensors(training)
    names = sorted(whole)
    (tmp_path / "hf").mkdir()
    for number in range(2):
        safetensors.torch.save_file(
            {n: whole[n] for n in names[number::2]}, tmp_path / "hf" / f"m-{number}.safetensors"
        )
    (tmp_path / "hf" / "model.safetensors.index.json").write_text("{}")
    found = inspect(str(tmp_path / "hf"))
    assert found.tool == "safetensors" and found.file_count == 3 and found.tensor_count == len(whole)
    assert found.parameter_count == sum(tensor.numel() for tensor in whole.values())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mp_rank_00_model_states.pt").write_bytes(bytes(1000))
    assert inspect(str(tmp_path / "other")).state_bytes == 1000


def test_no_pickle_is_ever_opened(tmp_path: Path) -> None:
    """A pickle that would leave a mark when loaded leaves none."""
    mark = tmp_path / "mark"

    class Bad:
        def __reduce__(self) -> Any:
            return (open, (str(mark), "w"))

    torch.save({"x": torch.ones(1000), "bad": Bad()}, tmp_path / "bad.pt")
    assert inspect(str(tmp_path / "bad.pt")).state_bytes == 4000
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0[]"])
def test_headers_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="not a readable"):
        inspect(str(tmp_path / "bad.safetensors"))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        inspect(str(tmp_path / "none"))
    with pytest.raises(UsageError, match="empty"):
        inspect(str(tmp_path))
