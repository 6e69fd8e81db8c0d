"""Torch through the door: bit-exact resume, every dtype, packs that safetensors opens, memory, workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import agents_of, pack_of, wait_until  # noqa: E402
from tests.snapshot.states import assert_same, same_bits  # noqa: E402
from tests.torch_training import Training  # noqa: E402
from torch import nn  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import StateMismatchError  # noqa: E402
from stepwell.state.spec import ITEM_BYTES  # noqa: E402
from stepwell.store import layout as layouts  # noqa: E402

ROOT = Path(__file__).parents[1]


def python(*arguments: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, timeout=100, stdout=output, stderr=output, text=True, check=False)


# Resume


def uninterrupted(steps: int, dtype: torch.dtype = torch.float32) -> Training:
    training = Training(dtype=dtype)
    for _ in range(steps):
        training.step()
    return training


def test_a_killed_run_resumed_in_a_new_process_is_the_uninterrupted_run(run: Path) -> None:
    script = [str(ROOT / "tests" / "torch_training.py"), str(run), "14"]
    killed = python(*script, "lazy", "11")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = python(*script, "eager")
    assert resumed.returncode == 0, resumed.stderr
    answer = json.loads(resumed.stdout.splitlines()[-1])
    whole = uninterrupted(14)
    assert answer["first"] > 3 and answer["tier"] == "memory", "the agent outlives the trainer"
    assert answer["losses"] == whole.state["losses"]
    assert answer["digest"] == whole.digest()


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fresh_objects_go_on_as_the_saved_ones(run: Path, snapshot: Any, dtype: torch.dtype) -> None:
    """Each of several saves, each restored into objects that were never trained, and into trained ones."""
    saved, digests = Training(dtype=dtype), {}
    with stepwell.Checkpointer(run, snapshot=snapshot, keep=stepwell.Keep(last=9)) as ckpt:
        for step in range(6):
            saved.step()
            ckpt.save(step, saved.state)
            digests[step] = saved.digest()
        used = Training(seed=3, dtype=dtype)
        used.step()
        for step in (5, 0, 4, 3):
            for target in (Training(seed=2, dtype=dtype), used):
                restored = ckpt.restore(target.state, step=step)
                assert restored is not None and restored.step == step
                assert target.digest() == digests[step]
        while len(used.state["losses"]) < 8:
            used.step()
    assert used.digest() == uninterrupted(8, dtype).digest()


def test_tied_weights_are_stored_once_and_stay_tied(run: Path) -> None:
    """CASES 17."""
    training = Training()
    training.step()
    target = Training(seed=1)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, training.state).wait(timeout=60)
        ckpt.restore(target.state)
    assert target.model["head"].weight is target.model["embed"].weight
    loaded = stepwell.load(run)["model"]
    assert loaded["head.weight"] is loaded["embed.weight"]
    with open(pack_of(run, "000000000000-0001"), "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert "model.embed.weight" in header and "model.head.weight" not in header


def test_moments_keep_their_dtype_whatever_the_parameters_is(run: Path) -> None:
    """CASES 32: torch's own `load_state_dict` would make these moments bfloat16."""
    model = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for parts in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            parts[key] = torch.rand(parts[key].shape)  # float32, with bits that bfloat16 has not
    other = nn.Linear(8, 8, dtype=torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters())
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, {"model": model, "optim": optimizer}).wait(timeout=60)
        ckpt.restore({"model": other, "optim": fresh})
    for before, after in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert_same(after, before)
        assert after["exp_avg"].dtype == torch.float32


def test_a_parameter_of_another_dtype_is_refused_unless_cast_is_asked_for(run: Path) -> None:
    """CASES 16."""
    saved, other = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)
    before = other.weight.detach().clone()
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, {"model": saved}).wait(timeout=60)
        with pytest.raises(StateMismatchError, match=r"model\.weight.*bfloat16.*float32"):
            ckpt.restore({"model": other})
        assert same_bits(other.weight, before)
        ckpt.restore({"model": other}, cast=True)
        assert same_bits(other.weight, saved.weight.to(torch.bfloat16))


