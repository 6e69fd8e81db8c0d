"""Put a saved state back into a live one: check everything first, then say where each tensor's bytes go.

Matching follows the nesting, not the dotted names: a saved container meets the live one at the same place. Names are
for messages and for the patterns of `names=`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import DamagedError, StateClobbered, StateMismatchError, UnsupportedStateError, UsageError
from . import generators
from .flatten import RNG_NAME, Walk, memory_key
from .skeleton import (
    MAPPINGS,
    SEQUENCES,
    TENSOR,
    Node,
    TensorAt,
    ValueOf,
    container,
    decode,
    expanded,
    key_of,
    key_text,
    step_name,
)
from .spec import NUMPY_STANDINS, TensorSpec, address_of, array_dtype, from_bytes
from .values import encode_values

_LISTED_MAX = 20


@dataclass(slots=True)
class Saved:
    """What was read from disk: see `Flat` for the fields."""

    names: list[str]
    specs: list[TensorSpec]
    alias_of: list[int]
    skeleton: bytes
    values: list[object]

    def tree(self) -> Node:
        """The nesting with its leaves filled in; raises `DamagedError`."""
        return decode(self.skeleton, tensor_count=len(self.names), values=self.values)


@dataclass(frozen=True, slots=True)
class Copy:
    """One destination that must receive the bytes of one saved tensor.

    Attributes:
        index: of the saved tensor, never of an alias. An index can occur in several copies.
        address: the host address to write `specs[index].nbytes` bytes to, or 0.
        store: what to hand the bytes to (uint8, 1-D) where there is no such address: other device, other strides,
            other dtype. Calls for different copies may run in different threads.
    """

    index: int
    address: int
    store: Callable[[np.ndarray[Any, Any]], None] | None


@dataclass(slots=True)
class RestorePlan:
    """The tensors to fill, and `finish` for everything else.

    Attributes:
        copies: in the order of the saved tensors.
        skipped: with `strict=False`, every difference that was passed over, in words.
    """

    copies: list[Copy]
    skipped: list[str]
    _actions: list[Callable[[], None]] = field(repr=False)
    _held: list[Any] = field(repr=False)

    def finish(self) -> None:
        """Put values into containers, load objects, set generators; once, after the bytes of all copies have arrived.

        Raises:
            StateClobbered: a `load_state_dict` of the user's or torch's raised; the state is partly restored.
        """
        for action in self._actions:
            action()


class _Keep:
    """The live object stays where it is."""


_KEEP = _Keep()


@dataclass(frozen=True, slots=True)
class _TensorRef:
    """Stands for a saved tensor in a rebuilt container until its place is known."""

    index: int


def match(
    state: Any,
    saved: Saved,
    *,
    strict: bool = True,
    cast: bool = False,
    names: str | Sequence[str] | None = None,
    rng: bool = True,
    allow_pickle: bool = False,
) -> RestorePlan:
    """Compare a saved state with a live one and plan the restore. Changes nothing.

    A live None or empty container takes whatever was saved there; everything else must agree in nesting, shapes and
    dtypes. Optimizer state is made as it was saved, whatever the parameter's dtype is, and state that was not saved is
    removed. Objects with `load_state_dict` take what they are given.

    Args:
        strict: every missing or unexpected name is an error; otherwise it is passed over.
        cast: a tensor of another dtype of the same kind is converted; its shape must still be the same.
        names: restore only tensors and values whose dotted name matches one of these patterns (as in `fnmatch`).
        rng: put the global generators back, if the checkpoint has them.
        allow_pickle: the state may hold values that only pickle can store.

    Raises:
        StateMismatchError: the states differ; lists every difference with expected and found.
        DamagedError: the saved nesting makes no sense.
        UnsupportedStateError: the live state has something that could not have been saved.
    """
    tree = saved.tree()
    live = Walk(state, allow_pickle=allow_pickle, rng=False, live=True)
    matcher = _Matcher(saved, live, strict=strict, cast=cast, patterns=names)
    matcher.run(tree, state, rng=rng)
    return matcher.plan()


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether a dotted name matches one of the patterns, `model.*` (`fnmatch`, case sensitive)."""
    if isinstance(patterns, str):
        return fnmatchcase(name, patterns)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Matcher:
    def __init__(
        self, saved: Saved, live: Walk, *, strict: bool, cast: bool, patterns: str | Sequence[str] | None
    ) -> None:
        self._saved = saved
        self._live = live
        self._strict = strict
        self._cast = cast
        self._patterns = patterns
        self._problems: list[str] = []
        self._skipped: list[str] = []
        self._copies: list[Copy] = []
        self._actions: list[Callable[[], None]] = []
        self._held: list[Any] = []
        self._written: dict[int, list[tuple[Any, int, str]]] = {}
        self._made: dict[int, Any] = {}
        self._tied = {alias for alias in saved.alias_of if alias >= 0}
        self._refill = _Refill()
        self._emptied: set[int] = set()
        self._torch = live.torch

    def run(self, tree: Node, state: Any, *, rng: bool) -> None:
        result = self._visit(tree.children[0], _numbered(self._live), "")
        if result is not _KEEP:
            kind = _a(type(state).__name__)
            self._problems.append(f"the state is {kind}, which cannot be updated in place: use a dict or a list")
        if tree.about and rng and self._selected(RNG_NAME):
            states = tree.children[1].value
            self._call(RNG_NAME, lambda: generators.restore_global(states))

    def plan(self) -> RestorePlan:
        if self._problems:
            shown = self._problems[:_LISTED_MAX]
            more = len(self._problems) - len(shown)
            lines = "".join(f"\n    {problem}" for problem in shown)
            raise StateMismatchError(
                f"the saved state and the given one differ in {len(self._problems)} places; nothing was changed"
                + lines
                + (f"\n    ... and {more} more" if more else ""),
                todo="give the state the form it was saved with; or loosen with strict=False (missing and unexpected "
                "names), cast=True (dtypes), names=... (only some of it)",
            )
        self._copies.sort(key=lambda copy: copy.index)
        return RestorePlan(self._copies, self._skipped, self._actions, self._held)

    # Differences

    def _differ(self, name: str, expected: str, found: str) -> None:
        self._problems.append(f"{_shown(name)}: expected {expected}, found {found} in the checkpoint")

    def _passed_over(self, text: str) -> None:
        (self._problems if self._strict else self._skipped).append(text)

    def _missing(self, live: Any, name: str) -> None:
        for leaf, what in self._leaves(live, name):
            self._passed_over(f"{_shown(leaf)}: missing in the checkpoint, expected {what}")

    def _unexpected(self, saved: Any, name: str) -> None:
        for leaf, what in self._leaves(saved, name):
            self._passed_over(f"{_shown(leaf)}: unexpected, the checkpoint has {what} that the state has no place for")

    def _leaves(self, item: Any, name: str) -> list[tuple[str, str]]:
        """The selected leaves below a saved or live item, with what they are."""
        if isinstance(item, Node) and item.kind not in ("object", "generator"):
            found = []
            for index, child in enumerate(item.children):
                found += self._leaves(child, _join(name, step_name(item, index)))
            return found
        if not self._selected(name):
            return []
        if isinstance(item, TensorAt):
            return [(name, self._saved.specs[item.index].text)]
        if isinstance(item, _LiveTensor):
            return [(name, _text(item.tensor))]
        return [(name, self._what(item))]

    def _selected(self, name: str) -> bool:
        return self._patterns is None or matches(name, self._patterns)

    # The walk: returns `_KEEP`, or what the parent must put in the place of the live item.

    def _visit(self, saved: Any, live: Any, name: str) -> Any:
        if isinstance(live, ValueOf):
            return self._visit_value(saved, live.value, name)
        if isinstance(live, _LiveTensor):
            if isinstance(saved, TensorAt):
                if self._patterns is None or self._selected(name):
                    self._fill(saved.index, live.tensor, name)
                return _KEEP
            if not self._any_selected(saved, name):
                return _KEEP
            if isinstance(saved, ValueOf) and saved.value is None:
                return None
            self._differ(name, _text(live.tensor), self._what(saved))
            return _KEEP
        if live.kind in MAPPINGS | SEQUENCES and not live.children:
            return self._fill_empty(saved, live.live, name)
        if isinstance(saved, ValueOf) and live.kind in MAPPINGS | SEQUENCES | {"module"}:
            if saved.value is None and live.kind != "module":
                return None if self._selected(name) else _KEEP
            saved = expanded(saved.value) or saved
        if not isinstance(saved, Node) or _family(saved) != _family(live):
            if self._any_selected(saved, name):
                self._differ(name, self._what(live), self._what(saved))
            return _KEEP
        if live.kind == "module":
            return self._module(saved, live, name)
        if live.kind in MAPPINGS:
            return self._mapping(saved, live, name)
        if live.kind in SEQUENCES:
            return self._sequence(saved, live, name)
        if live.kind == "optimizer":
            return self._optimizer(saved, live.live, name)
        if live.kind == "generator":
            return self._generator(saved, live, name)
        return self._object(saved, live.live, name)

    def _visit_value(self, saved: Any, live: Any, name: str) -> Any:
        if isinstance(saved, ValueOf):
            if not self._selected(name):
                return _KEEP
            if not _can_refill(live, saved.value) or not self._refill.claims(live, saved.value):
                return saved.value
            self._actions.append(lambda: self._refill.fill(live, saved.value))
            return _KEEP
        if live is None:
            return self._build(saved, name)
        place = expanded(live)
        if place is not None and not place.children:
            return self._fill_empty(saved, live, name)
        if place is not None and isinstance(saved, Node):
            return self._visit(saved, place, name)
        if self._any_selected(saved, name):
            self._differ(name, _a(type(live).__name__), self._what(saved))
        return _KEEP

    def _fill_empty(self, saved: Any, live: Any, name: str) -> Any:
        built = self._build(saved, name)
        if built is _KEEP:
            return _KEEP
        if id(live) in self._emptied:
            return built
        self._emptied.add(id(live))
        self._held.append(live)
        if isinstance(live, dict) and isinstance(built, dict):
            self._actions.append(lambda: dict.update(live, built))
            return _KEEP
        if isinstance(live, (list, deque)) and isinstance(built, (list, tuple, deque)):
            self._actions.append(lambda: live.extend(built))
            return _KEEP
        return built

    def _mapping(self, saved: Node, live: Node, name: str) -> Any:
        target = live.live
        for key, result in self._pairs(saved, live, name):
            self._actions.append(lambda key=key, result=result: dict.__setitem__(target, key, result))  # type: ignore[misc]
        return _KEEP

    def _pairs(self, saved: Node, live: Node, name: str) -> list[tuple[Any, Any]]:
        """What must be put under which key, after all common keys were visited and all others reported."""
        places = dict(zip(live.keys, live.children, strict=True))
        changed = []
        prefix = name + "." if name else ""
        for entry, child in zip(saved.keys, saved.children, strict=True):
            child_name = prefix + (entry if isinstance(entry, str) else key_text(key_of(entry)))
            if entry not in places:
                self._unexpected(child, child_name)
                continue
            place = places.pop(entry)
            if live.kind == "module" and str(entry).endswith("_extra_state") and self._selected(child_name):
                # Extra state is whatever the module says it is; its form may change from step to step.
                result = self._build(child, child_name)
            else:
                result = self._visit(child, place, child_name)
            if result is not _KEEP:
                changed.append((key_of(entry), result))
        for entry, place in places.items():
            self._missing(place, _join(name, key_text(key_of(entry))))
        return changed

    def _sequence(self, saved: Node, live: Node, name: str) -> Any:
        items = list(live.live)
        changed: dict[int, Any] = {}
        for index in range(max(len(saved.children), len(items))):
            child_name = _join(name, str(index))
            if index >= len(items):
                self._unexpected(saved.children[index], child_name)
            elif index >= len(saved.children):
                self._missing(live.children[index], child_name)
            else:
                result = self._visit(saved.children[index], live.children[index], child_name)
                if result is not _KEEP:
                    changed[index] = result
        if not changed:
            return _KEEP
        target = live.live
        if isinstance(target, tuple):
            new = [changed.get(index, item) for index, item in enumerate(items)]
            return tuple.__new__(type(target), new)

        def assign() -> None:
            for index, item in changed.items():
                target[index] = item

        self._actions.append(assign)
        return _KEEP

    def _module(self, saved: Node, live: Node, name: str) -> Any:
        module, state = live.live
        changed = self._pairs(saved, live, name)
        if changed or (self._any_selected(saved, name) and self._torch.needs_load(module, state)):
            state.update(changed)
            self._call(name, lambda: module.load_state_dict(state))
        return _KEEP

    def _generator(self, saved: Node, live: Node, name: str) -> Any:
        if not self._selected(name):
            return _KEEP
        state = saved.children[0].value if isinstance(saved.children[0], ValueOf) else None
        why = generators.why_not(live.live, state) if saved.about == live.about else f"found a {saved.about}"
        if why is None:
            self._call(name, lambda: generators.put_back(live.live, state))  # type: ignore[arg-type]
        else:
            self._problems.append(f"{_shown(name)}: a {live.about} cannot be restored: {why}")
        return _KEEP

    def _object(self, saved: Node, live: Any, name: str) -> Any:
        leaves = self._leaf_names(saved.children[0], name)
        selected = [leaf for leaf in leaves if self._selected(leaf)]
        if not selected:
            return _KEEP
        if len(selected) < len(leaves):
            self._passed_over(f"{_shown(name)}: an object is restored as a whole, but the patterns match a part of it")
            return _KEEP
        state = self._build(saved.children[0], name)
        self._call(name, lambda: live.load_state_dict(state))
        return _KEEP

    def _call(self, name: str, load: Callable[[], Any]) -> None:
        def action() -> None:
            try:
                load()
            except Exception as error:
                raise StateClobbered(
                    f"restoring {_shown(name)} failed after the tensors had been written: {error}",
                    todo="rebuild the state and restore it again",
                ) from error

        self._actions.append(action)

    # Tensors

    def _fill(self, index: int, target: Any, name: str) -> None:
        """Plan the copy of a saved tensor into a live one, or note why it does not fit."""
        spec = self._saved.specs[index]
        dtype = _dtype_of(target)
        if target.shape != spec.shape or (dtype != spec.dtype and not self._castable(spec.dtype, target, dtype)):
            self._differ(name, _text(target), spec.text)
            return
        address = address_of(target) if dtype == spec.dtype else 0
        why = self._why_not(target, address)
        if why is not None:
            self._problems.append(f"{_shown(name)}: the live tensor cannot be filled, it {why}")
            return
        if spec.nbytes == 0:
            return
        root = self._root(index)
        earlier = self._writers_of(target)
        if earlier is not None:
            if earlier[0] != root:
                self._problems.append(
                    f"{_shown(name)}: shares its memory with {_shown(earlier[1])}, but the two were saved apart"
                )
            return
        self._written.setdefault(_pointer(target), []).append((target, root, name))
        if dtype == spec.dtype:
            self._made.setdefault(root, target)
        self._copies.append(Copy(root, address, None if address else self._writer(target, spec)))

    def _writers_of(self, target: Any) -> tuple[int, str] | None:
        """The saved tensor that is to be written to this very memory already, and under which name."""
        places = self._written.get(_pointer(target))
        if places:
            key = memory_key(target)
            for other, root, name in places:
                if memory_key(other) == key:
                    return root, name
        return None

    def _root(self, index: int) -> int:
        """The index under which the bytes of a tensor are stored."""
        alias = self._saved.alias_of[index]
        return index if alias < 0 else alias

    def _takes(self, live: Any, index: int) -> bool:
        """Whether a live object is a tensor of the saved dtype and shape that nothing else is written to."""
        spec = self._saved.specs[index]
        if not isinstance(live, np.ndarray) and not (self._torch is not None and isinstance(live, self._torch.Tensor)):
            return False
        if (
            live.shape != spec.shape
            or _dtype_of(live) != spec.dtype
            or self._why_not(live, address_of(live)) is not None
        ):
            return False
        earlier = self._writers_of(live)
        return earlier is None or earlier[0] == self._root(index)

    def _why_not(self, target: Any, address: int) -> str | None:
        """Why a live tensor cannot be written to; one with a host address of its own has nothing odd about it."""
        if isinstance(target, np.ndarray):
            if not target.flags.writeable:
                return "is a read-only array"
        elif address:
            return None
        else:
            why: str | None = self._torch.why_not(target)
            if why is not None:
                return why
        return "is an expanded view whose elements share memory" if _shares_elements(target) else None

    def _writer(self, target: Any, spec: TensorSpec) -> Callable[[np.ndarray[Any, Any]], None]:
        if not isinstance(target, np.ndarray):
            writer: Callable[[np.ndarray[Any, Any]], None] = self._torch.writer(target, spec)
            return writer

        def store(data: np.ndarray[Any, Any]) -> None:
            np.copyto(target, from_bytes(spec, data, as_numpy=True), casting="same_kind")

        return store

    def _castable(self, source: str, target: Any, dtype: str) -> bool:
        if not self._cast:
            return False
        if isinstance(target, np.ndarray):
            return source not in NUMPY_STANDINS and np.can_cast(np.dtype(source), np.dtype(dtype), casting="same_kind")
        return bool(self._torch.can_cast(source, dtype))

    def _make(self, index: int, device: Any = None) -> Any:
        """A tensor for a saved one that has no place yet: new, or the one that it was tied to."""
        spec = self._saved.specs[index]
        root = self._root(index)
        if root in self._made and root in self._tied:
            return self._made[root]
        if spec.kind == "torch" and self._torch is None:
            raise UsageError("the checkpoint has torch tensors, but torch is not imported", todo="import torch first")
        if spec.kind == "numpy":
            made: Any = np.empty(spec.shape, spec.dtype)
        else:
            made = self._torch.new_tensor(spec, device or self._torch.device_here(spec))
        if spec.nbytes:
            address = address_of(made)
            self._held.append(made)
            self._copies.append(Copy(root, address, None if address else self._writer(made, spec)))
        self._made[root] = made
        return made

    def _build(self, saved: Any, name: str) -> Any:
        """A new object from a saved tree, its tensors to be filled; `_KEEP` if nothing of it is selected."""
        return _construct(saved, name, self._make, self._selected if self._patterns is not None else None)

    # Optimizers

    def _optimizer(self, saved: Node, optimizer: Any, name: str) -> Any:
        if self._any_selected(saved, name):
            _OptimizerMatch(self, saved, optimizer, name).run()
        return _KEEP

    # Words

    def _what(self, item: Any) -> str:
        if isinstance(item, TensorAt):
            return self._saved.specs[item.index].text
        if isinstance(item, ValueOf):
            return _a(type(item.value).__name__)
        if item.kind in MAPPINGS | SEQUENCES:
            return f"{_a(item.kind)} of {len(item.children)}"
        return _a(item.kind) if item.kind in ("module", "optimizer") else f"an object ({item.about})"

    def _leaf_names(self, item: Any, name: str) -> list[str]:
        if not isinstance(item, Node):
            return [name]
        names = []
        for index, child in enumerate(item.children):
            inner = name if item.kind in ("object", "generator") else _join(name, step_name(item, index))
            names += self._leaf_names(child, inner)
        return names

    def _any_selected(self, item: Any, name: str) -> bool:
        return self._patterns is None or any(self._selected(leaf) for leaf in self._leaf_names(item, name))


