"""Putting a saved state back in place: what is updated, what is an error, and what loosens it."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.state.fake_store import same_bits, store

from stepwell.errors import DamagedError, StateClobbered, StateMismatchError, UnsupportedStateError
from stepwell.state import Saved, encode_values, match, matches


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor(value: float = 0.0) -> torch.Tensor:
    return torch.full((2,), float(value))


def test_values_and_tensors_go_back_into_the_containers_of_the_state() -> None:
    saved = {"epoch": 3, "t": tensor(1), "list": [tensor(2), "b", {"x": 1.5}], "pair": Pair(tensor(3), 7), "none": None}
    live = {"epoch": 0, "t": tensor(), "list": [tensor(), "a", {"x": 0.0}], "pair": Pair(tensor(), 0), "none": 1}
    tensors = [live["t"], live["list"][0], live["pair"].left]
    containers = [live["list"], live["list"][2]]
    store(saved).restore(live)
    assert live["epoch"] == 3 and live["none"] is None
    assert live["list"] is containers[0] and live["list"][1] == "b"
    assert live["list"][2] is containers[1] and live["list"][2] == {"x": 1.5}
    assert type(live["pair"]) is Pair and live["pair"].right == 7
    now = [live["t"], live["list"][0], live["pair"].left]
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    assert [float(t[0]) for t in tensors] == [1, 2, 3]


def test_containers_of_values_are_refilled_so_that_other_references_see_it() -> None:
    history, seen, config, queue, raw = [1, 2, 3], {1}, {"a": {"b": [1]}, "old": 0}, deque([1]), bytearray(b"x")
    inner = config["a"]
    live = {"h": history, "s": seen, "c": config, "q": queue, "r": raw, "n": Counter("a"), "t": tensor()}
    counter = live["n"]
    saved = {
        "h": [9],
        "s": {5, 6},
        "c": {"new": 1, "a": {"b": [2, 3]}},
        "q": deque([7, 8]),
        "r": bytearray(b"yz"),
        "n": Counter("bb"),
        "t": tensor(1),
    }
    store(saved).restore(live)
    assert history == [9] and seen == {5, 6} and queue == deque([7, 8]) and raw == b"yz" and counter == Counter("bb")
    assert config == saved["c"] and list(config) == ["new", "a"] and config["a"] is inner


def test_a_container_of_another_type_is_replaced() -> None:
    live: dict[str, Any] = {"a": [1], "b": {"x": 1}, "c": deque([1], maxlen=2), "d": (1,), "t": tensor()}
    old = dict(live)
    saved = {"a": (2,), "b": OrderedDict(x=2), "c": deque([1, 2, 3], maxlen=3), "d": [1], "t": tensor()}
    store(saved).restore(live)
    for key in "abcd":
        assert live[key] == saved[key] and type(live[key]) is type(saved[key]) and live[key] is not old[key]
    assert live["c"].maxlen == 3 and old["c"].maxlen == 2


def test_one_live_container_in_two_places_does_not_mix_their_contents() -> None:
    shared: list[int] = [0]
    live = {"a": shared, "b": shared, "c": {"x": shared}, "t": tensor()}
    store({"a": [1], "b": [2], "c": {"x": [1]}, "t": tensor()}).restore(live)
    assert (live["a"], live["b"], live["c"]) == ([1], [2], {"x": [1]})
    assert live["a"] is shared and live["c"]["x"] is shared


def test_keys_are_told_apart_by_type() -> None:
    saved = {1: tensor(1), "1": tensor(2), (1, 2): tensor(3), None: 4}
    live = {"1": tensor(), (1, 2): tensor(), None: 0, 1: tensor()}
    store(saved).restore(live)
    assert [float(live[key][0]) for key in (1, "1", (1, 2))] == [1, 2, 3] and live[None] == 4
    with pytest.raises(StateMismatchError):
        store({True: tensor()}).restore({1: tensor()})


@pytest.mark.parametrize(
    "empty", [None, {}, OrderedDict(), defaultdict(int)], ids=["None", "dict", "OrderedDict", "defaultdict"]
)
def test_none_and_empty_dicts_take_whatever_was_saved(empty: Any) -> None:
    saved = {"ema": {"w": torch.arange(3, dtype=torch.bfloat16), "n": [1, {"deep": np.arange(2)}]}, "t": tensor()}
    live = {"ema": empty, "t": tensor()}
    store(saved).restore(live)
    assert torch.equal(live["ema"]["w"], saved["ema"]["w"])
    assert (live["ema"]["n"][1]["deep"] == [0, 1]).all()
    assert list(live["ema"]) == ["w", "n"]
    if empty is not None:
        assert live["ema"] is empty


def test_an_empty_list_takes_whatever_was_saved() -> None:
    live: dict[str, Any] = {"queue": [], "t": tensor()}
    queue = live["queue"]
    store({"queue": [tensor(1), (tensor(2), 3)], "t": tensor()}).restore(live)
    assert live["queue"] is queue and float(queue[0][0]) == 1 and float(queue[1][0][0]) == 2 and queue[1][1] == 3


def test_an_empty_state_takes_everything() -> None:
    live: dict[str, Any] = {}
    store({"a": tensor(1), "n": 3}).restore(live)
    assert float(live["a"][0]) == 1 and live["n"] == 3


def test_none_inside_a_container_of_values_takes_a_tensor() -> None:
    live: dict[str, Any] = {"best": {"weights": None, "loss": 0.0}, "t": tensor()}
    best = live["best"]
    store({"best": {"weights": tensor(4), "loss": 0.5}, "t": tensor()}).restore(live)
    assert live["best"] is best and float(best["weights"][0]) == 4 and best["loss"] == 0.5


def test_a_saved_none_replaces_a_live_tensor() -> None:
    live: dict[str, Any] = {"best": tensor(1), "t": tensor(), "group": {"a": tensor(), "b": 1}}
    store({"best": None, "t": tensor(2), "group": {"a": None, "b": 2}}).restore(live)
    assert live["best"] is None and live["group"] == {"a": None, "b": 2} and float(live["t"][0]) == 2


def test_all_differences_are_listed_at_once_and_nothing_is_changed() -> None:
    saved = {
        "shape": torch.zeros(2, 3),
        "dtype": torch.zeros(2, dtype=torch.float16),
        "gone": tensor(),
        "extra": {"x": tensor(), "n": 1},
        "value": 3,
        "kept": tensor(5),
        "list": [tensor(), tensor()],
    }
    live = {
        "shape": torch.zeros(3, 2),
        "dtype": torch.zeros(2),
        "value": tensor(),
        "kept": tensor(),
        "list": [tensor(), 1],
        "needed": {"y": torch.zeros(4, dtype=torch.int8), "z": 2},
    }
    with pytest.raises(StateMismatchError) as caught:
        store(saved).restore(live)
    text = str(caught.value)
    for line in (
        "differ in 9 places; nothing was changed",
        "'shape': expected float32[3, 2], found float32[2, 3] in the checkpoint",
        "'dtype': expected float32[2], found float16[2] in the checkpoint",
        "'gone': unexpected, the checkpoint has float32[2] that the state has no place for",
        "'extra.x': unexpected, the checkpoint has float32[2]",
        "'extra.n': unexpected, the checkpoint has an int",
        "'value': expected float32[2], found an int in the checkpoint",
        "'list.1': expected an int, found float32[2] in the checkpoint",
        "'needed.y': missing in the checkpoint, expected int8[4]",
        "'needed.z': missing in the checkpoint, expected an int",
    ):
        assert line in text, line
    assert float(live["kept"][0]) == 0 and live["value"] is not None


def test_a_long_list_of_differences_is_cut_and_counted() -> None:
    stored = store({f"t{i}": tensor() for i in range(50)})
    with pytest.raises(StateMismatchError, match=r"differ in 50 places(.|\n)*and 30 more") as caught:
        stored.restore({f"t{i}": torch.zeros(3) for i in range(50)})
    assert str(caught.value).count("expected float32[3]") == 20


def test_missing_and_unexpected_names_are_passed_over_without_strict() -> None:
    live = {"a": tensor(), "only_live": tensor(3), "list": [tensor(), tensor(4)], "n": 1}
    saved = {"a": tensor(1), "only_saved": tensor(2), "list": [tensor(2)], "m": 2}
    plan = store(saved).restore(live, strict=False)
    assert [float(t[0]) for t in (live["a"], live["only_live"], *live["list"])] == [1, 3, 2, 4]
    assert live["n"] == 1 and set(live) == {"a", "only_live", "list", "n"}
    assert [text.split(":")[0] for text in plan.skipped] == ["'only_saved'", "'list.1'", "'m'", "'only_live'", "'n'"]


def test_shapes_must_agree_without_strict_too() -> None:
    with pytest.raises(StateMismatchError, match=r"expected float32\[3\], found float32\[2\]"):
        store({"a": tensor()}).restore({"a": torch.zeros(3)}, strict=False)


def test_names_restrict_tensors_and_values() -> None:
    saved = {"model": {"w": tensor(1), "b": tensor(2), "n": 3}, "epoch": 5, "other": tensor(9), "gone": 1}
    live = {"model": {"w": tensor(), "b": tensor(), "n": 0}, "epoch": 0, "other": torch.zeros(7), "new": tensor()}
    stored = store(saved)
    stored.restore(live, names="model.*")
    assert [float(live["model"][key][0]) for key in "wb"] == [1, 2] and live["model"]["n"] == 3
    assert live["epoch"] == 0 and live["other"].shape == (7,)
    live = {"model": {"w": tensor(), "b": tensor(), "n": 0}, "epoch": 0}
    stored.restore(live, names=["*.b", "epoch"])
    assert [float(live["model"][key][0]) for key in "wb"] == [0, 2] and live["model"]["n"] == 0 and live["epoch"] == 5
    with pytest.raises(StateMismatchError, match=r"'model\.x': missing"):
        stored.restore({"model": {"x": tensor()}}, names="model.x")


def test_names_do_not_restore_generators_that_were_not_asked_for() -> None:
    stored = store({"t": tensor()})
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state()
    stored.restore({"t": tensor()}, names="t")
    assert torch.equal(torch.get_rng_state(), before)
    stored.restore({"t": tensor()}, names=["t", "__rng__"])
    assert not torch.equal(torch.get_rng_state(), before)


def test_patterns_are_those_of_fnmatch() -> None:
    assert matches("model.layers.0.weight", "model.*") and matches("model.w", ["x", "*.w"])
    assert not matches("Model.w", "model.*") and not matches("model", "model.*") and not matches("a", [])


def test_a_dict_may_change_its_kind_and_its_order() -> None:
    live = OrderedDict([("b", tensor()), ("a", tensor())])
    store({"s": {"a": tensor(1), "b": tensor(2)}}).restore({"s": live})
    assert list(live) == ["b", "a"] and float(live["a"][0]) == 1 and float(live["b"][0]) == 2


def test_a_tuple_at_the_top_cannot_take_values() -> None:
    stored = store((tensor(1), 3))
    with pytest.raises(StateMismatchError, match="cannot be updated in place"):
        stored.restore((tensor(), 0))
    live = (tensor(),)
    store((tensor(1),)).restore(live)
    assert float(live[0][0]) == 1


def test_matching_changes_nothing() -> None:
    stored = store({"t": tensor(1), "n": 5, "l": [1], "none": tensor(2)})
    live: dict[str, Any] = {"t": tensor(), "n": 0, "l": [0], "none": None}
    before = encode_values([live["n"], live["l"], live["none"]])
    plan = match(live, stored.saved)
    assert encode_values([live["n"], live["l"], live["none"]]) == before and not live["t"].any()
    assert len(plan.copies) == 2 and all(copy.address for copy in plan.copies)


def test_a_checkpoint_is_restored_twice_from_the_same_bytes() -> None:
    stored = store({"t": tensor(1), "l": [1, [2]]})
    for _ in range(2):
        live = {"t": tensor(), "l": []}
        stored.restore(live)
        assert live["l"] == [1, [2]] and float(live["t"][0]) == 1


class Stubborn:
    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("y")


def test_an_object_that_refuses_its_state_is_named() -> None:
    with pytest.raises(StateClobbered, match="restoring 'obj' failed"):
        store({"obj": Stubborn(), "t": tensor()}).restore({"obj": Stubborn(), "t": tensor()})


def test_an_object_cannot_take_the_place_of_a_value() -> None:
    with pytest.raises(StateMismatchError, match=r"'obj': expected an object \(.*Stubborn\), found a dict"):
        store({"obj": {"x": 1}, "t": tensor()}).restore({"obj": Stubborn(), "t": tensor()})
    live: dict[str, Any] = {"obj": None, "t": tensor()}
    store({"obj": Stubborn(), "t": tensor()}).restore(live)
    assert live["obj"] == {"x": 1}


def test_an_empty_tuple_at_the_top_is_itself() -> None:
    store(()).restore(())
    store({}).restore({})


def test_a_live_tensor_without_plain_memory_is_refused_by_name() -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.strided)
    for bad in (nested, torch.eye(2).to_sparse(), torch.zeros(2, device="meta")):
        with pytest.raises((StateMismatchError, UnsupportedStateError), match="'bad'"):
            store({"bad": tensor()}).restore({"bad": bad})


def test_ties_that_make_no_sense_are_damage() -> None:
    saved = store({"a": tensor(), "b": torch.zeros(3)}).saved
    for alias_of in ([-1], [-1, 0], [0, -1], [-1, 1], [1, -1], [-1, -2]):
        with pytest.raises(DamagedError):
            match({}, Saved(saved.names, saved.specs, alias_of, saved.skeleton, saved.values))


def test_a_tie_between_torch_and_numpy_is_not_made() -> None:
    tied = tensor(3)
    live: dict[str, Any] = {"a": np.zeros(2, np.float32), "b": None}
    store({"a": tied, "b": tied}).restore(live)
    assert isinstance(live["b"], torch.Tensor) and live["b"].tolist() == [3, 3] == live["a"].tolist()


leaves = st.one_of(
    st.integers(),
    st.floats(allow_nan=False),
    st.none(),
    st.text(max_size=3),
    st.lists(st.integers(), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).flatmap(
        lambda dtype: st.lists(st.integers(0, 3), max_size=3).map(
            lambda shape: (torch.arange(int(np.prod(shape))) % 2).to(dtype).reshape(shape)
        )
    ),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: np.ones(shape, np.int16)),
)
nestings = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
        | st.dictionaries(st.text("ab.~", max_size=2) | st.integers(0, 2) | st.none(), inner, max_size=3)
        | st.dictionaries(st.text(max_size=1), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def blank(item: Any) -> Any:
    """The same nesting with other numbers in it."""
    if isinstance(item, torch.Tensor):
        return torch.ones_like(item).logical_not().to(item.dtype) if item.dtype == torch.bool else item * 0 + 3
    if isinstance(item, np.ndarray):
        return np.zeros_like(item)
    if isinstance(item, Pair):
        return Pair(blank(item.left), blank(item.right))
    if isinstance(item, dict):
        return type(item)((key, blank(value)) for key, value in item.items())
    if isinstance(item, deque):
        return deque(map(blank, item), item.maxlen)
    if isinstance(item, (list, tuple)):
        return type(item)(map(blank, item))
    return "another value"


def identical(a: Any, b: Any) -> bool:
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(identical(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(identical, a, b))
    return bool(a == b)


@settings(max_examples=200, deadline=None)
@given(nestings)
def test_any_nesting_comes_back_in_place_and_as_a_new_one(inner: Any) -> None:
    state = {"state": inner, "anchor": tensor(1)}
    live = blank(state)
    live["anchor"] = tensor()
    stored = store(state, rng=False)
    names = stored.flat.names
    assert len(set(names)) == len(names)
    stored.restore(live)
    assert identical(live, state)
    assert identical(stored.load(), state)
    again = store(live, rng=False)
    assert again.saved.skeleton == stored.saved.skeleton and again.saved.specs == stored.saved.specs


def test_a_finished_plan_lets_go_of_the_state() -> None:
    live: dict[str, Any] = {"t": tensor(), "new": None, "n": 0}
    plan = store({"t": tensor(1), "new": tensor(2), "n": 1}).restore(live)
    made = weakref.ref(live.pop("new"))
    live["n"] = 5
    plan.finish()
    assert made() is None and live["n"] == 5