# Tensors


def tensors_of_every_kind() -> dict[str, torch.Tensor]:
    """Random bits in every dtype and of every make."""
    random = torch.Generator().manual_seed(4)

    def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        count = torch.empty(shape, dtype=dtype).nbytes
        made = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=random)
        return made.view(dtype).view(shape)

    found = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            found[name] = bits(5, 8, dtype=dtype)
            found[f"{name} 0-dim"] = bits(1, dtype=dtype)[0]
            found[f"{name} empty"] = bits(0, 3, dtype=dtype)
    wide = bits(40, 40, dtype=torch.float32)
    complexes = bits(6, 7, dtype=torch.complex64)
    big = bits(50, 1000, dtype=torch.float32)
    return {
        **found,
        "transposed": wide.T,
        "strided": wide[::3, 1::2],
        "expanded": wide[:1].expand(40, 40),
        "channels last": bits(2, 3, 4, 5, dtype=torch.float16).to(memory_format=torch.channels_last),
        "conjugated": complexes.conj(),
        "imaginary": complexes.imag,
        "negated": complexes.conj().imag,
        "view": big[3],
        "offset view": wide.view(-1)[7:107],
        "parameter": nn.Parameter(bits(3, 3, dtype=torch.float32)),
        "tied": wide,
        "tied again": wide,
    }


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("prepared", [False, True], ids=["fresh slot", "touched slot"])
def test_every_dtype_and_make_of_tensor(run: Path, prepared: bool) -> None:
    state = {"t": tensors_of_every_kind()}
    target = {
        "t": {
            name: torch.zeros(tensor.shape, dtype=torch.uint8).to(tensor.dtype)
            if ITEM_BYTES[str(tensor.dtype)[6:]] > 1
            else torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            for name, tensor in state["t"].items()
        }
    }
    target["t"]["transposed"] = torch.zeros(40, 40).T
    with stepwell.Checkpointer(run) as ckpt:
        if prepared:
            ckpt.prepare(state).wait(60)
        ckpt.save(0, state).wait(timeout=60)
        ckpt.restore(target)
    assert_same(target["t"], state["t"])
    loaded = stepwell.load(run)
    assert_same(loaded["t"], state["t"])
    assert loaded["t"]["tied again"] is loaded["t"]["tied"]
    as_numpy = stepwell.load(run, to="numpy")["t"]
    assert {type(array).__name__ for array in as_numpy.values()} == {"ndarray"}
    assert as_numpy["strided"].tobytes() == state["t"]["strided"].contiguous().numpy().tobytes()

    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file

    pack = pack_of(run, "000000000000-0001")
    from_file = load_file(pack)
    with safetensors.safe_open(pack, framework="pt") as file:
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == set(from_file)
    for name, tensor in state["t"].items():
        if name == "tied again":
            continue
        found = from_file[f"t.{name}"]
        if str(tensor.dtype)[6:] in ("complex128", "complex32", "float4_e2m1fn_x2", "float8_e8m0fnu"):
            assert found.contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))
        else:
            assert same_bits(found, tensor), name


def test_a_view_costs_its_own_bytes_on_disk(run: Path) -> None:
    """CASES 17: `big[0]` must not write all of `big`."""
    big = torch.zeros(100, 10_000)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, {"view": big[0]}).wait(timeout=60)
        assert ckpt.steps()[0].state_bytes == 40_000
    assert pack_of(run, "000000000000-0001").stat().st_size < 40_000 + 20_000


def test_a_model_on_several_packs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "PACK_TABLE_BYTES_MAX", 2000)
    training, target = Training(), Training(seed=1)
    with stepwell.Checkpointer(run) as ckpt:
        for step in range(3):
            training.step()
            ckpt.save(step, training.state).wait(timeout=60)
        packs = sorted((run / "steps" / "000000000002-0001").glob("*.safetensors"))
        assert len(packs) > 2
        ckpt.restore(target.state)
        assert target.digest() == training.digest()
    safetensors = pytest.importorskip("safetensors.torch")
    found: dict[str, torch.Tensor] = {}
    for pack in packs:
        found.update(safetensors.load_file(pack))
    for name, tensor in training.model.state_dict().items():
        if name != "head.weight":
            assert same_bits(found[f"model.{name}"], tensor)


