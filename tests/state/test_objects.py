"""Modules, schedulers, scalers, loaders and generators in the state."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.state.fake_store import same_bits, store
from torch import nn
from torch.optim import lr_scheduler

from stepwell.errors import StateMismatchError, UnsupportedStateError
from stepwell.state import flatten, match


def same_modules(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(
        same_bits(one[key], two[key]) if isinstance(one[key], torch.Tensor) else one[key] == two[key] for key in one
    )


# Modules


def network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 2), nn.LSTM(2, 2))


def test_a_module_is_filled_in_place_without_load_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, live = network(), network()
    saved[1].running_mean.fill_(3)  # type: ignore[index,union-attr]
    parameters = list(live.parameters())
    stored = store({"model": saved})
    monkeypatch.setattr(nn.Module, "load_state_dict", None)
    plan = stored.restore({"model": live})
    assert same_modules(saved, live) and all(copy.address for copy in plan.copies)
    assert all(a is b for a, b in zip(live.parameters(), parameters, strict=True))


def test_missing_and_unexpected_parameters_are_listed() -> None:
    stored = store({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))})
    with pytest.raises(StateMismatchError) as caught:
        stored.restore({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 2), nn.Linear(1, 1))})
    text = str(caught.value)
    assert "'model.0.weight': expected float32[3, 2], found float32[2, 2]" in text
    assert "'model.1.bias': missing in the checkpoint" in text and "'model.2.weight': missing" in text
    assert "model.1.weight" not in text


def test_a_module_and_a_dict_of_its_tensors_stand_for_each_other() -> None:
    saved, live = network(), network()
    store({"model": saved.state_dict()}).restore({"model": live})
    assert same_modules(saved, live)
    target = {key: torch.zeros_like(value) for key, value in saved.state_dict().items()}
    store({"model": saved}).restore({"model": target})
    assert all(same_bits(target[key], value) for key, value in saved.state_dict().items())
    nothing: dict[str, Any] = {"model": None}
    store({"model": saved}).restore(nothing)
    assert list(nothing["model"]) == list(saved.state_dict())


def test_case_17_tied_weights_of_a_module_are_stored_once_and_stay_tied() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    saved, live = tied(), tied()
    stored = store({"model": saved, "optim": torch.optim.Adam(saved.parameters())})
    assert stored.saved.alias_of == [-1, 0] and stored.stored_bytes == 60
    stored.restore({"model": live, "optim": torch.optim.Adam(live.parameters())})
    assert same_modules(saved, live) and live[1].weight is live[0].weight  # type: ignore[index,union-attr]


class ExtraState(nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"n": (1, 2)}, None),
        (3, {"n": 1}),
        (torch.arange(4), torch.zeros(1)),
        ({"t": torch.arange(3.0), "n": 1}, {"t": torch.zeros(7, dtype=torch.int8)}),
    ],
)
def test_extra_state_of_modules_comes_back(saved: Any, live: Any) -> None:
    one, two = nn.Sequential(ExtraState(saved)), nn.Sequential(ExtraState(live))
    with torch.no_grad():
        one[0].weight.fill_(5)
    store({"model": one}).restore({"model": two})
    assert torch.equal(two[0].weight, one[0].weight)
    if isinstance(saved, torch.Tensor):
        assert same_bits(two[0].extra, saved)
    elif isinstance(saved, dict) and "t" in saved:
        assert same_bits(two[0].extra["t"], saved["t"]) and two[0].extra["n"] == 1
    else:
        assert two[0].extra == saved


class Doubled(nn.Module):
    """Saves a copy that is not its own memory: loading must go through its own method."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.zeros(3))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "double"] = self.hidden.detach() * 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.hidden.copy_(state_dict[prefix + "double"] / 2)


def test_a_module_with_its_own_loading_is_loaded_by_it() -> None:
    saved, live = nn.Sequential(Doubled(), nn.Linear(2, 2)), nn.Sequential(Doubled(), nn.Linear(2, 2))
    with torch.no_grad():
        saved[0].hidden.copy_(torch.arange(3.0))
    store({"model": saved}).restore({"model": live})
    assert torch.equal(live[0].hidden, torch.arange(3.0)) and same_modules(saved, live)


class OwnDict(ExtraState):
    """Hands out the dict that it keeps."""

    def __init__(self, extra: Any) -> None:
        super().__init__(extra)
        self.kept: Any = None

    def state_dict(self, *args: Any, **options: Any) -> Any:
        self.kept = super().state_dict(*args, **options)
        return self.kept