class _OptimizerMatch:
    """One saved optimizer against a live one, parameter by parameter."""

    def __init__(self, matcher: _Matcher, saved: Node, optimizer: Any, name: str) -> None:
        self._matcher = matcher
        self._optimizer = optimizer
        self._name = name
        parts = _construct(saved, name, _TensorRef, None)
        self._state: dict[str, Any] = parts["state"]
        self._groups: list[dict[Any, Any]] = parts["param_groups"]
        self._other: dict[Any, Any] = parts.get("other", {})
        whole = isinstance(self._groups, list) and len(self._groups) == len(saved.about["groups"])
        if not whole or not all(isinstance(part, dict) for part in (self._state, self._other, *self._groups)):
            raise DamagedError("the stored optimizer is damaged", where=name)
        self._saved_names = [[parameter for parameter, _ in group] for group in saved.about["groups"]]
        self._saved_shapes = {name: tuple(shape) for group in saved.about["groups"] for name, shape in group}
        self._saved_named: bool = saved.about["named"]
        self._whole = matcher._patterns is None

    def run(self) -> None:
        matcher, optimizer = self._matcher, self._optimizer
        saved_of = self._pair_parameters()
        same_groups = len(self._groups) == len(optimizer.param_groups)
        for index, group in enumerate(optimizer.param_groups):
            options = {**group, **self._groups[index]} if same_groups else group
            for parameter in group["params"]:
                if id(parameter) in saved_of:
                    self._parameter(options, parameter, saved_of[id(parameter)])
        self._match_other()
        if same_groups:
            for index, (options, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=True)):
                self._options(options, group, f"{self._name}.param_groups.{index}")
        if self._whole:
            matcher._call(self._name, lambda: matcher._torch.after_load(optimizer))

    def _pair_parameters(self) -> dict[int, str]:
        """For live parameters, by id, the name under which their state was saved; notes what has no counterpart."""
        matcher, optimizer = self._matcher, self._optimizer
        live_names, named = matcher._live.parameter_names(optimizer)
        counts = [len(names) for names in live_names]
        saved_counts = [len(names) for names in self._saved_names]
        if len(counts) != len(saved_counts):
            matcher._passed_over(
                f"{self._name}: expected {len(counts)} parameter groups, found {len(saved_counts)} in the checkpoint"
            )
        positional = not (named and self._saved_named)
        saved_flat = [name for names in self._saved_names for name in names]
        live_flat = [name for names in live_names for name in names]
        if set(live_flat) != set(saved_flat) and positional and counts == saved_counts:
            pairs = dict(zip(live_flat, saved_flat, strict=True))
        else:
            known = set(saved_flat)
            pairs = {name: name for name in live_flat if name in known}
            for name in live_flat:
                if name not in known and self._concerns(name):
                    matcher._passed_over(f"{self._name}: parameter {name!r} is missing in the checkpoint")
            for name in sorted(known - set(live_flat)):
                if self._concerns(name):
                    matcher._passed_over(f"{self._name}: unexpected, the checkpoint has state for a parameter {name!r}")
            if len(counts) == len(saved_counts):
                for index, (live_group, saved_group) in enumerate(zip(live_names, self._saved_names, strict=True)):
                    moved = (set(live_group) & known) ^ (set(saved_group) & set(live_flat))
                    for name in sorted(filter(self._concerns, moved)):
                        matcher._passed_over(f"{self._name}.param_groups.{index}: parameter {name!r} changed its group")
        result: dict[int, str] = {}
        for group, names in zip(optimizer.param_groups, live_names, strict=True):
            for parameter, name in zip(group["params"], names, strict=True):
                if name in pairs:
                    saved_name = pairs[name]
                    if tuple(parameter.shape) != self._saved_shapes[saved_name]:
                        if not self._concerns(saved_name):
                            continue
                        matcher._differ(
                            f"{self._name}.state.{saved_name}",
                            f"state for a parameter of shape {list(parameter.shape)}",
                            f"that of shape {list(self._saved_shapes[saved_name])}",
                        )
                        continue
                    result[id(parameter)] = saved_name
        return result

    def _concerns(self, parameter_name: str) -> bool:
        """Whether the patterns ask for the state of a parameter as such, and not only for one key of it."""
        return self._whole or self._matcher._selected(f"{self._name}.state.{parameter_name}.*")

    def _parameter(self, group: dict[str, Any], parameter: Any, saved_name: str) -> None:
        optimizer = self._optimizer
        name = f"{self._name}.state.{saved_name}"
        live = optimizer.state.get(parameter) if parameter in optimizer.state else None
        if saved_name not in self._state:
            if live is not None and self._whole:
                self._matcher._actions.append(lambda: optimizer.state.pop(parameter))
            return
        state = self._state[saved_name]

        def device(key: Any) -> Any:
            return self._matcher._torch.state_device(optimizer, group, parameter, key)

        new = self._adopt(state, live, name, device, None)
        if not isinstance(state, dict):
            self._matcher._actions.append(lambda: optimizer.state.__setitem__(parameter, new))
            return

        def assign() -> None:
            if isinstance(live, dict):
                live.clear()
                live.update(new)
            else:
                optimizer.state[parameter] = new

        if new or self._whole:
            self._matcher._actions.append(assign)

    def _adopt(self, saved: Any, live: Any, name: str, device: Callable[[Any], Any], key: Any) -> Any:
        """The saved object with live tensors where they fit and new ones elsewhere; unselected parts stay live."""
        matcher = self._matcher
        if isinstance(saved, _TensorRef):
            if not matcher._selected(name):
                return live
            if matcher._takes(live, saved.index) and (key != "step" or live.device == device(key)):
                matcher._fill(saved.index, live, name)
                return live
            return matcher._make(saved.index, device(key))
        if isinstance(saved, dict):
            inner = live if isinstance(live, dict) else {}
            adopted = {} if self._whole else dict(inner)
            for part, child in saved.items():
                new = self._adopt(child, inner.get(part), _join(name, key_text(part)), device, part)
                if new is not None or child is None:
                    adopted[part] = new
            if type(saved) is dict:
                return adopted
            copied = saved.copy()
            copied.clear()
            copied.update(adopted)
            return copied
        if isinstance(saved, (list, tuple, deque)) and _has_tensor(saved):
            inner_items = list(live) if isinstance(live, (list, tuple, deque)) else []
            items = [
                self._adopt(child, inner_items[i] if i < len(inner_items) else None, f"{name}.{i}", device, key)
                for i, child in enumerate(saved)
            ]
            if isinstance(saved, tuple):
                return tuple.__new__(type(saved), items)
            return deque(items, saved.maxlen) if isinstance(saved, deque) else items
        return saved if matcher._selected(name) else live

    def _match_other(self) -> None:
        optimizer = self._optimizer
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        live_keys = [key for key in optimizer.state if id(key) not in parameters]

        def device(key: Any) -> Any:
            return optimizer.param_groups[0]["params"][0].device

        for key, saved in self._other.items():
            live = optimizer.state.get(key)
            new = self._adopt(saved, live, f"{self._name}.other.{key_text(key)}", device, key)
            self._matcher._actions.append(lambda key=key, new=new: optimizer.state.__setitem__(key, new))  # type: ignore[misc]
        if self._whole:
            for key in live_keys:
                if key not in self._other:
                    self._matcher._actions.append(lambda key=key: optimizer.state.pop(key))  # type: ignore[misc]

    def _options(self, saved: dict[Any, Any], group: dict[Any, Any], name: str) -> None:
        matcher = self._matcher
        defaults = getattr(self._optimizer, "defaults", {})
        for key, value in saved.items():
            option = f"{name}.{key}"
            if key == "params":
                continue
            if key not in group:
                if matcher._selected(option):
                    matcher._passed_over(f"{option}: unexpected, the optimizer has no such option")
                    if not matcher._strict:
                        self._set_option(group, key, value, None, option)
                continue
            self._set_option(group, key, value, group[key], option)
        for key in group:
            # An option that a newer torch has added keeps its default, as torch's own loading has it.
            known = key in saved or key in ("params", "param_names") or key in defaults
            if not known and matcher._selected(f"{name}.{key}"):
                matcher._passed_over(f"{name}.{key}: missing in the checkpoint, an option of the optimizer")

    def _set_option(self, group: dict[Any, Any], key: Any, saved: Any, live: Any, name: str) -> None:
        matcher = self._matcher
        tensor_here = isinstance(live, matcher._torch.Tensor)
        if isinstance(saved, _TensorRef) != tensor_here and live is not None and matcher._selected(name):
            found = _a(type(saved).__name__)
            if isinstance(saved, _TensorRef):
                found = matcher._saved.specs[saved.index].text
            matcher._differ(name, _text(live) if tensor_here else _a(type(live).__name__), found)
            return
        if isinstance(saved, _TensorRef) and tensor_here:
            if matcher._selected(name):
                matcher._fill(saved.index, live, name)
            return
        new = self._adopt(saved, live, name, lambda key: None, key)
        if matcher._selected(name):
            matcher._actions.append(lambda: group.__setitem__(key, new))


