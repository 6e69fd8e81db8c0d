"""A training state as a flat list of named tensors, a list of plain values, and the nesting between them."""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import UnsupportedStateError
from . import generators
from .skeleton import TENSOR, VALUE, Node, encode, key_entry, key_text
from .spec import TensorSpec, array_dtype, make_spec
from .values import ATOMS, DEPTH_MAX, Refused, factory_name, is_namedtuple, pack

# Tensors never get these names: the first means something else to readers of a pack, the others would be invisible.
RESERVED_NAMES = frozenset({"", "__metadata__", "__stepwell_values__"})
RNG_NAME = "__rng__"

_STR_ONLY = {str}
_MAPPING_TYPES = (dict, OrderedDict, defaultdict, Counter)

Owner = tuple[str, Any]


@dataclass(slots=True)
class Flat:
    """A state taken apart. Tensors and values are the live ones, nothing is copied.

    Attributes:
        names: one for each tensor, unique, in the order of the walk.
        tensors: live torch tensors (detached) and numpy arrays. Only conjugated or negated views are new memory.
        specs: dtype, shape, size, library and device type of each tensor.
        alias_of: the index of the earlier tensor with the same memory, shape, strides and dtype, or -1. Tensors
            without elements are never aliases.
        values: the plain values, live: encode them before the trainer goes on.
        skeleton: the nesting, as bytes; equal for equal layouts.
        owners: for each tensor ("param", optimizer) if it is a parameter that exactly one optimizer of the state
            holds, ("optim", optimizer) if it is that optimizer's state, else None.
    """

    names: list[str]
    tensors: list[Any]
    specs: list[TensorSpec]
    alias_of: list[int]
    values: list[object]
    skeleton: bytes
    owners: list[Owner | None]
    _signature: _Signature = field(repr=False)

    def layout_only(self) -> Flat:
        """The same layout without tensors, values and owners: what to keep as `previous` so that no memory is held."""
        return Flat(self.names, [], self.specs, self.alias_of, [], self.skeleton, [], self._signature)


@dataclass(slots=True)
class _Signature:
    """What two states of the same layout have in common, cheap to gather and to compare."""

    tree: Node
    names: list[str]
    arrays: list[tuple[int, Any, tuple[int, ...]]]
    survey: Any


def flatten(state: Any, *, allow_pickle: bool = False, rng: bool = True, previous: Flat | None = None) -> Flat:
    """Take a state apart into named tensors, plain values and a skeleton.

    Where the layout is that of `previous`, its `names`, `specs`, `skeleton` (and `alias_of`, if that is equal too) are
    handed on, so that `is` tells the caller. Changes nothing in the state, and calls nothing but `state_dict()`.

    Raises:
        UnsupportedStateError: something in the state cannot be stored; the text names its path.
    """
    with collector_paused():
        return _flatten(state, allow_pickle, rng, previous)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector from running: it would walk over all of torch for every few thousand new objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _flatten(state: Any, allow_pickle: bool, rng: bool, previous: Flat | None) -> Flat:
    walk = Walk(state, allow_pickle=allow_pickle, rng=rng)
    signature, tensors, pointers = _survey(walk)
    if previous is not None and signature == previous._signature:
        names, specs, skeleton, signature = previous.names, previous.specs, previous.skeleton, previous._signature
    else:
        names = _unique(walk.names)
        specs = _specs(names, tensors)
        skeleton = encode(walk.root)
    alias_of = _aliases(tensors, pointers)
    if previous is not None and skeleton is previous.skeleton and alias_of == previous.alias_of:
        alias_of = previous.alias_of
    return Flat(names, tensors, specs, alias_of, walk.values, skeleton, _owners(walk, tensors), signature)


