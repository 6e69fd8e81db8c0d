"""What was read from disk, and a new nesting made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ..errors import DamagedError
from .skeleton import SEQUENCES, Node, TensorAt, ValueOf, container, decode, step_name
from .spec import TensorSpec
from .words import join


@dataclass(slots=True)
class Saved:
    """What was read from disk: see `Flat` for the fields."""

    names: list[str]
    specs: list[TensorSpec]
    alias_of: list[int]
    skeleton: bytes
    values: list[object]

    def tree(self) -> Node:
        """The nesting with its leaves filled in; raises `DamagedError` if the parts do not fit together."""
        count = len(self.names)
        sound = len(self.specs) == count and len(self.alias_of) == count
        for index, (spec, alias) in enumerate(zip(self.specs, self.alias_of)):
            sound &= alias == -1 or (0 <= alias < index and self.alias_of[alias] == -1 and self.specs[alias] == spec)
        if not sound:
            raise DamagedError("the names, specs and ties of the stored tensors do not fit together")
        return decode(self.skeleton, tensor_count=len(self.names), values=self.values)


def matches(name: str, patterns: str | Sequence[str]) -> bool:
    """Whether a dotted name matches one of the patterns, `model.*` (`fnmatch`, case sensitive)."""
    if isinstance(patterns, str):
        return fnmatchcase(name, patterns)
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class _Keep:
    """The live object stays where it is."""


KEEP = _Keep()


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
    built = construct(saved.tree().children[0], "", once, selected)
    return {} if built is KEEP else built


def construct(item: Any, name: str, tensor: Callable[[int], Any], selected: Callable[[str], bool] | None) -> Any:
    """A new object from a tree of nodes; `KEEP` if it has leaves and none of them is selected."""
    if isinstance(item, TensorAt):
        return tensor(item.index) if selected is None or selected(name) else KEEP
    if isinstance(item, ValueOf):
        return item.value if selected is None or selected(name) else KEEP
    if item.kind in ("object", "generator"):
        return construct(item.children[0], name, tensor, selected)
    children = [
        construct(child, join(name, step_name(item, index)), tensor, selected)
        for index, child in enumerate(item.children)
    ]
    if children and all(child is KEEP for child in children):
        return KEEP
    if item.kind in SEQUENCES:
        return container(item, [None if child is KEEP else child for child in children])
    kept = [index for index, child in enumerate(children) if child is not KEEP]
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
