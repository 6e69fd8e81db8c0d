"""Copies from an accelerator, against a fake one: order, events, pinning, eager and lazy saves, generator states."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.helpers import wait_until  # noqa: E402
from tests.snapshot.states import same_bits  # noqa: E402

import stepwell  # noqa: E402
from stepwell.errors import UnsafeSnapshotError  # noqa: E402
from stepwell.snapshot import lazy as lazy_module  # noqa: E402
from stepwell.snapshot.device import CudaCopier, PlainCopier, copier_for  # noqa: E402
from stepwell.state import torch_state  # noqa: E402
from stepwell.testing.device import FakeDevice  # noqa: E402


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDevice], None]:
    """Makes the checkpointer take all CPU tensors with a dimension for tensors on this fake device."""

    def pretend(device: FakeDevice) -> None:
        copier, real = CudaCopier(device.torch), torch_state.spec_of

        def spec_of(tensor: Any) -> Any:
            spec = real(tensor)
            place = "fake" if tensor.dim() else spec.device
            return torch_state.make_spec(spec.dtype, spec.shape, spec.kind, place)

        monkeypatch.setattr(torch_state, "spec_of", spec_of)
        monkeypatch.setattr("stepwell.checkpointer.copier_for", lambda kind: {"fake": copier}[kind])

    return pretend


# The copier


def test_copies_come_after_the_trainers_work_and_the_host_waits_for_their_event_only() -> None:
    device = FakeDevice(runs_by_itself=True)
    source, target = torch.zeros(3), torch.full((3,), -1.0)
    device.launch(lambda: source.fill_(5))
    ticket = CudaCopier(device.torch).copy([(target, source)])
    assert target.tolist() == [-1, -1, -1] and not device.host_waits, "queued, and nobody has waited"
    later: list[int] = []
    device.launch(lambda: later.append(1))
    ticket.wait()
    assert target.tolist() == [5, 5, 5]
    assert len(device.host_waits) == 1 and not later and device.stops == 0
    assert device.host_waits[0].blocking, "waiting must not burn a core"


@pytest.mark.parametrize("seed", range(20))
def test_holding_the_device_keeps_later_work_from_overtaking_the_copies(seed: int) -> None:
    device, chance = FakeDevice(), random.Random(seed)
    tensors = [torch.full((4,), float(i)) for i in range(5)]
    views = [torch.empty(4) for _ in tensors]
    for tensor in tensors:
        device.launch(lambda tensor=tensor: tensor.add_(100))
    ticket = CudaCopier(device.torch).copy(list(zip(views, tensors, strict=True)))
    ticket.hold_device()
    for tensor in tensors:
        device.launch(lambda tensor=tensor: tensor.fill_(-1))
    while any(stream.work for stream in device.streams):
        chance.choice(device.streams).advance()
    assert [view[0].item() for view in views] == [100, 101, 102, 103, 104]
    assert not device.host_waits and device.stops == 0


def test_the_next_copies_wait_for_the_work_in_between() -> None:
    device = FakeDevice(runs_by_itself=True)
    copier, source, seen = CudaCopier(device.torch), torch.zeros(1), []
    for value in (1, 2, 3):
        device.launch(lambda value=value: source.fill_(value))
        target = torch.empty(1)
        ticket = copier.copy([(target, source)])
        ticket.hold_device()
        ticket.wait()
        seen.append(target.item())
    assert seen == [1, 2, 3] and len(device.streams) == 2, "one side stream for all"


def test_an_error_while_queueing_comes_when_nothing_is_on_its_way_any_more() -> None:
    device = FakeDevice(runs_by_itself=True)
    queued = device.torch.Tensor.copy_

    def out_of_memory(view: Any, tensor: Any, *, non_blocking: bool) -> None:
        if tensor.numel() == 2:
            raise RuntimeError("out of memory")
        queued(view, tensor, non_blocking=non_blocking)

    device.torch.Tensor.copy_ = out_of_memory
    first, source = torch.zeros(1), torch.ones(1)
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaCopier(device.torch).copy([(first, source), (torch.zeros(2), torch.ones(2))])
    assert first.item() == 1 and device.stops == 0, "the slot may be given to others"


def test_a_device_without_streams_is_copied_at_once() -> None:
    assert isinstance(copier_for("mps"), PlainCopier) and isinstance(copier_for("cuda"), CudaCopier)
    view, copier = torch.zeros(2, 3), PlainCopier()
    assert copier.register(0, 1)
    ticket = copier.copy([(view, torch.arange(6.0, requires_grad=True).view(3, 2).T)])
    ticket.wait()
    ticket.hold_device()
    assert view.tolist() == [[0, 2, 4], [1, 3, 5]]


# Saves


def test_an_eager_save_waits_for_its_own_event_and_stores_what_was_queued_before(
    run: Path, on_device: Callable[[FakeDevice], None]
) -> None:
    device = FakeDevice(runs_by_itself=True)
    on_device(device)
    weight = torch.zeros(1 << 16)
    state = {"w": weight, "strided": weight.view(256, 256).T, "host": torch.tensor(1.0), "flag": True}
    with stepwell.Checkpointer(run, keep=stepwell.Keep(last=9)) as ckpt:
        for step in range(3):
            device.launch(lambda step=step: weight.fill_(step))
            later: list[int] = []
            save = ckpt.save(step, state)
            device.launch(lambda later=later: later.append(1))
            device.launch(lambda: weight.fill_(-1))
            assert save.snapshot_done and not later
            save.wait(timeout=60)
        assert device.stops == 0 and len(device.host_waits) == 3
        wait_until(lambda: len(ckpt._slots) == 2)
        assert device.pin_calls == len(device.pinned) == 2, "each slot once"
    assert not device.pinned, "given back before the memory is unmapped"
    for step in range(3):
        loaded = stepwell.load(run, step)
        assert (loaded["w"] == step).all() and (loaded["strided"] == step).all() and loaded["host"] == 1


def test_failing_to_pin_only_warns_once_per_slot(
    run: Path, on_device: Callable[[FakeDevice], None], caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(runs_by_itself=True)
    device.pin_code = 2
    on_device(device)
    with stepwell.Checkpointer(run, slots=1) as ckpt:
        for step in range(3):
            assert ckpt.save(step, {"w": torch.full((100,), float(step))}).wait(timeout=60).committed
    assert device.pin_calls == 1 and caplog.text.count("could not be pinned") == 1
    assert (stepwell.load(run)["w"] == 2).all()


class OnDevice:
    """A parameter whose optimizer steps on the fake device: hooks run on the host, the change is queued."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.model = torch.nn.Linear(256, 256, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1)
        self.state = {"model": self.model, "optim": self.optimizer}
        self.memory = self.model.weight.detach().numpy()
        self.memory[:] = 0

    def step(self) -> None:
        self.optimizer.step()
        self.device.launch(self._add_one, self.model.weight)

    def _add_one(self) -> None:
        self.memory += 1


