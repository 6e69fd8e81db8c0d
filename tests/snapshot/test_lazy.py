"""Which tensors may be lazy, and one lazy copy, without an agent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.helpers import wait_until  # noqa: E402
from tests.snapshot.states import Gate, Trainer, same_bits, slot_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import optimizer as torch_optimizer  # noqa: E402

from stepwell.errors import UnsafeSnapshotError  # noqa: E402
from stepwell.snapshot import lazy as module  # noqa: E402
from stepwell.snapshot.lazy import AUDITED_SAVES, Audit, LazyCopy, LazyPolicy  # noqa: E402
from stepwell.state import flatten  # noqa: E402

WEIGHTS = {f"model.{i}.weight" for i in (0, 2)}
MOMENTS = {f"optim.state.{i}.weight.{key}" for i in (0, 2) for key in ("exp_avg", "exp_avg_sq")}


def lazy_names(policy: LazyPolicy, state: Any) -> set[str]:
    flat = flatten(state)
    eager, lazy = policy.split(flat)
    stored = {i for i in range(len(flat.names)) if flat.alias_of[i] < 0}
    assert sorted(eager + lazy) == sorted(stored), "each stored tensor is copied once"
    return {flat.names[i] for i in lazy}


@pytest.fixture
def policy() -> Any:
    made = LazyPolicy(lambda: None)
    yield made
    made.close()


# Which tensors


def test_large_parameters_and_their_moments_are_lazy_and_nothing_else(policy: LazyPolicy) -> None:
    """CASES 34: BatchNorm's statistics, an EMA and whatever else no optimizer owns are eager."""
    trainer = Trainer()
    trainer.step()
    ema = torch.optim.swa_utils.AveragedModel(trainer.model)
    big = {"buffer": torch.zeros(64, 1024), "array": np.zeros((64, 1024))}
    assert lazy_names(policy, {**trainer.state, "ema": ema, **big}) == WEIGHTS | MOMENTS


def test_on_the_host_small_tensors_are_eager(policy: LazyPolicy) -> None:
    small = nn.Linear(127, 128, bias=False)  # 65 024 bytes
    assert lazy_names(policy, {"model": small, "optim": torch.optim.SGD(small.parameters(), lr=1)}) == set()


class Foreign(torch.optim.AdamW):
    """A subclass from elsewhere may do anything at any time."""


def test_foreign_optimizers_are_eager(policy: LazyPolicy) -> None:
    trainer = Trainer()
    foreign = Foreign(trainer.model.parameters())
    assert lazy_names(policy, {"model": trainer.model, "optim": foreign}) == set()


def test_capturable_groups_are_eager_even_when_they_become_so_later(policy: LazyPolicy) -> None:
    trainer = Trainer()
    assert lazy_names(policy, trainer.state) == WEIGHTS
    trainer.optimizer.param_groups[0]["capturable"] = True
    assert lazy_names(policy, trainer.state) == set()


def test_parameters_of_two_optimizers_are_eager(policy: LazyPolicy) -> None:
    trainer = Trainer()
    second = torch.optim.SGD(trainer.model[2].parameters(), lr=1)
    assert lazy_names(policy, {**trainer.state, "second": second}) == {"model.0.weight"}


def test_two_optimizers_of_separate_parameters_are_both_lazy(policy: LazyPolicy) -> None:
    a, b = nn.Linear(128, 128), nn.Linear(128, 128)
    state = {"a": a, "b": b, "of_a": torch.optim.AdamW(a.parameters()), "of_b": torch.optim.SGD(b.parameters(), lr=1)}
    assert lazy_names(policy, state) == {"a.weight", "b.weight"}


def test_a_learning_rate_that_is_a_tensor_is_eager(policy: LazyPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAZY_BYTES_MIN", 0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-3), foreach=False)
    state = {"model": model, "optim": optimizer}
    assert any("lr" in name for name in flatten(state).names)
    assert lazy_names(policy, state) == {"model.weight", "model.bias"}


def test_tied_parameters_are_lazy_once(policy: LazyPolicy) -> None:
    model = nn.Module()
    model.a, model.b = nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False)
    model.b.weight = model.a.weight
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1)}
    assert lazy_names(policy, state) == {"model.a.weight"}


def test_what_an_unowned_name_shares_is_eager(policy: LazyPolicy) -> None:
    trainer = Trainer()
    assert lazy_names(policy, {**trainer.state, "best": trainer.model[0].weight}) == WEIGHTS, "the parameter itself"
    assert lazy_names(policy, {**trainer.state, "best": trainer.model[0].weight.data}) == {"model.2.weight"}


