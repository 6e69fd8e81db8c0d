"""Everything about a state that needs torch. Imported only in processes that have imported torch themselves."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import UnsupportedStateError
from .spec import ITEM_BYTES, TensorSpec, make_spec

TENSOR_TYPES = frozenset({Tensor, nn.Parameter})

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if isinstance(getattr(torch, name, None), torch.dtype)
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

_NAMED_VALUES: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


# Tensors


def plain_tensor(tensor: Tensor) -> Tensor:
    """A tensor of a harmless subclass as a plain one that shares its memory.

    Raises:
        TypeError: the subclass may hold more than one block of bytes; the text names it.
    """
    kind = type(tensor)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise TypeError(f"is an uninitialized {name}: run the model once before saving or restoring")
    wraps: bool = is_traceable_wrapper_subclass(tensor)
    if wraps:
        raise TypeError(f"is a wrapper subclass, {name}: its bytes are in other tensors")
    if (
        kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
        or getattr(kind.__torch_function__, "__func__", None) not in _PLAIN_TORCH_FUNCTIONS
        or vars(tensor)
    ):
        raise TypeError(f"is a {name}, a tensor subclass that may hold more than its numbers")
    return tensor.detach().as_subclass(Tensor)


_PLAIN_TORCH_FUNCTIONS = {
    getattr(Tensor.__torch_function__, "__func__", None),
    getattr(nn.Parameter.__torch_function__, "__func__", None),
}


class Survey:
    """What a list of tensors has in dtypes, shapes and devices; two surveys compare cheaply.

    One loop without an object per tensor: with 20 000 tensors, each visit of a tensor is a cache miss.

    Raises:
        RuntimeError: a tensor has no plain memory; `why_not` says which and why.
    """

    __slots__ = ("_devices", "_dtypes", "_graded", "_lazy_bits", "_pointers", "_shapes")

    def __init__(self, tensors: list[Tensor]) -> None:
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[torch.Size] = []
        self._devices: list[torch.device] = []
        self._pointers: list[int] = []
        self._graded = False
        self._lazy_bits = False
        add_dtype, add_shape, add_device = self._dtypes.append, self._shapes.append, self._devices.append
        add_pointer = self._pointers.append
        for tensor in tensors:
            add_dtype(tensor.dtype)
            add_shape(tensor.shape)
            add_device(tensor.device)
            add_pointer(tensor.data_ptr())
            if tensor.requires_grad:
                self._graded = True
            if tensor.is_neg() or tensor.is_conj():
                self._lazy_bits = True

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Survey)
            and self._dtypes == other._dtypes
            and self._shapes == other._shapes
            and self._devices == other._devices
        )

    __hash__ = None  # type: ignore[assignment]

    def readable(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[int]]:
        """The surveyed tensors, outside autograd and with conjugation and negation carried out; their addresses."""
        if self._graded:
            tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        if not self._lazy_bits:
            return tensors, self._pointers
        tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
        return tensors, [tensor.data_ptr() for tensor in tensors]


def why_not(tensor: Tensor) -> str | None:
    """Why a tensor cannot be stored, or None when it can."""
    if tensor.is_nested:
        return "is a nested tensor"
    if tensor.layout is not torch.strided:
        return f"is a sparse tensor ({tensor.layout})"
    if tensor.is_quantized or tensor.dtype not in NAMES:
        return f"is a tensor of {tensor.dtype}"
    if tensor.device.type == "meta":
        return "is on the meta device and has no bytes"
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        return f"has no memory of its own: {error}"
    return None


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of a tensor that `why_not` has no objection to."""
    return make_spec(NAMES[tensor.dtype], tuple(tensor.shape), "torch", tensor.device.type)


def tensor_from_bytes(dtype: str, shape: tuple[int, ...], data: np.ndarray[Any, Any]) -> Tensor:
    """A CPU tensor that shares memory with these bytes; read-only bytes are copied."""
    if data.size == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    if not data.flags.writeable:
        data = data.copy()
    return torch.from_numpy(data).view(DTYPES[dtype]).view(shape)


def new_tensor(spec: TensorSpec, device: torch.device | str) -> Tensor:
    """An uninitialized tensor of this spec."""
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)