class Walk:
    """One walk over a state: its tree, and the tensors, names and values at its leaves in order.

    Args:
        live: keep the containers and objects in the tree, and leave `state_dict()` of objects other than modules
            uncalled, because the state is about to be restored.
    """

    def __init__(self, state: Any, *, allow_pickle: bool, rng: bool, live: bool = False) -> None:
        self.names: list[str] = []
        self.tensors: list[Any] = []
        self.values: list[object] = []
        self.array_count = 0
        self.optimizers: list[tuple[Any, int, int]] = []
        self.modules: list[tuple[Any, int, Node]] = []
        self._state = state
        self._allow_pickle = allow_pickle
        self._live = live
        self._open: set[int] = set()
        self._inside_object = 0
        self._parameters: dict[int, dict[str, Any]] = {}
        self._known_modules: list[tuple[str, Any]] | None = None
        self.torch: Any = None
        self._tensor_types: frozenset[type] = frozenset()
        if "torch" in sys.modules:
            from . import torch_state

            self.torch = torch_state
            self._tensor_types = torch_state.TENSOR_TYPES
        try:
            children = [self._walk(state, "", 0)]
        except Refused as refused:
            raise refused.error("state") from None
        except RecursionError:
            raise UnsupportedStateError("the state is nested too deep for the Python stack that is left") from None
        if rng:
            self.values.append(generators.capture_global())
            children.append(VALUE)
        self.root = Node("root", rng, [], children)

    def _walk(self, item: Any, name: str, depth: int) -> Node | int:
        kind = type(item)
        if kind in ATOMS:
            self.values.append(item)
            return VALUE
        if kind in self._tensor_types:
            return self._tensor(item, name)
        if kind is np.ndarray or kind is np.memmap:
            return self._array(item, name)
        if kind in _MAPPING_TYPES or kind in (list, tuple, deque) or is_namedtuple(kind):
            return self._enter(item, name, depth, self._container)
        if self.torch is not None and isinstance(item, self.torch.Tensor):
            try:
                return self._tensor(self.torch.plain_tensor(item), name)
            except TypeError as error:
                raise Refused(str(error), "convert it to a plain tensor, or leave it out of the state") from None
        walk = self._walk_of_object(item)
        if walk is not None:
            if self._inside_object:
                raise Refused(
                    f"is {_class_name(item)}, an object in what another object's state_dict() returned",
                    "return the state of the inner object, not the object itself",
                )
            return self._enter(item, name, depth, walk)
        pack(item, allow_pickle=self._allow_pickle)
        self.values.append(item)
        return VALUE

    def _walk_of_object(self, item: Any) -> Any:
        """The method that walks over an object with a state of its own; None for plain values."""
        if self.torch is not None:
            if self.torch.is_module(item):
                return self._module
            if self.torch.is_optimizer(item) and self.torch.keeps_only_the_usual(item):
                return self._optimizer
        if generators.kind_of(item) is not None:
            return self._generator
        return self._object if not isinstance(item, type) and _has_state(item) else None

    def _enter(self, item: Any, name: str, depth: int, walk: Any) -> Node | int:
        if depth >= DEPTH_MAX:
            raise Refused(f"is nested deeper than {DEPTH_MAX} levels", "flatten the state")
        if id(item) in self._open:
            raise Refused("contains itself", "break the cycle")
        self._open.add(id(item))
        try:
            node: Node | int = walk(item, name, depth + 1)
        finally:
            self._open.discard(id(item))
        return node

    def _node(self, kind: str, about: Any, keys: list[str | bytes], children: list[Any], live: Any) -> Node:
        return Node(kind, about, keys, children, live if self._live else None)

    def _tensor(self, tensor: Any, name: str) -> int:
        self.names.append(name)
        self.tensors.append(tensor)
        return TENSOR

    def _array(self, array: Any, name: str) -> int:
        if array_dtype(array) is None:
            pack(array)
            self.values.append(array)
            return VALUE
        self.array_count += 1
        return self._tensor(np.asarray(array), name)

    def _container(self, item: Any, name: str, depth: int) -> Node | int:
        # The top of a state is always a container, so that its keys are matched one by one.
        top = depth == 1
        value_count = len(self.values)
        kind = type(item)
        if kind in _MAPPING_TYPES:
            kinds = set(map(type, item.values()))
            if not top and kinds <= ATOMS and _all_atoms(item) and kind is not defaultdict:
                self.values.append(item)
                return VALUE
            about: Any = factory_name(item) if kind is defaultdict else None
            keys, children = self._items(item, name, depth, kinds)
            node = self._node(kind.__name__, about, keys, children, item)
        else:
            if not top and _all_atoms(item):
                self.values.append(item)
                return VALUE
            children = self._sequence(item, name, depth)
            if kind in (list, tuple, deque):
                node = self._node(kind.__name__, item.maxlen if kind is deque else None, [], children, item)
            else:
                about = [kind.__module__, kind.__qualname__, list(kind._fields)]
                node = self._node("namedtuple", about, [], children, item)
        if not top and children.count(VALUE) == len(children):
            del self.values[value_count:]
            self.values.append(item)
            return VALUE
        return node

    def _items(self, mapping: Any, name: str, depth: int, kinds: set[type]) -> tuple[list[str | bytes], list[Any]]:
        """The loop that 20 000 tensors go through: no call and no object for each of them but its name."""
        tensor_types = self._tensor_types
        names, tensors, values = self.names, self.tensors, self.values
        prefix = name + "." if name else ""
        keys: list[str | bytes] = list(mapping)
        if kinds <= tensor_types and set(map(type, keys)) == _STR_ONLY:
            names += [prefix + key for key in mapping]
            tensors += mapping.values()
            return keys, [TENSOR] * len(keys)
        children: list[Any] = []
        for index, (key, child) in enumerate(mapping.items()):
            kind = type(child)
            if type(key) is not str:
                keys[index] = _entry(key)
            if kind in tensor_types:
                names.append(f"{prefix}{key}" if type(key) is str else prefix + key_text(key))
                tensors.append(child)
                children.append(TENSOR)
            elif kind in ATOMS:
                values.append(child)
                children.append(VALUE)
            else:
                try:
                    children.append(self._walk(child, prefix + key_text(key), depth))
                except Refused as refused:
                    raise refused.at(f"[{key!r}]") from None
        return keys, children

    def _sequence(self, items: Iterable[Any], name: str, depth: int) -> list[Any]:
        prefix = name + "." if name else ""
        children: list[Any] = []
        for index, child in enumerate(items):
            try:
                children.append(self._walk(child, f"{prefix}{index}", depth))
            except Refused as refused:
                raise refused.at(f"[{index}]") from None
        return children

    def _module(self, module: Any, name: str, depth: int) -> Node:
        state = module.state_dict()
        first = len(self.tensors)
        with self._state_of_object():
            keys, children = self._items(state, name, depth, set(map(type, state.values())))
        node = self._node("module", _class_name(module), keys, children, (module, state))
        self.modules.append((module, first, node))
        return node

    def _optimizer(self, optimizer: Any, name: str, depth: int) -> Node:
        first = len(self.tensors)
        names, named = self.parameter_names(optimizer)
        with self._state_of_object():
            parts = self._optimizer_parts(optimizer, names)
            keys, children = self._items(parts, name, depth, set(map(type, parts.values())))
        groups = [
            [[key, list(parameter.shape)] for key, parameter in zip(group_names, group["params"], strict=True)]
            for group_names, group in zip(names, optimizer.param_groups, strict=True)
        ]
        self.optimizers.append((optimizer, first, len(self.tensors)))
        about = {"class": _class_name(optimizer), "named": named, "groups": groups}
        return self._node("optimizer", about, keys, children, optimizer)

    def _optimizer_parts(self, optimizer: Any, names: list[list[str]]) -> dict[str, Any]:
        """An optimizer's state by parameter name, its groups' options, and state that belongs to no parameter."""
        state: dict[str, Any] = {}
        seen: set[int] = set()
        live = dict(optimizer.state)
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            for parameter, parameter_name in zip(group["params"], group_names, strict=True):
                seen.add(id(parameter))
                if parameter in live:
                    state[parameter_name] = live[parameter]
        options = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        other = {key: value for key, value in optimizer.state.items() if id(key) not in seen}
        for key in other:
            if isinstance(key, self.torch.Tensor):
                raise Refused("has state for a tensor that is in none of its param_groups", "remove that state")
        parts: dict[str, Any] = {"state": state, "param_groups": options}
        if other:
            parts["other"] = other
        return parts

    def _generator(self, generator: Any, name: str, depth: int) -> Node:
        self.values.append(generators.state_of(generator))
        return self._node("generator", generators.kind_of(generator), [], [VALUE], generator)

    def _object(self, item: Any, name: str, depth: int) -> Node:
        if self._live:
            return self._node("object", _class_name(item), [], [VALUE], item)
        with self._state_of_object():
            child = self._walk(item.state_dict(), name, depth)
        return self._node("object", _class_name(item), [], [child], item)

    @contextmanager
    def _state_of_object(self) -> Iterator[None]:
        self._inside_object += 1
        try:
            yield
        except Refused as refused:
            raise refused.at(".state_dict()") from None
        finally:
            self._inside_object -= 1

    def parameters_of(self, module: Any) -> dict[str, Any]:
        """All parameters of a module by name; asked for once, since asking takes longer than everything else."""
        if id(module) not in self._parameters:
            self._parameters[id(module)] = self.torch.module_parameters(module)
        return self._parameters[id(module)]

    def parameter_names(self, optimizer: Any) -> tuple[list[list[str]], bool]:
        """See `torch_state.parameter_names`."""
        modules = [(name, self.parameters_of(module)) for name, module in self.known_modules()]
        names: tuple[list[list[str]], bool] = self.torch.parameter_names(optimizer, modules)
        return names

    def refuse_bad_tensors(self) -> None:
        """Raise `UnsupportedStateError` for the first tensor that cannot be stored, if there is one."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            why = None if isinstance(tensor, np.ndarray) else self.torch.why_not(tensor)
            if why is not None:
                raise self.torch.refusal(name, why)

    def known_modules(self) -> list[tuple[str, Any]]:
        """The modules of the state with their names, in order; searched for once, when an optimizer needs them."""
        if self._known_modules is None:
            self._known_modules = []
            self._find_modules(self._state, "", 0)
        return self._known_modules

    def _find_modules(self, item: Any, name: str, depth: int) -> None:
        if self.torch.is_module(item):
            assert self._known_modules is not None
            self._known_modules.append((name, item))
            return
        if depth >= DEPTH_MAX:
            return
        prefix = name + "." if name else ""
        pairs: Iterable[tuple[Any, Any]] = ()
        if isinstance(item, _MAPPING_TYPES):
            pairs = item.items()
        elif isinstance(item, (list, tuple, deque)):
            pairs = enumerate(item)
        for key, child in pairs:
            kind = type(child)
            if kind not in ATOMS and kind not in self._tensor_types:
                self._find_modules(child, prefix + key_text(key), depth + 1)


def _all_atoms(items: Iterable[Any]) -> bool:
    return set(map(type, items)) <= ATOMS


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _class_name(item: Any) -> str:
    return f"{type(item).__module__}.{type(item).__qualname__}"


def _entry(key: Any) -> str | bytes:
    try:
        pack(key)
    except Refused as refused:
        raise Refused(f"has the key {key!r}, which {refused.why}", "use keys of plain types") from None
    return key_entry(key)


def _unique(names: list[str]) -> list[str]:
    """Names made different from each other, from the reserved ones, and writable as UTF-8; order and most kept."""
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        names = [name.encode("utf-8", "backslashreplace").decode() for name in names]
    taken = set(names)
    if len(taken) == len(names) and not taken & RESERVED_NAMES:
        return names
    unique, used = [], set(RESERVED_NAMES)
    for name in names:
        number = 0
        candidate = name
        while candidate in used or (number and candidate in taken):
            number += 1
            candidate = f"{name}~{number}"
        used.add(candidate)
        unique.append(candidate)
    return unique


def _survey(walk: Walk) -> tuple[_Signature, list[Any], list[int]]:
    """The layout's signature, the tensors ready to be read, and their addresses."""
    tensors = walk.tensors
    arrays: list[tuple[int, Any, tuple[int, ...]]] = []
    dense = tensors
    if walk.array_count:
        arrays = [(i, t.dtype, t.shape) for i, t in enumerate(tensors) if isinstance(t, np.ndarray)]
        dense = [tensor for tensor in tensors if not isinstance(tensor, np.ndarray)]
    survey = None
    if dense:
        try:
            survey = walk.torch.Survey(dense)
            dense, pointers = survey.readable(dense)
        except (RuntimeError, NotImplementedError) as error:
            walk.refuse_bad_tensors()
            raise UnsupportedStateError(f"a tensor of the state cannot be read: {error}") from error
        if not walk.array_count:
            return _Signature(walk.root, walk.names, arrays, survey), dense, pointers
    rest = iter(dense)
    tensors = [tensor if isinstance(tensor, np.ndarray) else next(rest) for tensor in tensors]
    pointers = [int(t.__array_interface__["data"][0]) if isinstance(t, np.ndarray) else t.data_ptr() for t in tensors]
    return _Signature(walk.root, walk.names, arrays, survey), tensors, pointers


