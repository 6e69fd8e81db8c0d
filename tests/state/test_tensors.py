"""Every kind of tensor goes out and comes back bit for bit, or is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.state.fake_store import bytes_of, same_bits, store

from stepwell.errors import StateMismatchError, UnsupportedStateError, UsageError
from stepwell.state import ITEM_BYTES, TensorSpec, address_of, flatten, from_bytes

TORCH_DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]
NUMPY_DTYPES = [name for name in ITEM_BYTES if hasattr(np, name) or name == "bool"]


def random_torch(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """A tensor of random bits (of 0 and 1 for bool, whose other bits mean nothing)."""
    count = int(np.prod(shape)) * ITEM_BYTES[dtype]
    high = 2 if dtype == "bool" else 256
    bits = np.random.default_rng(seed).integers(0, high, max(count, 1), dtype=np.uint8)[:count]
    if count == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(bits).view(getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_a_torch_tensor_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    saved = random_torch(dtype, shape)
    stored = store({"t": saved})
    spec = stored.saved.specs[0]
    assert spec == TensorSpec(dtype, shape, saved.numel() * ITEM_BYTES[dtype], "torch", "cpu")
    live = random_torch(dtype, shape, seed=1)
    stored.restore({"t": live})
    assert same_bits(live, saved)
    assert same_bits(stored.load()["t"], saved)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_a_numpy_array_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...]) -> None:
    saved = random_torch(dtype, shape).numpy().copy()
    stored = store({"t": saved})
    assert stored.saved.specs[0] == TensorSpec(dtype, shape, saved.nbytes, "numpy", "cpu")
    live = np.zeros_like(saved)
    stored.restore({"t": live})
    assert same_bits(live, saved)
    assert same_bits(stored.load()["t"], saved)


def test_every_dtype_that_torch_can_store_is_known() -> None:
    unknown = []
    for name in sorted(dir(torch)):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype) and str(dtype).removeprefix("torch.") not in ITEM_BYTES:
            unknown.append(name)
    # Quantized types, bit types without arithmetic and sub-byte integers without memory of their own.
    assert all(name.startswith(("q", "bit", "int", "uint")) for name in unknown), unknown


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8"), ("float8_e8m0fnu", "uint8"), ("complex32", "uint32")],
)
def test_dtypes_that_numpy_lacks_come_as_their_bits(dtype: str, bits: str) -> None:
    tensor = random_torch(dtype, (4,))
    array = store({"t": tensor}).load(as_numpy=True)["t"]
    assert array.dtype == bits and array.tobytes() == bytes_of(tensor).tobytes()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, 1],
        lambda t: t[::2, 1:3],
        lambda t: t.unsqueeze(0).transpose(0, 2),
        lambda t: t.as_strided((2, 2), (1, 4)),
        lambda t: t[1:2].expand(1, 4),
    ],
    ids=["transposed", "column", "steps", "transposed-3d", "as-strided", "expanded-by-one"],
)
def test_a_view_that_is_not_contiguous_is_read_and_filled_element_by_element(view: Any) -> None:
    base = torch.arange(16.0).reshape(4, 4)
    stored = store({"t": view(base)})
    target = torch.full((4, 4), -1.0)
    stored.restore({"t": view(target)})
    assert same_bits(view(target).contiguous(), view(base).contiguous())
    untouched = torch.full((4, 4), -1.0)
    view(untouched).copy_(view(base))
    assert torch.equal(target, untouched)


def test_case_17_a_view_stores_only_its_own_elements() -> None:
    big = torch.zeros(1000, 100)
    stored = store({"row": big[0], "column": big[:, 3], "few": big[5:7, ::10]})
    assert stored.stored_bytes == 4 * (100 + 1000 + 20)


def test_case_17_tied_tensors_are_stored_once_and_stay_tied() -> None:
    tied = torch.arange(4.0)
    stored = store({"a": tied, "b": [tied, tied.view(4)], "c": tied.view(2, 2), "d": tied.clone()})
    assert stored.saved.alias_of == [-1, 0, 0, -1, -1]
    assert stored.stored_bytes == 3 * 16
    loaded = stored.load()
    assert loaded["a"] is loaded["b"][0] is loaded["b"][1] and loaded["a"] is not loaded["c"]
    live = torch.zeros(4)
    plan = stored.restore({"a": live, "b": [live, live.view(4)], "c": live.view(2, 2), "d": torch.zeros(4)})
    assert torch.equal(live, tied)
    assert [copy.index for copy in plan.copies] == [0, 3, 4]


def test_tied_tensors_restored_into_separate_ones_fill_both() -> None:
    tied = torch.arange(4.0)
    stored = store({"a": tied, "b": tied})
    live = {"a": torch.zeros(4), "b": torch.zeros(4)}
    stored.restore(live)
    assert torch.equal(live["a"], tied) and torch.equal(live["b"], tied)


def test_separate_tensors_are_not_restored_into_tied_ones() -> None:
    stored = store({"a": torch.zeros(4), "b": torch.ones(4)})
    live = torch.full((4,), 7.0)
    with pytest.raises(StateMismatchError, match="'b': shares its memory with 'a', but the two were saved apart"):
        stored.restore({"a": live, "b": live})
    assert torch.equal(live, torch.full((4,), 7.0))


def test_tied_tensors_are_tied_again_where_they_are_made_anew() -> None:
    tied = torch.arange(4.0)
    stored = store({"a": tied, "copies": {"b": tied, "c": tied}})
    live: dict[str, Any] = {"a": torch.zeros(4), "copies": None}
    stored.restore(live)
    assert live["copies"]["b"] is live["copies"]["c"]
    assert live["copies"]["b"].data_ptr() == live["a"].data_ptr()
    assert torch.equal(live["a"], tied)


def test_tensors_without_elements_never_alias() -> None:
    empty = torch.empty(0)
    assert store({"a": empty, "b": empty, "c": torch.empty(0)}).saved.alias_of == [-1, -1, -1]


def test_conjugated_and_negated_views_are_stored_as_they_read() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": base.conj(), "neg": base.conj().imag, "plain": base}
    assert state["neg"].is_neg()
    stored = store(state)
    assert stored.saved.alias_of == [-1, -1, -1]
    assert all(address_of(tensor) for tensor in stored.flat.tensors), "bytes can be copied as they are"
    target = torch.zeros(2, dtype=torch.complex64)
    live = {"conj": torch.zeros(2, dtype=torch.complex64).conj(), "neg": target.conj().imag, "plain": base.clone()}
    stored.restore(live)
    assert torch.equal(live["conj"], base.conj()) and torch.equal(live["neg"], torch.tensor([-2.0, 4.0]))
    assert torch.equal(target.imag, torch.tensor([2.0, -4.0]))


def test_a_parameter_is_stored_without_autograd_and_filled_in_place() -> None:
    parameter = torch.nn.Parameter(torch.arange(3.0))
    stored = store([parameter])
    assert not stored.flat.tensors[0].requires_grad
    assert stored.flat.tensors[0].data_ptr() == parameter.data_ptr()
    live = torch.nn.Parameter(torch.zeros(3, 2)[:, 0])
    stored.restore([live])
    assert live.requires_grad and live.is_leaf and torch.equal(live, parameter)


def test_a_harmless_subclass_is_stored_as_its_numbers() -> None:
    class Harmless(torch.Tensor):
        pass

    saved = torch.arange(3.0).as_subclass(Harmless)
    stored = store({"t": saved})
    live = torch.zeros(3).as_subclass(Harmless)
    stored.restore({"t": live})
    assert type(live) is Harmless and torch.equal(live.as_subclass(torch.Tensor), torch.arange(3.0))
    assert type(stored.load()["t"]) is torch.Tensor


class WithExtra(torch.Tensor):
    pass


class WithFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def refused_tensors() -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    extra = torch.zeros(2).as_subclass(WithExtra)
    extra.scale = 3  # type: ignore[attr-defined]
    with FakeTensorMode():
        fake = torch.zeros(2)
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "meta": torch.zeros(2, device="meta"),
        "wrapper": TwoTensor(torch.zeros(2), torch.zeros(2)),
        "fake": fake,
        "lazy": torch.nn.LazyLinear(3).weight,
        "extra": extra,
        "function": torch.zeros(2).as_subclass(WithFunction),
        "mkldnn": torch.zeros(2).to_mkldnn(),
    }


REFUSED = ("sparse", "csr", "quantized", "nested", "jagged", "meta", "wrapper", "fake", "lazy", "mkldnn")
REFUSED_SUBCLASSES = ("extra", "function")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED + REFUSED_SUBCLASSES)
def test_a_tensor_with_more_than_plain_bytes_is_refused_by_name(name: str) -> None:
    bad = refused_tensors()[name]
    with pytest.raises(UnsupportedStateError, match=rf"inner(\.|'\]\[')({name})'"):
        flatten({"good": torch.zeros(2), "inner": {name: bad}})
    previous = flatten({"good": torch.zeros(2), "inner": {name: torch.zeros(2)}})
    with pytest.raises(UnsupportedStateError):
        flatten({"good": torch.zeros(2), "inner": {name: bad}}, previous=previous)


def test_an_uninitialized_module_is_refused() -> None:
    with pytest.raises(UnsupportedStateError, match="run the model once"):
        flatten({"model": torch.nn.LazyLinear(3)})


def test_case_16_another_dtype_is_an_error_unless_a_cast_is_asked_for() -> None:
    stored = store({"w": torch.tensor([1.0, 2.5, 1e-9])})
    live = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(StateMismatchError, match=r"'w': expected bfloat16\[3\], found float32\[3\] in the checkpoint"):
        stored.restore({"w": live})
    assert not live.any()
    stored.restore({"w": live}, cast=True)
    assert torch.equal(live, torch.tensor([1.0, 2.5, 1e-9]).bfloat16())


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.bool)),
        (np.zeros(2), np.zeros(2, np.int64)),
        (torch.zeros(2), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(2, dtype=torch.bfloat16), np.zeros(2, np.float32)),
    ],
)
def test_a_cast_that_loses_a_whole_kind_or_a_shape_is_still_an_error(saved: Any, live: Any) -> None:
    with pytest.raises(StateMismatchError):
        store({"w": saved}).restore({"w": live}, cast=True)


def test_a_cast_between_numpy_arrays() -> None:
    live = np.zeros((2, 2), np.float32, order="F")
    store({"w": np.array([[1.5, 2], [3, 4]])}).restore({"w": live}, cast=True)
    assert (live == [[1.5, 2], [3, 4]]).all()


def test_torch_and_numpy_take_each_others_bytes() -> None:
    live: dict[str, Any] = {"a": np.zeros(3, np.float32), "b": torch.zeros(3, dtype=torch.int64)}
    store({"a": torch.arange(3.0), "b": np.arange(3)}).restore(live)
    assert (live["a"] == [0, 1, 2]).all() and torch.equal(live["b"], torch.arange(3))


def test_arrays_in_other_memory_orders_are_filled_element_by_element() -> None:
    saved = np.arange(6.0).reshape(2, 3)
    fortran, strided = np.zeros((2, 3), order="F"), np.zeros((4, 6))
    store({"a": saved, "b": np.asfortranarray(saved)}).restore({"a": fortran, "b": strided[::2, ::2]})
    assert (fortran == saved).all() and (strided[::2, ::2] == saved).all() and strided.sum() == saved.sum()


def test_a_read_only_array_is_replaced_in_its_container() -> None:
    live = np.zeros(3)
    live.flags.writeable = False
    state = {"a": live, "b": [live]}
    store({"a": np.ones(3), "b": [np.full(3, 2.0)]}).restore(state)
    assert state["a"].tolist() == [1, 1, 1] and state["b"][0].tolist() == [2, 2, 2] and live.tolist() == [0, 0, 0]
    other = np.zeros(4)
    other.flags.writeable = False
    with pytest.raises(StateMismatchError, match="expected float64"):
        store({"a": np.ones(3)}).restore({"a": other})


@pytest.mark.parametrize(
    "live", [torch.zeros(1).expand(3), np.broadcast_to(np.zeros(1, np.float32), 3)], ids=["torch", "numpy"]
)
def test_an_expanded_destination_is_replaced_in_its_container(live: Any) -> None:
    state = {"a": live}
    store({"a": torch.ones(3)}).restore(state)
    assert state["a"].tolist() == [1, 1, 1] and live.tolist() == [0, 0, 0]


def test_an_expanded_buffer_of_a_module_is_an_error() -> None:
    """A module's own `load_state_dict` could not fill it either."""

    def module() -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_buffer("wide", torch.zeros(1).expand(3))
        return made

    with pytest.raises(StateMismatchError, match="share memory"):
        store({"m": module()}).restore({"m": module()})


