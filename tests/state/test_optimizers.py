"""Optimizer state goes by parameter name and comes back bit for bit, whatever the parameter's dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.state.fake_store import Stored, same_bits, store
from torch import nn

from stepwell.errors import StateMismatchError, UnsupportedStateError
from stepwell.state import flatten, match
from stepwell.state.torch_state import state_device

Make = Callable[[Any], torch.optim.Optimizer]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    numbers = torch.Generator().manual_seed(seed)
    losses = []
    dtype = next(model.parameters()).dtype
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(torch.randn(5, 3, generator=numbers).to(dtype)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss is not None
        losses.append(float(loss.detach()))
    return losses


def assert_same_optimizer(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    one, two = a.state_dict(), b.state_dict()
    assert one["state"].keys() == two["state"].keys()
    for index in one["state"]:
        assert_same(one["state"][index], two["state"][index])
    assert_same(one["param_groups"], two["param_groups"])


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert same_bits(a, b) and a.device == b.device
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, two in zip(a, b, strict=True):
            assert_same(one, two)
    else:
        assert a == b


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("fresh", [True, False], ids=["into a fresh one", "into a used one"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_goes_on_bit_for_bit(name: str, fresh: bool) -> None:
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    stored = store({"model": model, "optim": optimizer})
    expected = copy.deepcopy(optimizer.state_dict())
    losses = train(model, optimizer, 3, seed=1)

    other = network(seed=5)
    restored = OPTIMIZERS[name](other.parameters())
    if not fresh:
        train(other, restored, 7, seed=2)
    state = restored.state
    stored.restore({"model": other, "optim": restored})
    assert restored.state is state
    assert_same(restored.state_dict()["state"], expected["state"])
    assert train(other, restored, 3, seed=1) == losses
    assert_same_optimizer(restored, optimizer)
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        assert same_bits(a.detach(), b.detach())


def test_names_are_those_of_the_parameters() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    names = flatten({"optim": optimizer, "model": model}).names
    assert names[:3] == [f"optim.state.0.weight.{key}" for key in ("step", "exp_avg", "exp_avg_sq")]


def test_the_state_of_a_used_optimizer_is_filled_in_place() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    stored = store({"model": model, "optim": optimizer})
    train(model, optimizer, 2)
    parameter = model[0].weight
    entry, moment, group = optimizer.state[parameter], optimizer.state[parameter]["exp_avg"], optimizer.param_groups[0]
    plan = match({"model": model, "optim": optimizer}, stored.saved)
    assert all(copy.address for copy in plan.copies)
    stored.restore({"model": model, "optim": optimizer})
    assert optimizer.state[parameter] is entry and entry["exp_avg"] is moment
    assert optimizer.param_groups[0] is group and group["params"][0] is parameter
    assert float(entry["step"]) == 2


def moments_in_fp32(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(seed).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer


@pytest.mark.parametrize("used", [False, True])
def test_case_32_fp32_moments_of_bf16_parameters_keep_their_dtype(used: bool) -> None:
    model, optimizer = moments_in_fp32()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"m": torch.randn(parameter.shape), "step": torch.tensor(3.0), "k": 2}
    stored = store({"model": model, "optim": optimizer})
    other, restored = moments_in_fp32(seed=3)
    if used:
        for parameter in other.parameters():
            restored.state[parameter] = {"m": torch.zeros_like(parameter), "step": torch.tensor(0.0), "old": 1}
    stored.restore({"model": other, "optim": restored})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert restored.state[b]["m"].dtype == torch.float32
        assert_same(restored.state[b], optimizer.state[a])


def test_a_new_step_counter_stays_on_the_cpu_unless_the_optimizer_wants_it_beside_the_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(1, device="meta"))
    optimizer = torch.optim.Adam([parameter])
    cpu, meta = torch.device("cpu"), torch.device("meta")
    for options, key, device in (
        ({}, "step", cpu),
        ({"fused": None, "capturable": False}, "step", cpu),
        ({"fused": True}, "step", meta),
        ({"capturable": True}, "step", meta),
        ({}, "exp_avg", meta),
    ):
        assert state_device(optimizer, options, parameter, key) == device


def test_the_order_of_parameters_may_differ() -> None:
    model = network()
    optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    stored = store({"model": model, "optim": optimizer})
    other = network(1)
    restored = torch.optim.SGD(list(other.parameters())[::-1], lr=0.5, momentum=0.1)
    stored.restore({"model": other, "optim": restored})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(restored.state[b], optimizer.state[a])
    assert restored.param_groups[0]["lr"] == 0.1 and restored.param_groups[0]["momentum"] == 0.9
    assert restored.param_groups[0]["params"] == list(other.parameters())[::-1]


def test_without_a_module_parameters_go_by_their_given_names_or_their_places() -> None:
    model = network()
    named = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    train(model, named, 1)
    assert flatten({"o": named}).names[0] == "o.state.0.weight.momentum_buffer"
    placed = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, placed, 1)
    stored = store({"o": placed})
    assert stored.flat.names[0] == "o.state.group0.param0.momentum_buffer"
    other = network(1)
    for restored, state in (
        (torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), {}),
        (torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), {"model": other}),
    ):
        stored.restore({"o": restored} | state, strict=not state)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert_same(restored.state[b], placed.state[a])


def test_parameters_of_several_modules_carry_the_name_of_their_module() -> None:
    nets = {"g": network(0), "d": network(1)}
    optimizer = torch.optim.SGD([*nets["d"].parameters(), *nets["g"].parameters()], lr=0.1, momentum=0.9)
    for net in nets.values():
        net(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    stored = store({"nets": nets, "o": optimizer})
    assert stored.flat.names[-8] == "o.state.nets.d.0.weight.momentum_buffer"
    others = {"d": network(2), "g": network(3)}
    restored = torch.optim.SGD([*others["g"].parameters(), *others["d"].parameters()], lr=0.1, momentum=0.9)
    stored.restore({"nets": others, "o": restored})
    for key in nets:
        for a, b in zip(nets[key].parameters(), others[key].parameters(), strict=True):
            assert_same(restored.state[b], optimizer.state[a])


def pair(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Stored]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)
    train(model, optimizer, 1)
    return model, optimizer, store({"model": model, "optim": optimizer})


def test_state_that_was_not_saved_is_removed() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stored = store({"model": model, "optim": optimizer})
    train(model, optimizer, 2)
    assert len(optimizer.state) == 4
    stored.restore({"model": model, "optim": optimizer})
    assert len(optimizer.state) == 0 and optimizer.state[model[0].weight] == {}


def test_other_groups_are_listed_as_differences() -> None:
    model, _, stored = pair()
    split = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1, momentum=0.9
    )
    with pytest.raises(StateMismatchError, match="optim: expected 2 parameter groups, found 1"):
        stored.restore({"model": model, "optim": split})
    fewer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(StateMismatchError, match=r"unexpected, the checkpoint has state for a parameter '2\.bias'"):
        stored.restore({"model": model, "optim": fewer})
    stored.restore({"model": model, "optim": fewer}, strict=False)
    assert len(fewer.state) == 2
    wider = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    with pytest.raises(
        StateMismatchError, match=r"optim\.state\.0\.weight': expected state for a parameter of shape \[5, 3\]"
    ):
        stored.restore({"model": wider, "optim": torch.optim.SGD(wider.parameters(), lr=0.1)})


def test_a_parameter_that_changed_its_group_is_listed() -> None:
    model = network()

    def grouped(first: list[Any], second: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.2}], lr=0.1)

    a, b, c, d = model.parameters()
    stored = store({"model": model, "optim": grouped([a, b], [c, d])})
    with pytest.raises(StateMismatchError, match=r"param_groups\.0: parameter '2\.weight' changed its group"):
        stored.restore({"model": model, "optim": grouped([a, c], [b, d])})


def test_options_of_groups_are_restored_and_others_listed() -> None:
    model, optimizer, _ = pair()
    optimizer.param_groups[0]["mine"] = {"a": (1, None)}
    optimizer.param_groups[0]["lr"] = 0.25
    stored = store({"model": model, "optim": optimizer})
    other = network(1)
    restored = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(StateMismatchError, match=r"optim\.param_groups\.0\.mine: unexpected"):
        stored.restore({"model": other, "optim": restored})
    assert restored.param_groups[0]["lr"] == 0.1
    restored.param_groups[0]["mine"] = None
    stored.restore({"model": other, "optim": restored})
    assert restored.param_groups[0]["mine"] == {"a": (1, None)} and restored.param_groups[0]["lr"] == 0.25
    restored.param_groups[0]["yours"] = 1
    with pytest.raises(StateMismatchError, match=r"optim\.param_groups\.0\.yours: missing"):
        stored.restore({"model": other, "optim": restored})


def test_an_option_that_a_newer_torch_added_keeps_its_default() -> None:
    model, optimizer, _ = pair()
    del optimizer.param_groups[0]["nesterov"]
    stored = store({"model": model, "optim": optimizer})
    other = network(1)
    restored = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    stored.restore({"model": other, "optim": restored})
    assert restored.param_groups[0]["nesterov"] is False and restored.param_groups[0]["lr"] == 0.1


def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    model = network()
    rate = torch.tensor(0.5)
    stored = store({"model": model, "optim": torch.optim.Adam(model.parameters(), lr=rate)})
    live = torch.tensor(0.1)
    restored = torch.optim.Adam(model.parameters(), lr=live)
    stored.restore({"model": model, "optim": restored})
    assert restored.param_groups[0]["lr"] is live and float(live) == 0.5
    with pytest.raises(StateMismatchError, match=r"param_groups\.0\.lr': expected a float, found float32\[\]"):
        stored.restore({"model": model, "optim": torch.optim.Adam(model.parameters(), lr=0.1)})


def test_names_restore_a_part_of_the_optimizer() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    train(model, optimizer, 1)
    stored = store({"model": model, "optim": optimizer})
    other = network(1)
    restored = torch.optim.Adam(other.parameters(), lr=0.1)
    weights = [parameter.clone() for parameter in other.parameters()]
    train(other, restored, 2)
    stored.restore({"model": other, "optim": restored}, names="optim.state.*.exp_avg")
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(restored.state[b]["exp_avg"], optimizer.state[a]["exp_avg"])
        assert float(restored.state[b]["step"]) == 2
        assert not same_bits(restored.state[b]["exp_avg_sq"], optimizer.state[a]["exp_avg_sq"])
    assert restored.param_groups[0]["lr"] == 0.1
    assert not any(torch.equal(a, b) for a, b in zip(weights, other.parameters(), strict=True))
    different = torch.optim.Adam([{"params": other[0].parameters()}, {"params": other[2].parameters()}])
    stored.restore({"model": other, "optim": different}, names="model.*")
    assert len(different.state) == 0


def test_the_optimizer_of_a_loaded_state_is_plain_dicts() -> None:
    model, optimizer, stored = pair()
    loaded = stored.load()["optim"]
    assert set(loaded["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert same_bits(loaded["state"]["0.bias"]["momentum_buffer"], optimizer.state[model[0].bias]["momentum_buffer"])
    assert loaded["param_groups"][0]["lr"] == 0.1
    assert loaded["param_groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


class WithExtra(torch.optim.SGD):
    """Saves more than the usual, so its own methods must be used."""

    beats = 0

    def state_dict(self) -> Any:
        return super().state_dict() | {"beats": self.beats}

    def load_state_dict(self, state: Any) -> None:
        self.beats = state["beats"]
        super().load_state_dict({key: value for key, value in state.items() if key != "beats"})


def test_an_optimizer_that_saves_more_is_loaded_by_its_own_method() -> None:
    model = network()
    optimizer = WithExtra(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    optimizer.beats = 7
    stored = store({"model": model, "optim": optimizer})
    assert {owner for owner in stored.flat.owners if owner and owner[0] == "optim"} == set()
    restored = WithExtra(model.parameters(), lr=0.3, momentum=0.9)
    stored.restore({"model": model, "optim": restored})
    assert restored.beats == 7
    assert_same_optimizer(restored, optimizer)


class Wrapped(torch.optim.Optimizer):
    """A wrapper that hands everything on, as training libraries make them."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.inner.defaults

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def test_case_32_a_wrapped_optimizer_keeps_fp32_moments_too() -> None:
    model, optimizer = moments_in_fp32()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"m": torch.randn(parameter.shape)}
    stored = store({"model": model, "optim": Wrapped(optimizer)})
    other, restored = moments_in_fp32(seed=3)
    stored.restore({"model": other, "optim": Wrapped(restored)})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(restored.state[b], optimizer.state[a])


def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    model, optimizer, _ = pair()
    optimizer.state["global"] = {"count": 3, "sum": torch.arange(2.0)}  # type: ignore[index]
    stored = store({"model": model, "optim": optimizer})
    assert "optim.other.global.sum" in stored.flat.names
    other = network(1)
    restored = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    restored.state["stale"] = 1  # type: ignore[index,assignment]
    stored.restore({"model": other, "optim": restored})
    assert_same(restored.state["global"], optimizer.state["global"])  # type: ignore[index]
    assert "stale" not in restored.state


def test_state_of_a_foreign_tensor_is_refused() -> None:
    model, optimizer, _ = pair()
    optimizer.state[torch.nn.Parameter(torch.zeros(1))] = {"m": torch.zeros(1)}
    with pytest.raises(UnsupportedStateError, match=r"state\['optim'\].*none of its param_groups"):
        flatten({"model": model, "optim": optimizer})


def test_a_post_hook_of_the_user_runs_after_the_restore() -> None:
    model, optimizer, stored = pair()
    seen: list[float] = []
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.param_groups[0]["lr"] = 9.0
    stored.restore({"model": model, "optim": optimizer})
    assert seen == [0.1]
