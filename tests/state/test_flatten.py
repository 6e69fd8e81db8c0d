"""The walk over a state: names, layout, refusals and the quick second time."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.state.fake_store import store

from stepwell.errors import DamagedError, UnsupportedStateError
from stepwell.state import RESERVED_NAMES, Saved, flatten


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), float(value))


def test_names_are_dotted_paths_in_order() -> None:
    state = {"model": {"layers": [tensor(), {"weight": tensor()}], 3: tensor()}, "x": Pair(tensor(), 1), None: tensor()}
    assert flatten(state).names == ["model.layers.0", "model.layers.1.weight", "model.3", "x.0", "None"]


def test_a_subtree_without_tensors_is_one_value() -> None:
    state = {"hist": [1, 2, {"a": 1}], "t": tensor(), "cfg": {"lr": 1, "deep": {"x": (1, 2)}}, "n": 3}
    flat = flatten(state, rng=False)
    assert flat.values == [[1, 2, {"a": 1}], {"lr": 1, "deep": {"x": (1, 2)}}, 3]
    assert flat.values[0] is state["hist"]


def test_growing_values_do_not_change_the_layout() -> None:
    state: dict[str, Any] = {"hist": [], "t": tensor(), "seen": {}}
    first = flatten(state)
    state["hist"].append(1.0)
    state["seen"]["x"] = {1, 2}
    second = flatten(state, previous=first)
    assert second.skeleton is first.skeleton and second.specs is first.specs and second.names is first.names
    assert second.values[0] == [1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(t=torch.zeros(3)),
        lambda s: s.update(t=torch.zeros(2, dtype=torch.float64)),
        lambda s: s.update(t=torch.zeros(2, device="cpu").numpy()),
        lambda s: s.update(new=tensor()),
        lambda s: s.pop("t"),
        lambda s: s.update(n=tensor()),
        lambda s: s.update(inner=[tensor(), 1]),
        lambda s: s.update(inner=OrderedDict(a=tensor())),
        lambda s: s.update(d={True: tensor()}),
        lambda s: s.update(d={1.0: tensor()}),
        lambda s: s.update(q=deque([tensor()], maxlen=4)),
        lambda s: s.update(a=np.zeros(3)),
    ],
)
def test_a_changed_layout_is_seen(change: Any) -> None:
    state: dict[str, Any] = {
        "t": tensor(),
        "n": 1,
        "inner": (tensor(), 1),
        "d": {1: tensor()},
        "q": deque([tensor()], maxlen=3),
        "a": np.zeros(2),
    }
    first = flatten(state)
    assert flatten(dict(state), previous=first).skeleton is first.skeleton
    change(state)
    second = flatten(state, previous=first)
    assert second.skeleton is not first.skeleton and second.specs is not first.specs
    fresh = flatten(state)
    assert (second.names, second.specs, second.skeleton) == (fresh.names, fresh.specs, fresh.skeleton)
    assert (second.skeleton, second.specs) != (first.skeleton, first.specs)


def test_a_changed_tie_is_seen_in_the_aliases_alone() -> None:
    tied = tensor()
    first = flatten({"a": tied, "b": tied})
    same = flatten({"a": tied, "b": tied}, previous=first)
    apart = flatten({"a": tied, "b": tensor()}, previous=first)
    assert same.alias_of is first.alias_of
    assert apart.specs is first.specs and apart.alias_of == [-1, -1] and first.alias_of == [-1, 0]


def test_the_kept_layout_holds_no_tensors() -> None:
    first = flatten({"a": tensor(), "n": [1]})
    kept = first.layout_only()
    assert kept.tensors == [] and kept.values == [] and kept.owners == []
    second = flatten({"a": tensor(), "n": [1]}, previous=kept)
    assert second.skeleton is first.skeleton and len(second.tensors) == 1


def test_equal_layouts_have_equal_skeletons_and_no_addresses_in_them() -> None:
    state = {"a": [tensor(), {"b": tensor(), 2: 1}]}
    assert flatten(state).skeleton == flatten({"a": [tensor(5), {"b": tensor(), 2: 7}]}).skeleton


def test_names_that_collide_are_told_apart() -> None:
    state = {"a": {"b": tensor(1), 0: tensor(2), "0": tensor(3)}, "a.b": tensor(4), "a.b~1": tensor(5)}
    stored = store(state)
    assert stored.flat.names == ["a.b", "a.0", "a.0~1", "a.b~2", "a.b~1"]
    live = {"a": {"b": tensor(), 0: tensor(), "0": tensor()}, "a.b": tensor(), "a.b~1": tensor()}
    stored.restore(live)
    assert [live["a"]["b"][0], live["a"][0][0], live["a"]["0"][0], live["a.b"][0], live["a.b~1"][0]] == [1, 2, 3, 4, 5]


def test_reserved_and_unwritable_names_are_never_given() -> None:
    state = {name: tensor() for name in RESERVED_NAMES} | {"\ud800": tensor()}
    names = flatten(state).names
    assert not set(names) & RESERVED_NAMES and len(set(names)) == len(state)
    assert all(name.encode() for name in names)
    assert flatten(tensor()).names == ["~1"]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"a": [0, 0, 0, lambda: 0]}, r"state\['a'\]\[3\]"),
        ({"a": (tensor(), {"k": object()})}, r"state\['a'\]\[1\]\['k'\]"),
        ({"a": {1: {2, 3}, 2: {object()}}}, r"state\['a'\]\[2\]"),
        ([deque([tensor(), iter(())])], r"state\[0\]\[1\]"),
        ({"t": tensor(), object(): 1}, r"state has the key"),
        ({"x": torch.nn.Linear}, r"state\['x'\]"),
    ],
)
def test_what_cannot_be_stored_is_named_by_its_path(state: Any, where: str) -> None:
    with pytest.raises(UnsupportedStateError, match=where):
        flatten(state)


class Opaque:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def state_dict(self) -> Any:
        return {"inner": self.inner}

    def load_state_dict(self, state: Any) -> None:
        self.inner = state["inner"]


def test_the_path_leads_through_objects() -> None:
    with pytest.raises(UnsupportedStateError, match=r"state\['x'\]\.state_dict\(\)\['inner'\]\[0\]"):
        flatten({"x": Opaque([object()])})


def test_cycles_are_errors_with_a_path() -> None:
    state: dict[str, Any] = {"a": [1]}
    state["a"].append({"up": state["a"]})
    with pytest.raises(UnsupportedStateError, match=r"state\['a'\]\[1\]\['up'\] contains itself"):
        flatten(state)
    looped: dict[str, Any] = {"t": tensor()}
    looped["self"] = (looped,)
    with pytest.raises(UnsupportedStateError, match=r"state\['self'\]\[0\] contains itself"):
        flatten(looped)


def test_the_same_container_twice_is_no_cycle() -> None:
    shared = [tensor(), 1]
    flat = flatten({"a": shared, "b": [shared, shared]})
    assert flat.alias_of == [-1, 0, 0]


def test_deep_nesting_is_a_clear_error() -> None:
    state: Any = tensor()
    for _ in range(3000):
        state = [state]
    with pytest.raises(UnsupportedStateError, match="nested deeper than 100 levels"):
        flatten(state)


def test_nesting_up_to_the_limit_comes_back() -> None:
    for leaf in (tensor(3), 3):
        state: Any = leaf
        for level in range(98):
            state = (state,) if level % 2 else {"k": state}
        stored = store({"s": state})
        loaded = stored.load()["s"]
        for level in reversed(range(98)):
            loaded = loaded[0] if level % 2 else loaded["k"]
        assert (loaded == leaf).all() if isinstance(leaf, torch.Tensor) else loaded == leaf


def test_every_kind_of_container_is_rebuilt_as_it_was() -> None:
    state = {
        "od": OrderedDict([("z", tensor(1)), ("a", 1)]),
        "dd": defaultdict(list, {"k": tensor(2)}),
        "dq": deque([tensor(3), None], maxlen=7),
        "nt": Pair(tensor(4), {"x": 1}),
        "tp": (tensor(5), [], ()),
        "ls": [tensor(6), Counter("aab")],
        "keys": {(1, None): tensor(7), 2.5: tensor(8), b"b": tensor(9), False: tensor(10)},
        "np": np.float32(3),
    }
    loaded = store(state).load()
    assert list(loaded) == list(state)
    assert type(loaded["od"]) is OrderedDict and list(loaded["od"]) == ["z", "a"]
    assert type(loaded["dd"]) is defaultdict and loaded["dd"].default_factory is list
    assert type(loaded["dq"]) is deque and loaded["dq"].maxlen == 7 and loaded["dq"][1] is None
    assert type(loaded["nt"]) is Pair and loaded["nt"].right == {"x": 1}
    assert type(loaded["tp"]) is tuple and loaded["tp"][1:] == ([], ())
    assert type(loaded["ls"][1]) is Counter and loaded["ls"][1]["a"] == 2
    assert list(loaded["keys"]) == [(1, None), 2.5, b"b", False] and type(list(loaded["keys"])[3]) is bool
    assert type(loaded["np"]) is np.float32
    values = [loaded["od"]["z"], loaded["dd"]["k"], loaded["dq"][0], loaded["nt"][0], loaded["tp"][0], loaded["ls"][0]]
    assert [int(value[0]) for value in [*values, *loaded["keys"].values()]] == list(range(1, 11))


def test_load_gives_only_the_names_asked_for() -> None:
    state = {"model": {"w": tensor(1), "b": tensor(2)}, "ema": {"w": tensor(3)}, "pair": (tensor(4), tensor(5)), "n": 1}
    stored = store(state)
    asked: list[int] = []

    def get(index: int) -> int:
        asked.append(index)
        return index

    from stepwell.state import rebuild

    assert rebuild(stored.saved, get, names="model.*") == {"model": {"w": 0, "b": 1}}
    assert asked == [0, 1]
    assert rebuild(stored.saved, get, names=["*.w", "n"]) == {"model": {"w": 0}, "ema": {"w": 2}, "n": 1}
    assert rebuild(stored.saved, get, names="pair.1") == {"pair": (None, 4)}
    assert rebuild(stored.saved, get, names="nothing") == {}


def test_parameters_and_their_state_know_their_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    extra = torch.nn.Parameter(tensor())
    first = torch.optim.SGD([*model[0].parameters(), extra], lr=0.1, momentum=0.9)
    second = torch.optim.SGD([*model[2].parameters(), extra], lr=0.1)
    (model(torch.randn(4, 2)).sum() + extra.sum()).backward()
    first.step()
    flat = flatten({"first": first, "model": model, "second": second, "extra": extra, "w": model[0].weight})
    owners = dict(zip(flat.names, flat.owners, strict=True))
    assert owners["model.0.weight"] == ("param", first) and owners["model.2.bias"] == ("param", second)
    assert owners["model.1.weight"] is None and owners["model.1.running_mean"] is None
    assert owners["extra"] is None, "two optimizers hold it"
    assert owners["w"] == ("param", first)
    assert owners["first.state.model.0.weight.momentum_buffer"] == ("optim", first)


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_damaged_skeleton_is_an_error(cut: int) -> None:
    saved = store({"a": [tensor(), 1], "b": {"c": tensor()}}).saved
    for bad in (
        Saved(saved.names, saved.specs, saved.alias_of, saved.skeleton[: len(saved.skeleton) - 1 - cut], saved.values),
        Saved(saved.names[:1], saved.specs, saved.alias_of, saved.skeleton, saved.values),
        Saved(saved.names, saved.specs, saved.alias_of, saved.skeleton, saved.values[:-1]),
    ):
        with pytest.raises(DamagedError):
            bad.tree()


def test_a_skeleton_with_a_changed_byte_is_a_tree_or_an_error() -> None:
    model = torch.nn.Linear(1, 1)
    state = {"m": model, "o": torch.optim.Adam(model.parameters()), "q": deque([tensor()], 2), "p": Pair(tensor(), 1)}
    saved = store(state).saved
    numbers = np.random.default_rng(0)
    broken = 0
    for _ in range(400):
        data = bytearray(saved.skeleton)
        data[numbers.integers(len(data))] = numbers.integers(256)
        try:
            Saved(saved.names, saved.specs, saved.alias_of, bytes(data), saved.values).tree()
        except DamagedError:
            broken += 1
    assert broken > 100


def test_the_state_is_not_changed_by_flattening() -> None:
    state = {"t": tensor(1), "d": defaultdict(list), "l": [1, {"x": tensor()}]}
    flatten(state)
    assert list(state) == ["t", "d", "l"] and len(state["d"]) == 0
