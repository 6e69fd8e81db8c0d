"""The nesting of a state: a tree of containers and objects whose leaves are tensors and values.

While a state is flattened the leaves are the marks `TENSOR` and `VALUE`: leaves are numbered in the order of the walk,
so the number is implied, and two trees of the same layout compare equal. `encode` gives the bytes that are stored,
`decode` a tree whose leaves are `TensorAt` and `ValueOf`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DamagedError
from .values import DEPTH_MAX, decode_values, encode_values, factory_named, namedtuple_type

TENSOR = 0
VALUE = 1

MAPPINGS = frozenset({"dict", "OrderedDict", "defaultdict", "Counter"})
SEQUENCES = frozenset({"list", "tuple", "deque", "namedtuple"})
WRAPPERS = frozenset({"module", "optimizer", "object", "generator"})


@dataclass(slots=True)
class Node:
    """One container or object.

    Attributes:
        kind: one of `MAPPINGS`, `SEQUENCES`, `WRAPPERS`, or "root".
        about: what else must be known to build it: a default factory's name, a deque's length, a named tuple's type,
            an object's class, an optimizer's groups of parameters, whether the root carries generator states.
        keys: of a mapping or module, one for each child: a str as it is, any other key as the bytes of its value
            (1, 1.0 and True are equal in Python but different keys here).
        children: nodes and leaves.
        live: the object itself, where the tree was made to be restored into.
    """

    kind: str
    about: Any
    keys: list[str | bytes]
    children: list[Any]
    live: Any = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class TensorAt:
    """A leaf: the tensor of that index."""

    index: int


@dataclass(slots=True)
class ValueOf:
    """A leaf: this value."""

    value: Any


def key_entry(key: Any) -> str | bytes:
    """How a key is kept in `Node.keys`; raises `UnsupportedStateError` for a key that cannot be stored."""
    return key if type(key) is str else encode_values([key])


def key_of(entry: str | bytes) -> Any:
    """The key that `key_entry` kept."""
    return entry if isinstance(entry, str) else decode_values(entry)[0]


def encode(root: Node) -> bytes:
    """A tree as bytes; the same tree always gives the same bytes."""
    return encode_values([_plain(root)])


def _plain(node: Any) -> Any:
    if not isinstance(node, Node):
        return node
    return [node.kind, node.about, node.keys, [_plain(child) for child in node.children]]


def decode(data: bytes, *, tensor_count: int, values: list[object]) -> Node:
    """The tree that `encode` made bytes of, its leaves numbered.

    Raises:
        DamagedError: the bytes are no tree, or do not have exactly these tensors and values.
    """
    plain = decode_values(data)
    builder = _Builder(tensor_count, values)
    try:
        if len(plain) != 1:
            raise ValueError("not one tree")
        root = builder.build(plain[0], 0)
        if not isinstance(root, Node) or root.kind != "root":
            raise ValueError("the tree has no root")
        if builder.tensors_seen != tensor_count or builder.values_seen != len(values):
            raise ValueError(
                f"{builder.tensors_seen} tensors and {builder.values_seen} values in the tree, "
                f"{tensor_count} and {len(values)} stored"
            )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise DamagedError("the stored nesting of the state is damaged", found=str(error)) from error
    return root


class _Builder:
    def __init__(self, tensor_count: int, values: list[object]) -> None:
        self.tensors_seen = 0
        self.values_seen = 0
        self._tensor_count = tensor_count
        self._values = values

    def build(self, plain: Any, depth: int) -> Any:
        if type(plain) is int:
            if plain == TENSOR:
                self.tensors_seen += 1
                return TensorAt(self.tensors_seen - 1)
            if plain == VALUE:
                self.values_seen += 1
                return ValueOf(self._values[self.values_seen - 1])
            raise ValueError(f"{plain} is not a leaf")
        # An object, its state and the root are levels of the tree but not of the user's nesting.
        if depth > 2 * DEPTH_MAX + 2:
            raise ValueError(f"nested deeper than {DEPTH_MAX} levels")
        kind, about, keys, children = plain
        if type(keys) is not list or type(children) is not list:
            raise ValueError("keys and children are not lists")
        if kind in MAPPINGS or kind in ("module", "optimizer"):
            if len(keys) != len(children) or len(set(keys)) != len(keys):
                raise ValueError(f"{len(keys)} keys, some twice or without a child, in a {kind}")
            if any(type(key) not in (str, bytes) for key in keys):
                raise ValueError(f"a key of a {kind} is not text")
            for key in keys:
                hash(key_of(key))
        elif keys or not (kind in SEQUENCES or (kind in ("root", "object", "generator") and children)):
            raise ValueError(f"{kind!r} is not a kind of container")
        node = Node(kind, about, keys, [self.build(child, depth + 1) for child in children])
        _check_about(node)
        return node


def _check_about(node: Node) -> None:
    if node.kind == "defaultdict":
        factory_named(node.about)
    elif node.kind == "namedtuple":
        module, qualname, fields = node.about
        namedtuple_type(module, qualname, tuple(fields))
        if len(fields) != len(node.children):
            raise ValueError("a named tuple with too many or too few items")
    elif node.kind == "deque":
        if node.about is not None and (type(node.about) is not int or node.about < len(node.children)):
            raise ValueError(f"{node.about!r} is not the length of a deque")
    elif node.kind == "root":
        if type(node.about) is not bool or len(node.children) != 1 + node.about:
            raise ValueError("the root is not a state with or without generators")
    elif node.kind == "optimizer":
        if set(node.keys) - {"state", "param_groups", "other"} or not {"state", "param_groups"} <= set(node.keys):
            raise ValueError(f"an optimizer of {node.keys}")
        if type(node.about["named"]) is not bool:
            raise ValueError("parameters with names or without?")
        seen: set[str] = set()
        for group in node.about["groups"]:
            for name, shape in group:
                if type(name) is not str or name in seen or any(type(size) is not int for size in shape):
                    raise ValueError(f"{name!r} of shape {shape!r} is not a parameter, or twice")
                seen.add(name)
    elif node.kind in ("object", "generator") and (type(node.about) is not str or len(node.children) != 1):
        raise ValueError(f"{node.about!r} is not the name of a class")


def container(node: Node, children: list[Any]) -> Any:
    """A new Python container of a node's kind around built children; a module becomes a dict."""
    if node.kind in MAPPINGS or node.kind == "module":
        pairs = list(zip(map(key_of, node.keys), children, strict=True))
        if node.kind == "OrderedDict":
            return OrderedDict(pairs)
        if node.kind == "defaultdict":
            return defaultdict(factory_named(node.about), pairs)
        if node.kind == "Counter":
            counter: Counter[Any] = Counter()
            dict.update(counter, pairs)
            return counter
        return dict(pairs)
    if node.kind == "list":
        return children
    if node.kind == "deque":
        return deque(children, maxlen=node.about)
    if node.kind == "namedtuple":
        module, qualname, fields = node.about
        return tuple.__new__(namedtuple_type(module, qualname, tuple(fields)), children)
    return tuple(children)


def expanded(value: Any) -> Node | None:
    """A container of values as a node with one leaf for each item; None for a value that is no container."""
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict, Counter):
        children = [ValueOf(item) for item in value.values()]
        return Node(kind.__name__, None, [key_entry(key) for key in value], children, value)
    if kind in (list, tuple, deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        name = kind.__name__ if kind in (list, tuple, deque) else "namedtuple"
        return Node(name, None, [], [ValueOf(item) for item in value], value)
    return None


def step_name(node: Node, index: int) -> str:
    """The part of a dotted name that leads to a child."""
    if node.keys:
        return key_text(key_of(node.keys[index]))
    return str(index)


def key_text(key: Any) -> str:
    """A key as part of a dotted name."""
    return key if type(key) is str else str(key.item() if isinstance(key, np.generic) else key)