def test_the_dict_that_a_module_hands_out_is_not_changed() -> None:
    live = OwnDict(1)
    store({"m": OwnDict(2)}).restore({"m": live})
    assert live.extra == 2 and live.kept["_extra_state"] == 1


def test_load_hooks_of_a_module_are_run() -> None:
    seen: list[str] = []
    model = nn.Linear(2, 2)
    stored = store({"model": model})
    model.register_load_state_dict_post_hook(lambda module, keys: seen.append("post"))
    stored.restore({"model": model})
    assert seen == ["post"]


def test_names_of_wrapped_modules_are_those_of_their_state_dict() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    names = flatten({"m": compiled, "o": torch.optim.SGD(compiled.parameters(), lr=0.1)}).names  # type: ignore[attr-defined]
    assert names == ["m._orig_mod.weight", "m._orig_mod.bias"]
    stored = store({"m": compiled})
    other = torch.compile(nn.Linear(2, 2))
    stored.restore({"m": other})
    assert same_modules(model, other._orig_mod)  # type: ignore[attr-defined]


def test_parametrized_modules_come_back() -> None:
    def make() -> nn.Module:
        return nn.utils.parametrizations.spectral_norm(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))

    saved, live = make(), make()
    saved(torch.randn(2, 3))
    store({"m": saved}).restore({"m": live})
    assert same_modules(saved, live)
    live.eval()
    saved.eval()
    assert torch.equal(live(torch.ones(1, 3)), saved(torch.ones(1, 3)))


def test_an_averaged_model_comes_back() -> None:
    model = network()
    saved = torch.optim.swa_utils.AveragedModel(model)
    saved.update_parameters(network())
    live = torch.optim.swa_utils.AveragedModel(network())
    store({"ema": saved}).restore({"ema": live})
    assert same_modules(saved, live) and int(live.n_averaged) == 1


def test_a_live_meta_module_is_refused_by_name() -> None:
    stored = store({"model": nn.Linear(2, 2)})
    with torch.device("meta"):
        live = nn.Linear(2, 2)
    with pytest.raises(StateMismatchError, match=r"'model\.weight': .*meta"):
        stored.restore({"model": live})


