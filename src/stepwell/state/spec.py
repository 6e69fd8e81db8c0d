"""What one stored tensor is: dtype names, sizes, and how bytes become a tensor again."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError

# Every dtype that can be stored, with the bytes of one element. The names are those of torch (and of numpy, where
# numpy has the type). `float4_e2m1fn_x2` packs two numbers into each element.
ITEM_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
}

# dtypes that numpy does not have, with the unsigned integer that stands for their bits.
NUMPY_STANDINS: dict[str, str] = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    "float4_e2m1fn_x2": "uint8",
    "complex32": "uint32",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One stored tensor as the layout knows it: dtype name, shape, size in bytes, library and device type."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    kind: str
    device: str

    @property
    def text(self) -> str:
        """Dtype and shape as error messages show them, `float32[3, 4]`."""
        return f"{self.dtype}{list(self.shape)}"


def make_spec(dtype: str, shape: tuple[int, ...], kind: str, device: str) -> TensorSpec:
    """The spec of a tensor; its size in bytes follows from dtype and shape."""
    return TensorSpec(dtype, shape, math.prod(shape) * ITEM_BYTES[dtype], kind, device)


def array_dtype(array: np.ndarray[Any, Any]) -> str | None:
    """The dtype name of a numpy array that is stored as a tensor; None for the kinds that are stored as values.

    Values are: text, dates, structured, extended precision, and everything that is not in native byte order.
    """
    dtype = array.dtype
    if dtype.isbuiltin == 1 and dtype.isnative and dtype.kind in "biufc" and dtype.name in ITEM_BYTES:
        return str(dtype.name)
    return None


def address_of(tensor: Any) -> int:
    """The host address of a contiguous CPU tensor or C-ordered array; 0 for everything else and for empty ones."""
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous or tensor.nbytes == 0:
            return 0
        return int(tensor.__array_interface__["data"][0])
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return int(tensor.data_ptr())
    return 0


def from_bytes(spec: TensorSpec, data: np.ndarray[Any, Any], *, as_numpy: bool) -> Any:
    """The tensor whose bytes are `data`, sharing memory with it.

    Gives a torch tensor where `spec.kind` is "torch" and `as_numpy` is false, else a numpy array. As numpy, the dtypes
    that numpy lacks come as their bits: bfloat16 as uint16, float8 and float4 as uint8, complex32 as uint32. Read-only
    bytes are copied for torch, which has no read-only tensors.

    Args:
        data: uint8, 1-D, contiguous, exactly `spec.nbytes` long.

    Raises:
        UsageError: a torch tensor is asked for in a process that has not imported torch.
    """
    if data.dtype != np.uint8 or data.size != spec.nbytes:
        raise UsageError(
            "these are not the bytes of this tensor",
            expected=f"{spec.nbytes} bytes (uint8) for {spec.text}",
            found=f"{data.size} elements of {data.dtype}",
        )
    if spec.kind == "torch" and not as_numpy:
        if "torch" not in sys.modules:
            raise UsageError(
                "a torch tensor is asked for, but torch is not imported",
                todo="import torch first, or ask for numpy arrays",
            )
        from . import torch_state

        return torch_state.tensor_from_bytes(spec.dtype, spec.shape, data)
    return data.view(NUMPY_STANDINS.get(spec.dtype, spec.dtype)).reshape(spec.shape)