def device_here(spec: TensorSpec) -> torch.device:
    """Where a tensor that has no place yet belongs: the kind of device it was saved from, if there is one here."""
    if spec.device == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if spec.device == "xpu" and torch.xpu.is_available():
        return torch.device("xpu", torch.xpu.current_device())
    return torch.device("cpu")


def writer(tensor: Tensor, spec: TensorSpec) -> Callable[[np.ndarray[Any, Any]], None]:
    """A function that puts host bytes of that spec into a tensor, converting where dtypes differ."""

    def store(data: np.ndarray[Any, Any]) -> None:
        with torch.no_grad():
            tensor.copy_(tensor_from_bytes(spec.dtype, spec.shape, data))

    return store


@lru_cache(maxsize=1024)
def can_cast(source: str, target: str) -> bool:
    """Whether torch converts one dtype to the other without dropping a whole kind (float to int, complex to real)."""
    if source not in DTYPES or target not in DTYPES:
        return False
    try:
        if not torch.can_cast(DTYPES[source], DTYPES[target]):
            return False
        torch.empty(1, dtype=DTYPES[target]).copy_(torch.zeros(1, dtype=DTYPES[source]))
    except (RuntimeError, NotImplementedError):
        return False
    return True


# Values of torch's own types


def describe_value(value: Any) -> tuple[str, str | list[int]] | None:
    """A dtype, size, device, layout or memory format as (kind, text or sizes); None for anything else."""
    kind = type(value)
    if kind is torch.Size:
        return "size", list(value)
    if kind is torch.device:
        return "device", str(value)
    for name, known in _NAMED_VALUES.items():
        if kind is known:
            return name, str(value).removeprefix("torch.")
    return None


def value_described(kind: str, value: str | tuple[int, ...]) -> Any:
    """What `describe_value` described; raises `ValueError` for anything it cannot have described."""
    if kind == "size" and isinstance(value, tuple):
        return torch.Size(value)
    if kind == "device" and isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    if kind in _NAMED_VALUES and isinstance(value, str):
        found = vars(torch).get(value)
        if isinstance(found, _NAMED_VALUES[kind]):
            return found
    raise ValueError(f"{kind} {value!r} is no value of torch")


# Modules


def is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)


def is_optimizer(value: Any) -> bool:
    return isinstance(value, Optimizer)


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by name, tied ones under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False))


def needs_load(module: nn.Module, state: dict[str, Any]) -> bool:
    """Whether writing into the tensors of `module.state_dict()` is not all of `module.load_state_dict()`.

    True where a value or a copied tensor is in the state, or where code outside torch.nn takes part in loading.
    """
    owned = {tensor.data_ptr() for tensor in module.parameters()} | {tensor.data_ptr() for tensor in module.buffers()}
    for value in state.values():
        if not isinstance(value, Tensor) or (value.numel() and value.data_ptr() not in owned):
            return True
    return any(_loads_itself(part) for part in module.modules())


_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def _loads_itself(module: nn.Module) -> bool:
    return _has_own_loading(type(module)) or any(getattr(module, hooks, None) for hooks in _HOOKS)


def _has_own_loading(kind: type) -> bool:
    for name in ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict", "set_extra_state"):
        owner = next((base for base in kind.__mro__ if name in vars(base)), nn.Module)
        if not owner.__module__.startswith("torch.nn."):
            return True
    return False


# Optimizers


def keeps_only_the_usual(optimizer: Optimizer) -> bool:
    """Whether `state` and `param_groups` are all that this optimizer saves.

    True for every optimizer that leaves `state_dict` alone. One that changes it is asked: its state dict must have the
    two usual parts, with the very tensors of `optimizer.state`.
    """
    hooks = (getattr(optimizer, f"_optimizer_state_dict_{when}_hooks", None) for when in ("pre", "post"))
    if is_plain(optimizer) and not any(hooks):
        return True
    state = optimizer.state_dict()
    if set(state) != {"state", "param_groups"} or len(state["state"]) != len(optimizer.state):
        return False
    own = {id(leaf) for leaf in _leaves(optimizer.state.values())}
    return all(id(leaf) in own for leaf in _leaves(state["state"].values()))