def rebuild(saved: Saved, tensor: Callable[[int], Any], *, names: str | Sequence[str] | None = None) -> Any:
    """The saved nesting with new containers; objects become dicts of their state, generators their stored state.

    Args:
        tensor: gives the tensor of an index; called once for each stored tensor, aliases get the same object.
        names: only tensors and values whose dotted name matches. Other entries of dicts are left out, other places in
            sequences are None.

    Raises:
        DamagedError: the saved nesting makes no sense.
    """
    made: dict[int, Any] = {}

    def once(index: int) -> Any:
        root = index if saved.alias_of[index] < 0 else saved.alias_of[index]
        if root not in made:
            made[root] = tensor(root)
        return made[root]

    selected = None if names is None else lambda name: matches(name, names)
    built = _construct(saved.tree().children[0], "", once, selected)
    return {} if built is _KEEP else built


def _construct(item: Any, name: str, tensor: Callable[[int], Any], selected: Callable[[str], bool] | None) -> Any:
    """A new object from a tree of nodes; `_KEEP` if it has leaves and none of them is selected."""
    if isinstance(item, TensorAt):
        return tensor(item.index) if selected is None or selected(name) else _KEEP
    if isinstance(item, ValueOf):
        return item.value if selected is None or selected(name) else _KEEP
    if item.kind in ("object", "generator"):
        return _construct(item.children[0], name, tensor, selected)
    children = [
        _construct(child, _join(name, step_name(item, index)), tensor, selected)
        for index, child in enumerate(item.children)
    ]
    if children and all(child is _KEEP for child in children):
        return _KEEP
    if item.kind in SEQUENCES:
        return container(item, [None if child is _KEEP else child for child in children])
    kept = [index for index, child in enumerate(children) if child is not _KEEP]
    if len(kept) < len(children):
        item = Node(item.kind, item.about, [item.keys[index] for index in kept], [])
        children = [children[index] for index in kept]
    if item.kind != "optimizer":
        return container(item, children)
    parts = dict(zip(item.keys, children, strict=True))
    if isinstance(parts.get("param_groups"), list):
        parts["param_groups"] = [
            {**options, "params": [parameter for parameter, _ in group]} if isinstance(options, dict) else options
            for options, group in zip(parts["param_groups"], item.about["groups"])
        ]
    return parts


