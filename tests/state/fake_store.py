"""A store in memory: takes the bytes of a flattened state and puts them back the way the reader does."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepwell.state import (
    Flat,
    RestorePlan,
    Saved,
    decode_values,
    encode_values,
    flatten,
    from_bytes,
    match,
    rebuild,
)


def bytes_of(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor's elements in row-major order as uint8."""
    if isinstance(tensor, np.ndarray):
        return np.frombuffer(tensor.tobytes(), np.uint8).copy()
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return tensor.detach().cpu().contiguous().clone().reshape(-1).view(torch.uint8).numpy()


@dataclass
class Stored:
    saved: Saved
    data: dict[int, np.ndarray[Any, Any]]
    flat: Flat

    @property
    def stored_bytes(self) -> int:
        return sum(data.size for data in self.data.values())

    def restore(self, state: Any, **options: Any) -> RestorePlan:
        plan = match(state, self.saved, **options)
        for copy in plan.copies:
            data = self.data[copy.index]
            if copy.address:
                ctypes.memmove(copy.address, data.ctypes.data, data.size)
            else:
                assert copy.store is not None
                copy.store(data)
        plan.finish()
        return plan

    def load(self, *, as_numpy: bool = False, **options: Any) -> Any:
        def tensor(index: int) -> Any:
            return from_bytes(self.saved.specs[index], self.data[index].copy(), as_numpy=as_numpy)

        return rebuild(self.saved, tensor, **options)


def store(state: Any, *, allow_pickle: bool = False, **options: Any) -> Stored:
    flat = flatten(state, allow_pickle=allow_pickle, **options)
    data = {}
    for index, (tensor, spec, alias) in enumerate(zip(flat.tensors, flat.specs, flat.alias_of, strict=True)):
        if alias < 0:
            data[index] = bytes_of(tensor)
            assert data[index].size == spec.nbytes
    values = decode_values(encode_values(flat.values, allow_pickle=allow_pickle), allow_pickle=allow_pickle)
    saved = Saved(list(flat.names), list(flat.specs), list(flat.alias_of), bytes(flat.skeleton), values)
    return Stored(saved, data, flat)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors or arrays have the same dtype, shape and bits."""
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((bytes_of(a) == bytes_of(b)).all())