def test_loading_a_part_without_a_model(run: Path) -> None:
    training = Training()
    training.step()
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, training.state).wait(timeout=60)
        body = {"model": Training(seed=2).model}
        before = body["model"]["embed"].weight.detach().clone()
        ckpt.restore(body, names="model.body.*", strict=False)
    part = stepwell.load(run, names="model.*")
    assert set(part) == {"model"}
    assert_same(part["model"], dict(training.model.state_dict()))
    moments = stepwell.load(run, names="*.exp_avg")
    assert set(moments["optim"]["state"]) == {name for name, _ in training.model.named_parameters()}
    assert same_bits(body["model"]["body"][0].weight, training.model["body"][0].weight)
    assert same_bits(body["model"]["embed"].weight, before)


# Memory and processes


def test_restoring_takes_no_second_copy(run: Path) -> None:
    """Measured as the growth of the process's peak memory, in a process that does nothing else."""
    count, size = 24, 1 << 20
    state = {"model": {f"w{i}": torch.full((size,), float(i)) for i in range(count)}}
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        ckpt.save(0, state).wait(timeout=60)
    script = f"""
        import resource, sys
        import torch
        import stepwell
        stepwell.Checkpointer.prepare = lambda *_: None  # slots are the agent's memory, mapped here
        state = {{"model": {{f"w{{i}}": torch.ones({size}) for i in range({count})}}}}
        with stepwell.Checkpointer(sys.argv[1]) as ckpt:
            ckpt.restore({{"model": {{"w0": torch.ones({size})}}}}, names="model.w0")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert ckpt.restore(state) is not None
            print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
        assert all((state["model"][f"w{{i}}"] == i).all() for i in range({count}))
    """
    ended = python("-c", textwrap.dedent(script), str(run))
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 0.4 * 4 * size * count


def test_loader_workers_do_not_keep_the_agents_connection_after_the_trainer_was_killed(
    run: Path, tmp_path: Path
) -> None:
    script = """
        import os, signal, sys
        import stepwell
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index):
                return torch.tensor(index)

        state = {"w": torch.zeros(1000)}
        ckpt = stepwell.Checkpointer(sys.argv[1])
        ckpt.save(0, state).wait()
        loader = iter(DataLoader(Data(), num_workers=2, multiprocessing_context="fork"))
        for _ in range(4):
            next(loader)
        ckpt.save(1, state).wait()
        with open(sys.argv[2], "w") as file:
            for worker in loader._workers:
                os.kill(worker.pid, signal.SIGSTOP)  # alive as long as the test wants
                print(worker.pid, file=file)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    pids = tmp_path / "workers"
    ended = python("-c", textwrap.dedent(script), str(run), str(pids), output=subprocess.DEVNULL)
    assert ended.returncode == -signal.SIGKILL
    workers = [int(line) for line in pids.read_text().splitlines()]
    try:
        assert len(workers) == 2 and all(Path(f"/proc/{pid}").exists() for pid in workers)
        assert len(agents_of(run)) == 1
        live = {"w": torch.ones(1000)}
        with stepwell.Checkpointer(run) as ckpt:  # refused, if the agent took the old trainer for alive
            restored = ckpt.restore(live)
            assert restored is not None and restored.step == 1 and restored.tier == "memory"
            ckpt.save(2, live).wait(timeout=60)
    finally:
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not agents_of(run))


def test_expanded_tensors_are_replaced(run: Path) -> None:
    with stepwell.Checkpointer(run, on_error="raise") as ckpt:
        ckpt.save(1, {"mask": torch.arange(3.0).expand(4, 3)}).wait(timeout=60)
        state = {"mask": torch.zeros(3).expand(4, 3)}
        ckpt.restore(state)
    assert torch.equal(state["mask"], torch.arange(3.0).expand(4, 3))