@dataclass(slots=True)
class _LiveTensor:
    """A leaf of the live tree."""

    tensor: Any


def _numbered(walk: Walk) -> Any:
    """The live tree with tensors and values at its leaves."""
    tensors = iter(walk.tensors)
    values = iter(walk.values)

    def fill(item: Any) -> Any:
        if not isinstance(item, Node):
            return _LiveTensor(next(tensors)) if item == TENSOR else ValueOf(next(values))
        if item.kind == "object":
            return item
        return Node(item.kind, item.about, item.keys, [fill(child) for child in item.children], item.live)

    return fill(walk.root.children[0])


def _family(node: Node) -> str:
    if node.kind in MAPPINGS or node.kind == "module":
        return "mapping"
    return "sequence" if node.kind in SEQUENCES else node.kind


def _join(name: str, step: str) -> str:
    return f"{name}.{step}" if name else step


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'aeiouAEIOU' else 'a'} {noun}"


def _shown(name: str) -> str:
    return repr(name) if name else "the state"


def _dtype_of(tensor: Any) -> str:
    if isinstance(tensor, np.ndarray):
        return array_dtype(tensor) or str(tensor.dtype)
    return _torch_dtype_name(tensor.dtype)


@lru_cache(maxsize=256)
def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _pointer(tensor: Any) -> int:
    return int(tensor.__array_interface__["data"][0] if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def _text(tensor: Any) -> str:
    return f"{_dtype_of(tensor)}{list(tensor.shape)}"


def _shares_elements(tensor: Any) -> bool:
    """Whether some elements may be one place in memory, as in an expanded tensor."""
    if isinstance(tensor, np.ndarray):
        if tensor.flags.forc:
            return False
        strides = tuple(stride // tensor.itemsize for stride in tensor.strides)
    elif tensor.is_contiguous():
        return False
    else:
        strides = tensor.stride()
    reach = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(strides, tensor.shape) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _has_tensor(item: Any) -> bool:
    if isinstance(item, (dict, list, tuple, deque)):
        return any(map(_has_tensor, item.values() if isinstance(item, dict) else item))
    return isinstance(item, _TensorRef)


_REFILLED = (dict, OrderedDict, defaultdict, Counter, list, set, bytearray, deque)


def _can_refill(live: Any, saved: Any) -> bool:
    """Whether a live container or array can take the content of a saved one and be exactly it."""
    if isinstance(live, np.ndarray):
        same = type(live) is type(saved) and live.dtype == saved.dtype and live.shape == saved.shape
        return same and live.flags.writeable
    if isinstance(live, deque) and isinstance(saved, deque) and live.maxlen != saved.maxlen:
        return False
    return type(live) is type(saved) and type(live) in _REFILLED


class _Refill:
    """Gives live containers the content of saved ones, inner containers too, so that other references see it.

    Two places of the live state can hold one container where the saved ones differed: the second place then gets a
    container of its own.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, tuple[Any, Any]] = {}

    def claims(self, live: Any, saved: Any) -> bool:
        """Whether a live container is still free, or promised the very same content already."""
        _, promised = self._claimed.setdefault(id(live), (live, saved))
        if promised is saved:
            return True
        try:
            return encode_values([promised]) == encode_values([saved])
        except UnsupportedStateError:
            return False

    def fill(self, live: Any, saved: Any) -> None:
        """Give a claimed container its content."""
        if isinstance(live, np.ndarray):
            live[...] = saved
        elif isinstance(live, dict):
            items = {key: self._renewed(live.get(key), value) for key, value in saved.items()}
            live.clear()
            dict.update(live, items)
            if isinstance(live, defaultdict):
                live.default_factory = saved.default_factory
        elif isinstance(live, (list, deque)):
            old = list(live)
            new = [self._renewed(old[i] if i < len(old) else None, value) for i, value in enumerate(saved)]
            live.clear()
            live.extend(new)
        elif isinstance(live, set):
            live.clear()
            live.update(saved)
        else:
            live[:] = saved

    def _renewed(self, live: Any, saved: Any) -> Any:
        if not _can_refill(live, saved) or not self.claims(live, saved):
            return saved
        self.fill(live, saved)
        return live
