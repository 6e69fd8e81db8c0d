"""Put a saved state back into a live one: check everything first, then say where each tensor's bytes go.

Matching follows the nesting, not the dotted names: a saved container meets the live one at the same place. Names are
for messages and for the patterns of `names=`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from ..errors import StateClobbered, StateMismatchError, UsageError
from . import generators
from .flatten import RNG_NAME, Walk, collector_paused, memory_key
from .match_optimizer import OptimizerMatch
from .rebuild import KEEP, Saved, construct, matches
from .refill import Refill, can_refill, put_all
from .skeleton import (
    MAPPINGS,
    SEQUENCES,
    TENSOR,
    Node,
    TensorAt,
    ValueOf,
    expanded,
    key_of,
    key_text,
    step_name,
)
from .spec import NUMPY_STANDINS, TensorSpec, address_of, from_bytes
from .words import dtype_of, join, noun, shown, tensor_text

_LISTED_MAX = 20


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

        Lets go of the tensors afterwards: a second call does nothing.

        Raises:
            StateClobbered: a `load_state_dict` of the user's or torch's raised; the state is partly restored.
        """
        for action in self._actions:
            action()
        self._actions.clear()
        self._held.clear()


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
        UsageError: `names` match nothing.
        DamagedError: the saved nesting makes no sense.
        UnsupportedStateError: the live state has something that could not have been saved.
    """
    with collector_paused():
        return _match(state, saved, strict, cast, names, rng, allow_pickle)


def _match(
    state: Any,
    saved: Saved,
    strict: bool,
    cast: bool,
    names: str | Sequence[str] | None,
    rng: bool,
    allow_pickle: bool,
) -> RestorePlan:
    tree = saved.tree()
    live = Walk(state, allow_pickle=allow_pickle, rng=False, live=True)
    matcher = Matcher(saved, live, strict=strict, cast=cast, patterns=names)
    try:
        matcher.run(tree, state, rng=rng)
    except RuntimeError:
        live.refuse_bad_tensors()
        raise
    return matcher.plan()


class Matcher:
    def __init__(
        self, saved: Saved, live: Walk, *, strict: bool, cast: bool, patterns: str | Sequence[str] | None
    ) -> None:
        self.saved = saved
        self.live = live
        self.strict = strict
        self._cast = cast
        self.patterns = patterns
        self._inside_module = 0
        self._any_found = False  # whether any name has matched the patterns
        self._problems: list[str] = []
        self._skipped: list[str] = []
        self._copies: list[Copy] = []
        self.actions: list[Callable[[], None]] = []
        self._held: list[Any] = []
        self._written: dict[Any, tuple[Any, int, str]] = {}
        self._made: dict[int, Any] = {}
        self._tied = {alias for alias in saved.alias_of if alias >= 0}
        self._refill = Refill()
        self._emptied: set[int] = set()
        self.torch = live.torch

    def run(self, tree: Node, state: Any, *, rng: bool) -> None:
        result = self._visit(tree.children[0], _numbered(self.live), "")
        if result is not KEEP:
            kind = noun(type(state).__name__)
            self._problems.append(f"the state is {kind}, which cannot be updated in place: use a dict or a list")
        if tree.about and rng and self.selected(RNG_NAME):
            states = tree.children[1].value
            self.call(RNG_NAME, lambda: generators.restore_global(states))

    def plan(self) -> RestorePlan:
        if self.patterns is not None and not self._any_found:
            there = ", ".join(map(shown, self.saved.names[:5])) or "no tensor"
            raise UsageError(
                "no name in the checkpoint matches, so nothing would be restored",
                expected=f"patterns for names such as {there}",
                found=repr(self.patterns),
            )
        if self._problems:
            listed = self._problems[:_LISTED_MAX]
            more = len(self._problems) - len(listed)
            lines = "".join(f"\n    {problem}" for problem in listed)
            error = StateMismatchError(
                f"the saved state and the given one differ in {len(self._problems)} places; nothing was changed"
                + lines
                + (f"\n    ... and {more} more; the error's `differences` has all of them" if more else ""),
                todo="give the state the form it was saved with; or loosen with strict=False (missing and unexpected "
                "names), cast=True (dtypes), names=... (only some of it)",
            )
            error.differences = tuple(self._problems)
            raise error
        self._copies.sort(key=lambda planned: planned.index)
        return RestorePlan(self._copies, self._skipped, self.actions, [self._held, self._written])

    # Differences

    def differ(self, name: str, expected: str, found: str) -> None:
        self._problems.append(f"{shown(name)}: expected {expected}, found {found} in the checkpoint")

    def passed_over(self, text: str) -> None:
        (self._problems if self.strict else self._skipped).append(text)

    def _missing(self, live: Any, name: str) -> None:
        for leaf, what in self._leaves(live, name):
            self.passed_over(f"{shown(leaf)}: missing in the checkpoint, expected {what}")

    def _unexpected(self, saved: Any, name: str) -> None:
        for leaf, what in self._leaves(saved, name):
            self.passed_over(f"{shown(leaf)}: unexpected, the checkpoint has {what} that the state has no place for")

    def _leaves(self, item: Any, name: str) -> list[tuple[str, str]]:
        """The selected leaves below a saved or live item, with what they are."""
        if isinstance(item, Node) and item.kind not in ("object", "generator"):
            found = []
            for index, child in enumerate(item.children):
                found += self._leaves(child, join(name, step_name(item, index)))
            return found
        if not self.selected(name):
            return []
        if isinstance(item, TensorAt):
            return [(name, self.saved.specs[item.index].text)]
        if isinstance(item, _LiveTensor):
            return [(name, tensor_text(item.tensor))]
        return [(name, self._what(item))]

    def selected(self, name: str) -> bool:
        if self.patterns is None:
            return True
        found = matches(name, self.patterns)
        self._any_found = self._any_found or found
        return found

    # The walk: returns `KEEP`, or what the parent must put in the place of the live item.

    def _visit(self, saved: Any, live: Any, name: str) -> Any:
        if isinstance(live, ValueOf):
            return self._visit_value(saved, live.value, name)
        if isinstance(live, _LiveTensor):
            if isinstance(saved, TensorAt):
                if self.patterns is not None and not self.selected(name):
                    return KEEP
                if not self._inside_module and self._takes_no_writing(live.tensor, saved.index):
                    return self._build(saved, name)
                self.fill(saved.index, live.tensor, name)
                return KEEP
            if not self._any_selected(saved, name):
                return KEEP
            if isinstance(saved, ValueOf) and saved.value is None:
                return None
            self.differ(name, tensor_text(live.tensor), self._what(saved))
            return KEEP
        if live.kind in MAPPINGS | SEQUENCES and not live.children:
            return self._fill_empty(saved, live.live, name)
        if isinstance(saved, ValueOf) and live.kind in MAPPINGS | SEQUENCES | {"module"}:
            if saved.value is None and live.kind != "module":
                return None if self.selected(name) else KEEP
            saved = expanded(saved.value) or saved
        if not isinstance(saved, Node) or _family(saved) != _family(live):
            if self._any_selected(saved, name):
                self.differ(name, self._what(live), self._what(saved))
            return KEEP
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
            if not self.selected(name):
                return KEEP
            if not can_refill(live, saved.value) or not self._refill.claims(live, saved.value):
                return saved.value
            self.actions.append(lambda: self._refill.fill(live, saved.value))
            return KEEP
        if live is None:
            return self._build(saved, name)
        place = expanded(live)
        if place is not None and not place.children:
            return self._fill_empty(saved, live, name)
        if place is not None and isinstance(saved, Node):
            return self._visit(saved, place, name)
        if self._any_selected(saved, name):
            self.differ(name, noun(type(live).__name__), self._what(saved))
        return KEEP

    def _fill_empty(self, saved: Any, live: Any, name: str) -> Any:
        if isinstance(saved, Node) and not saved.children and saved.kind in MAPPINGS | SEQUENCES:
            return KEEP
        built = self._build(saved, name)
        if built is KEEP:
            return KEEP
        if id(live) in self._emptied:
            return built
        self._emptied.add(id(live))
        self._held.append(live)
        if isinstance(live, dict) and isinstance(built, dict):
            self.actions.append(lambda: put_all(live, built))
            return KEEP
        if isinstance(live, (list, deque)) and isinstance(built, (list, tuple, deque)):
            self.actions.append(lambda: live.extend(built))
            return KEEP
        return built

    def _mapping(self, saved: Node, live: Node, name: str) -> Any:
        target = live.live
        for key, result in self._pairs(saved, live, name):
            self.actions.append(partial(setitem, target, key, result))
        return KEEP

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
            if live.kind == "module" and str(entry).endswith("_extra_state") and self.selected(child_name):
                # Extra state is whatever the module says it is; its form may change from step to step.
                result = self._build(child, child_name)
            else:
                result = self._visit(child, place, child_name)
            if result is not KEEP:
                changed.append((key_of(entry), result))
        for entry, place in places.items():
            self._missing(place, join(name, key_text(key_of(entry))))
        return changed

    def _sequence(self, saved: Node, live: Node, name: str) -> Any:
        items = list(live.live)
        changed: dict[int, Any] = {}
        for index in range(max(len(saved.children), len(items))):
            child_name = join(name, str(index))
            if index >= len(items):
                self._unexpected(saved.children[index], child_name)
            elif index >= len(saved.children):
                self._missing(live.children[index], child_name)
            else:
                result = self._visit(saved.children[index], live.children[index], child_name)
                if result is not KEEP:
                    changed[index] = result
        if not changed:
            return KEEP
        target = live.live
        if isinstance(target, tuple):
            new = [changed.get(index, item) for index, item in enumerate(items)]
            return tuple.__new__(type(target), new)

        def assign() -> None:
            for index, item in changed.items():
                target[index] = item

        self.actions.append(assign)
        return KEEP

    def _module(self, saved: Node, live: Node, name: str) -> Any:
        module, state = live.live
        self._inside_module += 1  # what a module holds is put back by its own load_state_dict
        changed = self._pairs(saved, live, name)
        self._inside_module -= 1
        if changed or (self._any_selected(saved, name) and self.torch.needs_load(module, state)):
            # A copy keeps the attribute in which torch holds the versions of the modules.
            loaded = copy(state)
            loaded.update(changed)
            self.call(name, lambda: module.load_state_dict(loaded))
        return KEEP

    def _generator(self, saved: Node, live: Node, name: str) -> Any:
        if not self.selected(name):
            return KEEP
        state = saved.children[0].value if isinstance(saved.children[0], ValueOf) else None
        why = generators.why_not(live.live, state) if saved.about == live.about else f"found a {saved.about}"
        if why is None:
            self.call(name, lambda: generators.put_back(live.live, state))  # type: ignore[arg-type]
        else:
            self._problems.append(f"{shown(name)}: a {live.about} cannot be restored: {why}")
        return KEEP

    def _object(self, saved: Node, live: Any, name: str) -> Any:
        leaves = self._leaf_names(saved.children[0], name)
        selected = [leaf for leaf in leaves if self.selected(leaf)]
        if not selected:
            return KEEP
        if len(selected) < len(leaves):
            self.passed_over(f"{shown(name)}: an object is restored as a whole, but the patterns match a part of it")
            return KEEP
        state = self._build(saved.children[0], name)
        self.call(name, lambda: live.load_state_dict(state))
        return KEEP

    def call(self, name: str, load: Callable[[], Any]) -> None:
        def action() -> None:
            try:
                load()
            except Exception as error:
                raise StateClobbered(
                    f"restoring {shown(name)} failed after the tensors had been written: {error}",
                    todo="rebuild the state and restore it again",
                ) from error

        self.actions.append(action)

    # Tensors

    def fill(self, index: int, target: Any, name: str) -> None:
        """Plan the copy of a saved tensor into a live one, or note why it does not fit."""
        spec = self.saved.specs[index]
        dtype = dtype_of(target)
        if target.shape != spec.shape or (dtype != spec.dtype and not self._castable(spec.dtype, target, dtype)):
            self.differ(name, tensor_text(target), spec.text)
            return
        address = address_of(target) if dtype == spec.dtype else 0
        why = self._why_not(target, address)
        if why is not None:
            self._problems.append(f"{shown(name)}: the live tensor cannot be filled, it {why}")
            return
        if spec.nbytes == 0:
            return
        root = self._root(index)
        key, earlier = self._place_of(target, address)
        if earlier is not None:
            if earlier[1] != root:
                self._problems.append(
                    f"{shown(name)}: shares its memory with {shown(earlier[2])}, but the two were saved apart"
                )
            return
        self._written[key] = (target, root, name)
        if root in self._tied and dtype == spec.dtype:
            self._made.setdefault(root, target)
        self._copies.append(Copy(root, address, None if address else self._writer(target, spec)))

    def _place_of(self, target: Any, address: int) -> tuple[Any, tuple[Any, int, str] | None]:
        """The key of a live tensor in `_written`, and what is to be written to this very memory already.

        Nearly always the address alone tells tensors apart; only views that start together need the longer key.
        """
        pointer = address or _pointer(target)
        first = self._written.get(pointer)
        if first is None:
            return pointer, None
        key = memory_key(target)
        if memory_key(first[0]) == key:
            return pointer, first
        return key, self._written.get(key)

    def _root(self, index: int) -> int:
        """The index under which the bytes of a tensor are stored."""
        alias = self.saved.alias_of[index]
        return index if alias < 0 else alias

    def takes(self, live: Any, index: int) -> bool:
        """Whether a live object is a tensor of the saved dtype and shape that nothing else is written to."""
        spec = self.saved.specs[index]
        if not isinstance(live, np.ndarray) and not (self.torch is not None and isinstance(live, self.torch.Tensor)):
            return False
        if (
            live.shape != spec.shape
            or dtype_of(live) != spec.dtype
            or self._why_not(live, address_of(live)) is not None
        ):
            return False
        _, earlier = self._place_of(live, 0)
        return earlier is None or earlier[1] == self._root(index)

    def _takes_no_writing(self, target: Any, index: int) -> bool:
        """Whether a tensor fits in all but that it cannot be written to: then its container gets a new one."""
        spec = self.saved.specs[index]
        if isinstance(target, np.ndarray):
            unwritable = not target.flags.writeable or _shares_elements(target)
        else:
            unwritable = 0 in target.stride() and _shares_elements(target)
        return bool(unwritable and target.shape == spec.shape and dtype_of(target) == spec.dtype)

    def _why_not(self, target: Any, address: int) -> str | None:
        """Why a live tensor cannot be written to; one with a host address of its own has nothing odd about it."""
        if isinstance(target, np.ndarray):
            if not target.flags.writeable:
                return "is a read-only array"
        elif address:
            return None
        else:
            why: str | None = self.torch.why_not(target)
            if why is not None:
                return why
        return "is an expanded view whose elements share memory" if _shares_elements(target) else None

    def _writer(self, target: Any, spec: TensorSpec) -> Callable[[np.ndarray[Any, Any]], None]:
        if not isinstance(target, np.ndarray):
            writer: Callable[[np.ndarray[Any, Any]], None] = self.torch.writer(target, spec)
            return writer

        def store(data: np.ndarray[Any, Any]) -> None:
            np.copyto(target, from_bytes(spec, data, as_numpy=True), casting="same_kind")

        return store

    def _castable(self, source: str, target: Any, dtype: str) -> bool:
        if not self._cast:
            return False
        if isinstance(target, np.ndarray):
            return source not in NUMPY_STANDINS and np.can_cast(np.dtype(source), np.dtype(dtype), casting="same_kind")
        return bool(self.torch.can_cast(source, dtype))

    def make(self, index: int, device: Any = None) -> Any:
        """A tensor for a saved one that has no place yet: new, or the one that it was tied to."""
        spec = self.saved.specs[index]
        root = self._root(index)
        if root in self._tied and root in self._made:
            twin = self._made[root]
            if isinstance(twin, np.ndarray) == (spec.kind == "numpy"):
                return twin
        if spec.kind == "torch" and self.torch is None:
            raise UsageError("the checkpoint has torch tensors, but torch is not imported", todo="import torch first")
        if spec.kind == "numpy":
            made: Any = np.empty(spec.shape, spec.dtype)
        else:
            made = self.torch.new_tensor(spec, device or self.torch.device_here(spec))
        if spec.nbytes:
            address = address_of(made)
            self._held.append(made)
            self._copies.append(Copy(root, address, None if address else self._writer(made, spec)))
        self._made[root] = made
        return made

    def _build(self, saved: Any, name: str) -> Any:
        """A new object from a saved tree, its tensors to be filled; `KEEP` if nothing of it is selected."""
        return construct(saved, name, self.make, self.selected if self.patterns is not None else None)

    # Optimizers

    def _optimizer(self, saved: Node, optimizer: Any, name: str) -> Any:
        if self._any_selected(saved, name):
            OptimizerMatch(self, saved, optimizer, name).run()
        return KEEP

    # Words

    def _what(self, item: Any) -> str:
        if isinstance(item, TensorAt):
            return self.saved.specs[item.index].text
        if isinstance(item, ValueOf):
            return noun(type(item.value).__name__)
        if item.kind in MAPPINGS | SEQUENCES:
            return f"{noun(item.kind)} of {len(item.children)}"
        return noun(item.kind) if item.kind in ("module", "optimizer") else f"an object ({item.about})"

    def _leaf_names(self, item: Any, name: str) -> list[str]:
        if not isinstance(item, Node):
            return [name]
        names = []
        for index, child in enumerate(item.children):
            inner = name if item.kind in ("object", "generator") else join(name, step_name(item, index))
            names += self._leaf_names(child, inner)
        return names

    def _any_selected(self, item: Any, name: str) -> bool:
        return self.patterns is None or any(self.selected(leaf) for leaf in self._leaf_names(item, name))


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


def _pointer(tensor: Any) -> int:
    return int(tensor.__array_interface__["data"][0] if isinstance(tensor, np.ndarray) else tensor.data_ptr())


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