def _specs(names: list[str], tensors: list[Any]) -> list[TensorSpec]:
    specs = []
    torch_state: Any = None
    if "torch" in sys.modules:
        from . import torch_state
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, np.ndarray):
            specs.append(make_spec(tensor.dtype.name, tensor.shape, "numpy", "cpu"))
            continue
        why = torch_state.why_not(tensor)
        if why is not None:
            raise torch_state.refusal(name, why)
        specs.append(torch_state.spec_of(tensor))
    return specs


def _aliases(tensors: list[Any], pointers: list[int]) -> list[int]:
    alias_of = [-1] * len(tensors)
    if len(set(pointers)) == len(pointers):
        return alias_of
    first: dict[int, int] = {}
    shared = [index for index, pointer in enumerate(pointers) if pointer and first.setdefault(pointer, index) != index]
    if not shared:
        return alias_of
    suspects = sorted({first[pointers[index]] for index in shared} | set(shared))
    by_memory: dict[Any, int] = {}
    for index in suspects:
        key = memory_key(tensors[index])
        if key is not None:
            earlier = by_memory.setdefault(key, index)
            if earlier != index:
                alias_of[index] = earlier
    return alias_of


def memory_key(tensor: Any) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the very same elements; None for one without elements."""
    if isinstance(tensor, np.ndarray):
        if tensor.size == 0:
            return None
        return (int(tensor.__array_interface__["data"][0]), tensor.dtype, tensor.shape, tensor.strides)
    if tensor.numel() == 0:
        return None
    bits = (tensor.is_conj(), tensor.is_neg())
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, bits)


def _owners(walk: Walk, tensors: list[Any]) -> list[Owner | None]:
    owners: list[Owner | None] = [None] * len(tensors)
    if not walk.optimizers:
        return owners
    holders: dict[int, list[Any]] = {}
    for optimizer, first, last in walk.optimizers:
        owners[first:last] = [("optim", optimizer)] * (last - first)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                holders.setdefault(id(parameter), []).append(optimizer)
    owner_of = {key: ("param", held[0]) for key, held in holders.items() if len(held) == 1}
    for index, tensor in enumerate(walk.tensors):
        if id(tensor) in owner_of:
            owners[index] = owner_of[id(tensor)]
    for module, first, node in walk.modules:
        parameters: dict[Any, Any] = walk.parameters_of(module)
        index = first
        for key, child in zip(node.keys, node.children, strict=True):
            if child == TENSOR:
                parameter = parameters.get(key)
                if parameter is not None and parameter.data_ptr() == tensors[index].data_ptr():
                    owners[index] = owner_of.get(id(parameter))
                index += 1
            elif isinstance(child, Node):
                break
    return owners
