"""The plain values of a step by their dotted names, in short form and as JSON. Shared by show, diff and export."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.errors import UsageError
from stepwell.restore.read import OpenStep
from stepwell.state import RNG_NAME, Saved, TorchValue, encode_values
from stepwell.state.skeleton import Node, ValueOf, step_name
from stepwell.store.checksum import hex_digest
from stepwell.units import format_bytes

LOST_NAMES_SHOWN = 3
SHORT_LENGTH_MAX = 60
JSON_BITS_MAX = 10_000  # Python itself writes no number of more than 4 300 digits
GROUPS_MAX = 20

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = _SHORT.maxfrozenset = _SHORT.maxdeque = 5


def values_of(opened: OpenStep, *, allow_pickle: bool = False) -> dict[str, Any] | None:
    """Every plain value of a step by its dotted name, in the order of the state; None when some are pickled and may
    not be read. Raises `DamagedError`."""
    try:
        saved = opened.saved(allow_pickle=allow_pickle)
    except UsageError:
        return None
    return dict(leaves(saved))


def leaves(saved: Saved) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every plain value; the global random number generators are one value, the last."""
    root = saved.tree()
    yield from _leaves(root.children[0], "")
    if root.about:
        yield RNG_NAME, root.children[1].value


def _leaves(item: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(item, ValueOf):
        yield name, item.value
    elif isinstance(item, Node):
        for index, child in enumerate(item.children):
            if item.kind in ("object", "generator"):
                yield from _leaves(child, name)
            else:
                step = step_name(item, index)
                yield from _leaves(child, f"{name}.{step}" if name else step)


def type_name(value: Any) -> str:
    if isinstance(value, TorchValue):
        return f"torch.{value.kind}"
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def short(value: Any, length_max: int = SHORT_LENGTH_MAX) -> str:
    """A value in a few words; large ones are cut, and never written out on the way."""
    if isinstance(value, TorchValue):
        return str(value.value)
    if isinstance(value, (bytes, bytearray)) and len(value) > 20:
        return f"{format_bytes(len(value))} (xxh3 {hex_digest(bytes(value))[:8]})"
    if isinstance(value, np.ndarray):
        content = f" (xxh3 {hex_digest(value.tobytes())[:8]})" if not value.dtype.hasobject else ""
        return f"{value.dtype} {list(value.shape)}{content}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    text = _SHORT.repr(value)
    if len(text) > length_max:
        text = text[: length_max - 3] + "..."
    if hasattr(value, "__len__") and not isinstance(value, (str, bytes, bytearray)) and len(value) > 5:
        text += f" ({len(value):,} items)"
    return text


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names by their first and last part, `optim.*.exp_avg`; by their first alone where that would be too many."""
    every = list(names)
    for pattern_of in (_first_and_last, _first):
        groups: dict[str, list[str]] = {}
        for name in every:
            groups.setdefault(pattern_of(name), []).append(name)
        if len(groups) <= GROUPS_MAX:
            break
    return groups


def _first_and_last(name: str) -> str:
    parts = name.split(".")
    return f"{parts[0]}.*.{parts[-1]}" if len(parts) > 2 else _first(name)


def _first(name: str) -> str:
    return name.split(".", 1)[0] + (".*" if "." in name else "")


@dataclass(frozen=True)
class Place:
    """Where two values differ first: a path inside them, and what each has there in short form (None: nothing)."""

    where: str
    first: str | None
    second: str | None


def first_difference(a: Any, b: Any, where: str = "") -> Place | None:
    """The first place at which two plain values differ in type or content; None when they are the same."""
    if type(a) is type(b):
        if isinstance(a, dict):
            return _in_mappings(a, b, where)
        if isinstance(a, (list, tuple)):
            return _in_sequences(a, b, where)
        return None if _same(a, b) else Place(where, _brief(a), _brief(b))
    return Place(where, f"{type_name(a)} {_brief(a)}", f"{type_name(b)} {_brief(b)}")


def _brief(value: Any) -> str:
    return short(value, 30)


def _in_sequences(a: Sequence[Any], b: Sequence[Any], where: str) -> Place | None:
    for index, (x, y) in enumerate(zip(a, b)):
        place = first_difference(x, y, f"{where}[{index}]")
        if place is not None:
            return place
    return None if len(a) == len(b) else Place(where, f"{len(a):,} items", f"{len(b):,} items")


def _in_mappings(a: dict[Any, Any], b: dict[Any, Any], where: str) -> Place | None:
    for key, value in a.items():
        if key not in b:
            return Place(f"{where}[{key!r}]", _brief(value), None)
        place = first_difference(value, b[key], f"{where}[{key!r}]")
        if place is not None:
            return place
    for key, value in b.items():
        if key not in a:
            return Place(f"{where}[{key!r}]", None, _brief(value))
    return None


def _same(a: Any, b: Any) -> bool:
    """Equal types and contents; NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(a, (set, frozenset)):
        return bool(a == b)  # encoded, equal sets may come in another order
    return encode_values([a], allow_pickle=True) == encode_values([b], allow_pickle=True)


@dataclass(frozen=True)
class Lost:
    """One way in which a file says less than the step did, and the names that it happened to."""

    what: str
    names: list[str]

    def __str__(self) -> str:
        shown = ", ".join(self.names[:LOST_NAMES_SHOWN])
        more = len(self.names) - LOST_NAMES_SHOWN
        return self.what + (f": {shown}" if shown else "") + (f" and {more:,} more" if more > 0 else "")


class Losses:
    """Gathers what a file cannot carry, a line for each kind of loss and not for each tensor."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, what: str, name: str | None = None) -> None:
        names = self._names.setdefault(what, [])
        if name is not None:
            names.append(name)

    def all(self) -> list[Lost]:
        return [Lost(what, names) for what, names in self._names.items()]


def to_json(value: Any, name: str, losses: Losses) -> Any:
    """A value as JSON would have it. What JSON has no form for becomes something near, which is noted.

    Mappings with keys of text, lists, text, whole numbers, finite floats, truth values and None are kept exactly.
    """
    kind = type(value)
    if kind is int and value.bit_length() > JSON_BITS_MAX:
        losses.add("a whole number too large for JSON as text", name)
        return short(value)
    if value is None or kind in (bool, str, int):
        return value
    if kind is float and math.isfinite(value):
        return value
    if isinstance(value, dict) and all(type(key) is str for key in value):
        if kind is not dict:
            losses.add(f"{type_name(value)} as a JSON object", name)
        return {key: to_json(item, f"{name}.{key}", losses) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if kind is not list:
            losses.add(f"{type_name(value)} as a JSON list", name)
        return [to_json(item, f"{name}.{index}", losses) for index, item in enumerate(value)]
    losses.add(f"{type_name(value)} as text" + (", infinite or NaN" if kind is float else ""), name)
    return short(value)