@pytest.mark.parametrize("kind", ["torch", "numpy", "strided"])
def test_parameters_inside_a_larger_tensor_of_the_state_are_eager(policy: LazyPolicy, kind: str) -> None:
    big = torch.zeros(3, 128, 128)
    model = nn.Module()
    model.inside = nn.Parameter(big[1])
    model.outside = nn.Parameter(torch.zeros(128, 128))
    whole = {"torch": big, "numpy": big.numpy()[:, ::-1], "strided": big.transpose(0, 2)}[kind]
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1), "whole": whole}
    assert lazy_names(policy, state) == {"model.outside"}


def test_parameters_that_share_one_flat_buffer_outside_the_state_are_lazy(policy: LazyPolicy) -> None:
    flat = torch.zeros(2, 128, 128)
    model = nn.ParameterDict({"a": nn.Parameter(flat[0]), "b": nn.Parameter(flat[1])})
    state = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1)}
    assert lazy_names(policy, state) == {"model.a", "model.b"}


def test_a_parameter_whose_strides_change_between_saves_becomes_eager(policy: LazyPolicy) -> None:
    """Strides are in no layout, and a copy by address would store the elements in another order."""
    convolution = nn.Conv2d(32, 64, 3, bias=False)
    state = {"model": convolution, "optim": torch.optim.SGD(convolution.parameters(), lr=1)}
    assert lazy_names(policy, state) == {"model.weight"}
    convolution.to(memory_format=torch.channels_last)
    assert lazy_names(policy, state) == set()


def test_candidates_that_are_new_begin_the_audits_anew(policy: LazyPolicy) -> None:
    trainer = Trainer()
    policy.split(flatten(trainer.state))
    policy.audits_left = 0
    policy.split(flatten(trainer.state))
    assert policy.audits_left == 0
    trainer.step()  # the moments exist from here on
    policy.split(flatten(trainer.state))
    assert policy.audits_left == AUDITED_SAVES


def test_one_hook_however_many_saves_and_none_after_close() -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    calls: list[int] = []
    policy = LazyPolicy(lambda: calls.append(1))
    trainer = Trainer()
    for _ in range(100):
        policy.split(flatten(trainer.state))
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
        trainer.state["optim"] = trainer.optimizer
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    trainer.step()
    assert len(calls) == 1
    policy.close()
    policy.close()
    trainer.step()
    assert len(calls) == 1 and len(torch_optimizer._global_optimizer_pre_hooks) == before


def test_the_barrier_comes_before_hooks_of_the_user_and_of_optimizers_outside_the_state() -> None:
    order: list[str] = []
    policy = LazyPolicy(lambda: order.append("barrier"))
    trainer = Trainer()
    trainer.optimizer.register_step_pre_hook(lambda *_: order.append("user"))
    policy.split(flatten(trainer.state))
    trainer.step()
    assert order == ["barrier", "user"]
    torch.optim.SGD(trainer.model.parameters(), lr=1).step()
    assert order == ["barrier", "user", "barrier"]
    policy.close()


# One copy


class Finish:
    """Records the one call of `finish` and what the copy said at that moment."""

    def __init__(self) -> None:
        self.calls: list[Exception | None] = []
        self.barrier_seconds = -1.0
        self.copy: LazyCopy | None = None

    def __call__(self, error: Exception | None) -> None:
        self.calls.append(error)
        if self.copy is not None:
            self.barrier_seconds = self.copy.barrier_seconds


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(module, "memmove", gate)
    yield gate
    gate.open.set()


def test_the_barrier_holds_the_trainer_until_the_copy_is_whole(gate: Gate, pool: ThreadPoolExecutor) -> None:
    weight = torch.arange(1 << 16, dtype=torch.float32)
    expected, finish, passed = weight.clone(), Finish(), threading.Event()
    with slot_of({"w": weight}) as (flat, layout, slot):
        copy = finish.copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.begin()

        def train(copy: LazyCopy) -> None:
            copy.barrier()
            passed.set()
            weight.fill_(-1)

        trainer = threading.Thread(target=train, args=(copy,), daemon=True)
        trainer.start()
        wait_until(lambda: gate.entered.is_set() and copy._held_since_seconds is not None)
        assert not passed.is_set() and not finish.calls
        gate.open.set()
        trainer.join(30)
        copy.complete()
        assert finish.calls == [None], "what the trainer does after the barrier is no change"
        assert same_bits(slot.views(layout, flat)[0], expected)
        assert copy.barrier_seconds > 0 and finish.barrier_seconds == copy.barrier_seconds, "final when it is accepted"


def test_a_change_before_the_barrier_fails_the_copy_by_name(gate: Gate, pool: ThreadPoolExecutor) -> None:
    state = {"a": torch.zeros(100), "b": torch.zeros(100)}
    finish = Finish()
    with slot_of(state) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0, 1], pool, finish)
        copy.begin()
        state["b"].add_(1)
        gate.open.set()
        copy.complete()
        (error,) = finish.calls
        assert isinstance(error, UnsafeSnapshotError) and error.where == "b" and copy.moved == ["b"]