def test_arrays_that_are_no_tensors_are_values_and_restored_in_place() -> None:
    live = {"big": np.zeros(2, ">f4"), "dates": np.zeros(1, "M8[s]"), "text": np.array(["a"])}
    kept = dict(live)
    saved = {"big": np.array([1, 2], ">f4"), "dates": np.array(["2024-01-01"], "M8[s]"), "text": np.array(["longer"])}
    store(saved).restore(live)
    assert live["big"] is kept["big"] and live["dates"] is kept["dates"]
    for name in saved:
        assert live[name].dtype == saved[name].dtype and (live[name] == saved[name]).all()


def test_addresses_are_given_only_where_bytes_can_be_written() -> None:
    tensor, array = torch.zeros(4, 4), np.zeros((4, 4))
    assert address_of(tensor) == tensor.data_ptr()
    assert address_of(array) == array.ctypes.data
    assert address_of(tensor[1]) == tensor.data_ptr() + 16
    assert address_of(tensor.t()) == 0 and address_of(array.T) == 0
    assert address_of(torch.zeros(2, dtype=torch.complex64).conj()) == 0
    assert address_of(torch.empty(0)) == 0 and address_of(np.empty(0)) == 0


def test_tensors_share_memory_with_the_bytes_they_are_made_of() -> None:
    data = np.zeros(8, np.uint8)
    tensor = from_bytes(TensorSpec("float32", (2,), 8, "torch", "cpu"), data, as_numpy=False)
    data[:] = 255
    assert tensor.isnan().all()
    data.flags.writeable = False
    apart = from_bytes(TensorSpec("float32", (2,), 8, "torch", "cpu"), data, as_numpy=False)
    apart.zero_()
    assert data.all()
    with pytest.raises(UsageError):
        from_bytes(TensorSpec("float32", (3,), 12, "torch", "cpu"), data, as_numpy=True)