def is_plain(optimizer: Optimizer) -> bool:
    """Whether an optimizer saves and loads the way torch's base class does."""
    kind = type(optimizer)
    return kind.state_dict is Optimizer.state_dict and kind.load_state_dict is Optimizer.load_state_dict


def _leaves(items: Iterable[Any]) -> Iterable[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            yield from _leaves(item.values())
        elif isinstance(item, (list, tuple)):
            yield from _leaves(item)


def parameter_names(
    optimizer: Optimizer, modules: list[tuple[str, dict[str, nn.Parameter]]]
) -> tuple[list[list[str]], bool]:
    """A name for each parameter of each group, and whether the names are more than positions.

    A parameter is named as the first module of the state that holds *all* parameters of the optimizer names it. If no
    module holds them all, it is named with its module's own name in front. Parameters of no module are named as the
    group's `param_names` say, else by position, `group0.param3`.

    Args:
        modules: the names of the modules of the state and their parameters, in the order of the state.
    """
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: dict[int, str] = {}
    for prefix, parameters in modules:
        by_id: dict[int, str] = {}
        for name, parameter in parameters.items():
            if id(parameter) in wanted:
                by_id.setdefault(id(parameter), name)
        if len(by_id) == len(wanted):
            found = by_id
            break
        for key, name in by_id.items():
            found.setdefault(key, f"{prefix}.{name}" if prefix else name)
    taken: set[str] = set()
    all_names: list[list[str]] = []
    named = True
    for group_index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        group_names = []
        for index, parameter in enumerate(group["params"]):
            name = found.get(id(parameter), "" if given is None else given[index])
            if not name:
                named, name = False, f"group{group_index}.param{index}"
            while name in taken:
                name += "~1"
            taken.add(name)
            group_names.append(name)
        all_names.append(group_names)
    return all_names, named


def state_device(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor, key: Any) -> torch.device:
    """Where new optimizer state belongs: beside its parameter, but a step counter stays on the CPU as torch has it."""
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return torch.device("cpu")
    return parameter.device


def after_load(optimizer: Optimizer) -> None:
    """What torch's `load_state_dict` does once state and groups are in place: defaults of newer options, post hooks."""
    if is_plain(optimizer):
        optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    for hook in getattr(optimizer, "_optimizer_load_state_dict_post_hooks", {}).values():
        hook(optimizer)


# Generators


def is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def generator_state(generator: torch.Generator) -> dict[str, Any]:
    """A generator's device type and state as plain values."""
    return {"device": generator.device.type, "state": _as_bytes(generator.get_state())}


def set_generator_state(generator: torch.Generator, state: dict[str, Any]) -> None:
    """Put back what `generator_state` gave."""
    generator.set_state(_from_bytes(state["state"]))


def rng_states() -> dict[str, Any]:
    """The states of torch's global generators: the CPU's, and those of accelerators that are in use."""
    states: dict[str, Any] = {"torch": _as_bytes(torch.get_rng_state())}
    for name, library in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        if library.is_available() and library.is_initialized():
            states[name] = [_as_bytes(state) for state in library.get_rng_state_all()]
    return states


def set_rng_states(states: dict[str, Any]) -> None:
    """Put back what `rng_states` gave, for as many devices as there are here."""
    torch.set_rng_state(_from_bytes(states["torch"]))
    for name, library in (("cuda", torch.cuda), ("xpu", torch.xpu)):
        saved = states.get(name, [])
        if not saved:
            continue
        count = library.device_count() if library.is_available() else 0
        if count < len(saved):
            warnings.warn(
                f"the checkpoint has generator states of {len(saved)} {name} devices, but there are {count} here; "
                "the others are left out",
                stacklevel=2,
            )
        for index, state in enumerate(saved[:count]):
            library.set_rng_state(_from_bytes(state), index)


def _as_bytes(state: Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _from_bytes(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def refusal(name: str, why: str) -> UnsupportedStateError:
    """The error for a tensor that cannot be stored."""
    return UnsupportedStateError(f"the tensor {name!r} {why}, which Stepwell does not store", todo=_TODO)


_TODO = "convert it to a plain dense tensor, or leave it out of the state"