def test_a_change_after_the_copy_and_without_a_barrier_is_none(pool: ThreadPoolExecutor) -> None:
    """A loop that never steps again, or that edits weights by hand once the save is accepted."""
    weight, finish = torch.zeros(100), Finish()
    with slot_of({"w": weight}) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.begin()
        copy.complete()
        weight.add_(1)
        copy.barrier()
        copy.complete()
        assert finish.calls == [None] and copy.barrier_seconds == 0


def test_an_error_in_the_copy_reaches_finish_and_nobody_hangs(
    monkeypatch: pytest.MonkeyPatch, pool: ThreadPoolExecutor
) -> None:
    def broken(*_: int) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(module, "memmove", broken)
    finish = Finish()
    with slot_of({"w": torch.zeros(100)}) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.begin()
        copy.barrier()
        copy.complete()
        assert [str(error) for error in finish.calls] == ["no such page"]


def test_ctrl_c_at_the_barrier_reaches_the_trainer_and_the_save_is_whole(gate: Gate, pool: ThreadPoolExecutor) -> None:
    """The exception keeps `optimizer.step()` from changing anything, so the copy may go on."""
    weight, finish = torch.arange(100), Finish()
    with slot_of({"w": weight}) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.begin()

        def interrupt() -> None:
            wait_until(lambda: copy._held_since_seconds is not None and gate.entered.is_set())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            copy.barrier()
        thread.join(30)
        assert not finish.calls
        gate.open.set()
        copy.complete()
        assert finish.calls == [None] and same_bits(slot.views(layout, flat)[0], weight)


def test_a_copy_that_was_never_begun_is_done_at_the_barrier(pool: ThreadPoolExecutor) -> None:
    """Ctrl-C in `save()` may come before the copy is begun."""
    weight, finish = torch.arange(100), Finish()
    with slot_of({"w": weight}) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.barrier()
        assert same_bits(slot.views(layout, flat)[0], weight)
        copy.complete()
        assert finish.calls == [None]


def test_done_is_set_even_when_finish_raises(pool: ThreadPoolExecutor) -> None:
    def finish(error: Exception | None) -> None:
        raise RuntimeError("in finish")

    with slot_of({"w": torch.zeros(100)}) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, finish)
        copy.begin()
        copy.complete()
        assert copy.done.is_set()


def test_many_helpers_copy_every_byte_once_and_finish_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 64)
    monkeypatch.setattr(module, "COPY_THREADS", 5)
    moved: list[tuple[int, int]] = []

    def counted(destination: int, source: int, size: int) -> None:
        moved.append((destination, size))
        ctypes.memmove(destination, source, size)

    monkeypatch.setattr(module, "memmove", counted)
    state = {f"t{i}": torch.randn(i) for i in range(60)}
    finish = Finish()
    with slot_of(state) as (flat, layout, slot), ThreadPoolExecutor(5) as pool:
        copy = LazyCopy(slot, layout, flat, list(range(60)), pool, finish)
        for _ in range(3):
            copy.begin()
            copy.barrier()
        copy.complete()
        assert finish.calls == [None]
        views = slot.views(layout, flat)
        assert all(same_bits(views[i], flat.tensors[i]) for i in range(60))
        assert len(set(moved)) == len(moved) and sum(size for _, size in moved) == 4 * sum(range(60))
        del views


def test_tensors_are_let_go_when_the_copy_is_whole(pool: ThreadPoolExecutor) -> None:
    """CASES 5: a handle lives long; the tensors that were replaced since must not live with it."""
    state = {"w": torch.zeros(100)}
    gone = weakref.ref(state["w"])
    with slot_of(state) as (flat, layout, slot):
        copy = LazyCopy(slot, layout, flat, [0], pool, Finish())
        state.clear()
        flat.tensors.clear()
        gc.collect()
        assert gone() is not None, "held until it is copied"
        copy.begin()
        copy.complete()
        gc.collect()
        assert gone() is None


def test_an_audit_sees_what_no_version_shows(pool: ThreadPoolExecutor) -> None:
    state = {"a": torch.zeros(100), "b": torch.zeros(100), "nan": torch.full((3,), torch.nan)}
    with slot_of(state) as (flat, layout, slot):
        for view, tensor in zip(slot.views(layout, flat), flat.tensors, strict=True):
            view.copy_(tensor)
        audit = Audit(slot, layout, flat, [0, 1, 2])
        before = state["b"]._version
        state["b"].data[7] = 1
        assert state["b"]._version == before
        assert audit.differing(pool) == ["b"]
        del audit, view