# Schedulers and scalers


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", list(SCHEDULERS))
def test_the_learning_rate_goes_on_as_if_nothing_had_happened(name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(network().parameters(), lr=0.3, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    def steps(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        rates = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = make()
    steps(optimizer, scheduler, 3)
    stored = store({"optim": optimizer, "sched": scheduler, "t": torch.zeros(1)})
    other, restored = make()
    stored.restore({"optim": other, "sched": restored, "t": torch.zeros(1)})
    assert steps(other, restored, 6) == steps(optimizer, scheduler, 6)


def test_a_scheduler_holding_a_function_object_is_named_when_it_cannot_be_stored() -> None:
    class Schedule:
        def __init__(self) -> None:
            self.inner = object()

        def __call__(self, step: int) -> float:
            return 1.0

    scheduler = lr_scheduler.LambdaLR(torch.optim.SGD(network().parameters(), lr=1.0), Schedule())
    with pytest.raises(
        UnsupportedStateError, match=r"state\['sched'\]\.state_dict\(\)\['lr_lambdas'\]\[0\]\['inner'\]"
    ):
        flatten({"sched": scheduler})


def test_a_gradient_scaler_comes_back() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 123.0, "_growth_tracker": 7})
    stored = store({"scaler": scaler})
    live = torch.amp.GradScaler("cpu")
    stored.restore({"scaler": live})
    assert live.state_dict() == scaler.state_dict() and live.get_scale() == 123.0


# The user's own objects


class Loader:
    """A stateful data loader: position, buffered tensors, a generator of its own."""

    def __init__(self) -> None:
        self.position = 0
        self.buffer: list[torch.Tensor] = []
        self.numbers = random.Random(0)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": list(self.buffer), "numbers": self.numbers.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.buffer = state["buffer"]
        self.numbers.setstate(state["numbers"])


def test_a_stateful_loader_comes_back_and_shares_nothing_with_the_checkpoint() -> None:
    saved, live = Loader(), Loader()
    saved.position, saved.buffer = 7, [torch.arange(3), torch.ones(2, dtype=torch.bfloat16)]
    saved.numbers.gauss(0, 1)
    stored = store({"data": saved, "n": 1})
    stored.restore({"data": live, "n": 0})
    assert live.position == 7 and all(map(same_bits, live.buffer, saved.buffer))
    assert live.numbers.gauss(0, 1) == saved.numbers.gauss(0, 1)
    assert live.buffer[0].data_ptr() != stored.data[0].ctypes.data


def test_objects_are_not_asked_for_their_state_to_be_restored() -> None:
    class Shy(Loader):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError("not iterating yet")

    live = Shy()
    loader = Loader()
    loader.position = 3
    store({"data": loader}).restore({"data": live})
    assert live.position == 3


def test_an_object_is_restored_whole_or_not_at_all() -> None:
    saved, live = Loader(), Loader()
    saved.position, saved.buffer = 7, [torch.arange(3)]
    stored = store({"data": saved, "n": 1})
    with pytest.raises(StateMismatchError, match="restored as a whole"):
        match({"data": live, "n": 0}, stored.saved, names="data.buffer.*")
    stored.restore({"data": live, "n": 0}, names="data.*")
    assert live.position == 7
    stored.restore({"data": Loader(), "n": 0}, names="n")


def test_an_object_inside_the_state_of_an_object_is_refused() -> None:
    class Outer(Loader):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": [Loader()]}

    with pytest.raises(UnsupportedStateError, match=r"state\['x'\]\.state_dict\(\)\['inner'\]\[0\] is .*Loader"):
        flatten({"x": Outer(), "t": torch.zeros(1)})


# Generators


GENERATORS: dict[str, Any] = {
    "random.Random": lambda seed: random.Random(seed),
    "PCG64": lambda seed: np.random.default_rng(seed),
    "PCG64DXSM": lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)),
    "MT19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "Philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "SFC64": lambda seed: np.random.Generator(np.random.SFC64(seed)),
    "RandomState": lambda seed: np.random.RandomState(seed),
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return [*torch.randn(5, generator=generator).tolist(), *torch.rand(17, generator=generator).tolist()]
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1) for _ in range(3)] + [generator.random()]
    numbers = [float(generator.standard_normal()) for _ in range(3)]
    if isinstance(generator, np.random.Generator):
        numbers += generator.integers(0, 100, 3, dtype=np.uint32).tolist()
    return numbers


@pytest.mark.parametrize("name", list(GENERATORS))
def test_a_generator_in_the_state_is_restored_in_place(name: str) -> None:
    saved, live = GENERATORS[name](1), GENERATORS[name](2)
    draw(saved)
    state = {"rng": [live, 0], "t": torch.zeros(1)}
    stored = store({"rng": [saved, 1], "t": torch.zeros(1)})
    expected = draw(saved)
    stored.restore(state)
    assert state["rng"][0] is live and draw(live) == expected


def test_a_generator_of_another_kind_is_a_difference() -> None:
    stored = store({"g": np.random.default_rng(0)})
    with pytest.raises(StateMismatchError, match="expected the state of a MT19937 generator, found that of a PCG64"):
        stored.restore({"g": GENERATORS["MT19937"](0)})
    with pytest.raises(StateMismatchError, match=r"'g': a random\.Random cannot be restored: found a numpy"):
        stored.restore({"g": random.Random(0)})


def test_a_generator_of_the_system_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="SystemRandom"):
        flatten({"g": random.SystemRandom()})


def global_draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.randn()), np.random.rand(), *torch.randn(3).tolist()]


def test_the_global_generators_go_on_where_they_were() -> None:
    global_draws()
    random.gauss(0, 1)
    np.random.randn()
    stored = store({"t": torch.zeros(1)})
    expected = global_draws()
    global_draws()
    stored.restore({"t": torch.zeros(1)})
    assert global_draws() == expected
    stored.restore({"t": torch.zeros(1)}, rng=False)
    assert global_draws() != expected


def test_without_rng_nothing_of_the_generators_is_stored() -> None:
    stored = store({"t": torch.zeros(1)}, rng=False)
    assert stored.saved.values == []
    before = torch.get_rng_state()
    stored.restore({"t": torch.zeros(1)})
    assert torch.equal(before, torch.get_rng_state())


class Consumes(Loader):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        global_draws()


def test_global_generators_are_restored_after_everything_else() -> None:
    stored = store({"data": Loader()})
    expected = global_draws()
    stored.restore({"data": Consumes()})
    assert global_draws() == expected