def test_a_lazy_save_holds_the_device_and_not_the_host_and_is_accepted_when_its_event_fires(
    run: Path, on_device: Callable[[FakeDevice], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_module, "AUDITED_SAVES", 0)
    device = FakeDevice()
    on_device(device)
    trainer = OnDevice(device)
    with stepwell.Checkpointer(run, snapshot="lazy", keep=stepwell.Keep(last=9)) as ckpt:
        ckpt.prepare(trainer.state).wait(60)
        for step in range(3):
            for _ in range(2):
                trainer.step()  # two steps to each save, none of which has run on the device yet
            save = ckpt.save(step, trainer.state)
            assert save._lazy is not None and save._lazy.ticket is not None
            trainer.step()
            trainer.step()
            assert not save.snapshot_done and not ckpt._pending, "the host went on, and the agent knows nothing yet"
            device.run(device.trainer)
            save.wait(timeout=60)
            assert save.committed and save._lazy.barrier_seconds < save.blocked_seconds
        assert device.stops == 0 and (trainer.memory == 12).all()
    for step in range(3):
        assert (stepwell.load(run, step)["model"]["weight"] == 4 * step + 2).all()


def test_work_queued_between_save_and_barrier_fails_the_lazy_save(
    run: Path, on_device: Callable[[FakeDevice], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs beside the copies: its version is seen at the barrier, before the optimizer's own change hides it."""
    monkeypatch.setattr(lazy_module, "AUDITED_SAVES", 0)
    device = FakeDevice()
    on_device(device)
    trainer = OnDevice(device)
    with stepwell.Checkpointer(run, snapshot="lazy") as ckpt:
        ckpt.prepare(trainer.state).wait(60)
        save = ckpt.save(0, trainer.state)
        device.launch(lambda: None, trainer.model.weight)
        trainer.step()
        device.run()
        save.wait(timeout=60)
        assert isinstance(save.error, UnsafeSnapshotError) and "model.weight" in str(save.error)
        device.runs_by_itself = True
        again = ckpt.save(1, trainer.state)
        assert again.wait(timeout=60).committed and again._lazy is None, "eager from now on"


def test_the_step_after_the_barrier_is_no_change_however_late_the_event_fires(
    run: Path, on_device: Callable[[FakeDevice], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy_module, "AUDITED_SAVES", 0)
    device = FakeDevice()
    on_device(device)
    trainer = OnDevice(device)
    with stepwell.Checkpointer(run, snapshot="lazy", slots=3) as ckpt:
        ckpt.prepare(trainer.state).wait(60)
        trainer.step()
        save = ckpt.save(0, trainer.state)
        wait_until(lambda: len(device.host_waits) == 1)  # the background waits for the copies
        trainer.step()
        device.run()
        assert save.wait(timeout=60).committed
        assert (stepwell.load(run)["model"]["weight"] == 1).all()


def test_audits_of_device_tensors_compare_at_the_barrier(
    run: Path, on_device: Callable[[FakeDevice], None], caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice(runs_by_itself=True)
    on_device(device)
    trainer = OnDevice(device)
    with stepwell.Checkpointer(run, snapshot="lazy") as ckpt:
        for step in range(3):
            save = ckpt.save(step, trainer.state)
            trainer.memory += 1  # a foreign kernel without a trace
            trainer.step()
            device.run()
            save.wait(timeout=60)
            assert (stepwell.load(run, step)["model"]["weight"] == 2 * step).all()
        assert ckpt._lazy is not None and ckpt._lazy.never == {"model.weight"}
    assert caplog.text.count("model.weight") == 1


# Generators of accelerators


def test_generator_states_of_all_devices_in_use_are_saved_and_restored(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [torch.full((16,), i, dtype=torch.uint8) for i in range(2)]
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(cuda, "get_rng_state_all", lambda: [state.clone() for state in states])
    monkeypatch.setattr(cuda, "set_rng_state", lambda state, index: states[index].copy_(state))
    live = {"epoch": 1}
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, live).wait(timeout=60)
        for state in states:
            state.fill_(9)
        assert ckpt.restore(live) is not None
        assert [state.tolist() for state in states] == [[0] * 16, [1] * 16]
        monkeypatch.setattr(cuda, "device_count", lambda: 1)
        states[0].fill_(9)
        with pytest.warns(UserWarning, match="2 cuda devices, but there are 1 here"):
            ckpt.restore(live)
        assert same_bits(states[0], torch.zeros(16, dtype=torch.uint8))


def test_devices_that_are_not_in_use_are_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking an accelerator would start it, which takes memory and seconds."""

    def never() -> None:
        raise AssertionError("the accelerator was woken up")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", never)
    with stepwell.Checkpointer(run) as ckpt:
        ckpt.save(0, {"epoch": 1}).wait(timeout=60)
