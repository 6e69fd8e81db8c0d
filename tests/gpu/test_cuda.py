"""Snapshots of tensors on a real CUDA device. Skipped without one; `tests/snapshot/test_device.py` has a fake."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.snapshot.states import assert_same, same_bits, stored  # noqa: E402
from tests.test_torch import tensors_of_every_kind  # noqa: E402
from torch import nn  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import UnsafeSnapshotError  # noqa: E402
from stepwell.snapshot.lazy import AUDITED_SAVES  # noqa: E402

WIDTH = 1024


class Trainer:
    """A model on the device, dropout included, with AdamW; losses are as bit-exact as the kernels are."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.random = torch.Generator("cuda").manual_seed(seed)
        self.state = {"model": self.model, "optim": self.optimizer, "random": self.random}

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        data = torch.randn(64, WIDTH, device="cuda", generator=self.random)
        loss = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optim.state.{name}.{key}"] = value.clone()
        return found


@pytest.fixture(autouse=True)
def no_stop_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in a save may stop the whole device."""

    def stop(*_: object) -> None:
        raise AssertionError("the whole device was stopped")

    monkeypatch.setattr(torch.cuda, "synchronize", stop)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["plain", "fused", "capturable"])
@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_every_save_is_the_state_at_save(run: Path, snapshot: Any, options: dict[str, Any]) -> None:
    trainer = Trainer(**options)
    expected, lazy_count = {}, 0
    with stepwell.Checkpointer(run, snapshot=snapshot, keep=stepwell.Keep(last=50)) as ckpt:
        trainer.step()
        ckpt.prepare(trainer.state).wait(60)
        for step in range(8):
            expected[step] = trainer.tensors()
            lazy_count += ckpt.save(step, trainer.state)._lazy is not None
            for _ in range(3):
                trainer.step()
        assert ckpt.counters.failed == 0
    assert lazy_count == (8 - AUDITED_SAVES if snapshot == "lazy" and "capturable" not in options else 0)
    for step, tensors in expected.items():
        assert_same(stored(stepwell.load(run, step)), tensors)


@pytest.mark.parametrize("snapshot", ["eager", "lazy"])
def test_a_resumed_run_is_the_uninterrupted_run(run: Path, snapshot: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        whole = Trainer()
        losses = [whole.step().item() for _ in range(9)]
        first, second = Trainer(), Trainer(seed=1)
        with stepwell.Checkpointer(run, snapshot=snapshot) as ckpt:
            for step in range(5):
                assert first.step().item() == losses[step]
                ckpt.save(step, first.state)
        torch.cuda.manual_seed_all(77)
        with stepwell.Checkpointer(run) as ckpt:
            restored = ckpt.restore(second.state)
            assert restored is not None and restored.step == 4
        assert [second.step().item() for _ in range(4)] == losses[5:]
        assert_same(second.tensors(), whole.tensors())
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_change_before_the_barrier_fails_the_lazy_save(run: Path) -> None:
    trainer = Trainer()
    trainer.step()
    with stepwell.Checkpointer(run, snapshot="lazy") as ckpt:
        for step in range(AUDITED_SAVES):
            ckpt.save(step, trainer.state).wait(timeout=60)
            trainer.step()
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):  # the copies cannot have begun when the weights change
            busy = busy @ busy
        save = ckpt.save(9, trainer.state)
        with torch.no_grad():
            trainer.model[0].weight.mul_(2)
        trainer.step()
        save.wait(timeout=60)
        assert isinstance(save.error, UnsafeSnapshotError) and "model.0.weight" in str(save.error)


def test_the_staged_copy_is_in_host_memory(run: Path) -> None:
    """CASES 4."""
    big = {f"w{i}": torch.full((8 << 20,), float(i), device="cuda") for i in range(8)}  # 256 MiB
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, big).wait(timeout=60)
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ckpt.save(1, big).wait(timeout=60)
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
    for i in range(8):
        assert (stepwell.load(run)[f"w{i}"] == i).all()


def test_slots_are_pinned_and_given_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.zeros(1 << 20, device="cuda")}
    for step in range(3):
        with stepwell.Checkpointer(run, slots=1) as ckpt:
            ckpt.restore(state)
            ckpt.save(step, state).wait(timeout=60)
            assert ckpt._slots[0]._pinned
    assert "could not be pinned" not in caplog.text


def test_every_dtype_and_make_of_tensor_on_the_device(run: Path) -> None:
    state = {"t": {name: tensor.cuda() for name, tensor in tensors_of_every_kind().items()}}
    state["t"]["transposed"] = state["t"]["tied"].T
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, state).wait(timeout=60)
        expected = {name: tensor.clone() for name, tensor in state["t"].items()}
        for tensor in state["t"].values():
            if tensor.numel() and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
                tensor.detach().view(-1).view(torch.uint8).zero_()
        ckpt.restore(state)
    assert_same(state["t"], expected)


def test_generators_of_the_device_go_on_where_they_were(run: Path) -> None:
    random = torch.Generator("cuda").manual_seed(4)
    torch.cuda.manual_seed_all(5)
    torch.randn(10, device="cuda")
    live = {"random": random}
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, live).wait(timeout=60)
        expected = (torch.randn(10, device="cuda"), torch.randn(10, device="cuda", generator=random))
        ckpt.restore(live)
        found = (torch.randn(10, device="cuda"), torch.randn(10, device="cuda", generator=random))
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_several_devices(run: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    state = {f"on{i}": torch.full((1 << 20,), float(i), device=f"cuda:{i}") for i in range(torch.cuda.device_count())}
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, state).wait(timeout=60)
        for tensor in state.values():
            tensor.zero_()
        ckpt.restore(state)
    assert all((tensor == i).all() and tensor.device.index == i for i, tensor in enumerate(state.values()))
