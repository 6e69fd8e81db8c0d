"""Two final states, compared bit for bit. No torch in here: a state is written as named arrays of bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """One part of two states. `difference` names the first thing that differs; None when nothing does."""

    name: str
    tensor_count: int
    value_count: int
    bytes: int
    difference: str | None


def flatten(value: Any, path: str = "") -> dict[str, tuple[str, Bytes]]:
    """Every tensor and plain value below `value` by its path, each as (its kind in words, its bytes).

    Tensors, numpy arrays, dicts, lists and tuples, whatever has a `state_dict`, and values whose `repr` tells all of
    them: floats do, to the last bit.
    """
    if hasattr(value, "state_dict"):
        value = value.state_dict()
    if isinstance(value, Mapping):
        items = [(str(key), one) for key, one in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(str(index), one) for index, one in enumerate(value)]
    else:
        return {path: _leaf(value)}
    kind = f"{type(value).__name__} of {len(items)}"
    flat = {path: (kind, np.zeros(0, np.uint8))} if path else {}
    for name, one in items:
        flat |= flatten(one, f"{path}/{name}" if path else name)
    return flat


def _leaf(value: Any) -> tuple[str, Bytes]:
    if hasattr(value, "detach"):  # a torch tensor; viewed as bytes first, for numpy does not know every dtype of torch
        import torch

        flat = value.detach().cpu().contiguous().reshape(-1)
        return f"tensor {value.dtype} {list(value.shape)}", flat.view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return f"tensor {value.dtype} {list(value.shape)}", np.frombuffer(value.tobytes(), np.uint8)
    return type(value).__name__, np.frombuffer(repr(value).encode(), np.uint8)


def write_state(state: Mapping[str, Any], file: Path) -> None:
    """Write a state for `compare`: one line of JSON with (path, kind, bytes) of each, then all their bytes.

    A file that is there is replaced.
    """
    flat = flatten(state)
    index = [(path, kind, len(content)) for path, (kind, content) in flat.items()]
    with open(file, "wb") as out:
        out.write(json.dumps(index).encode() + b"\n")
        for _, content in flat.values():
            out.write(content.tobytes())


def read_state(file: Path) -> dict[str, tuple[str, Bytes]]:
    """What `write_state` wrote."""
    with open(file, "rb") as source:
        index = json.loads(source.readline())
        return {path: (kind, np.frombuffer(source.read(size), np.uint8)) for path, kind, size in index}


def compare(
    expected: Mapping[str, tuple[str, Bytes]], found: Mapping[str, tuple[str, Bytes]], parts: Mapping[str, str]
) -> list[Part]:
    """Compare by part; `parts` gives the name to show for each first component of the paths, in the order to show.

    Every path belongs to a part: one that `parts` does not name becomes a part under its own name.
    """
    owners = dict.fromkeys([*parts, *(path.split("/")[0] for path in [*expected, *found])])
    return [_compare_part(parts.get(owner, owner), _below(expected, owner), _below(found, owner)) for owner in owners]


def _below(flat: Mapping[str, tuple[str, Bytes]], owner: str) -> dict[str, tuple[str, Bytes]]:
    return {path: one for path, one in flat.items() if path.split("/")[0] == owner}


def _compare_part(name: str, expected: dict[str, tuple[str, Bytes]], found: dict[str, tuple[str, Bytes]]) -> Part:
    difference = None if expected else "nothing to compare"
    for path in dict.fromkeys([*expected, *found]):
        difference = _difference(path, expected.get(path), found.get(path))
        if difference:
            break
    tensors = [content for kind, content in expected.values() if kind.startswith("tensor ")]
    values = [kind for kind, _ in expected.values() if not kind.startswith("tensor ") and " of " not in kind]
    return Part(name, len(tensors), len(values), sum(len(content) for content in tensors), difference)


def _difference(path: str, expected: tuple[str, Bytes] | None, found: tuple[str, Bytes] | None) -> str | None:
    if expected is None or found is None:
        return f"{path} is only in the {'expected' if found is None else 'found'} state"
    if expected[0] != found[0]:
        return f"{path} is {found[0]}, expected {expected[0]}"
    if np.array_equal(expected[1], found[1]):
        return None
    if not expected[0].startswith("tensor "):
        return f"{path} is {found[1].tobytes().decode()}, expected {expected[1].tobytes().decode()}"
    different = np.flatnonzero(expected[1] != found[1])
    return f"{path}: {len(different)} of {len(expected[1])} bytes differ, the first at byte {different[0]}"
