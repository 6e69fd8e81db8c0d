"""How far two tensors are apart, for every dtype that can be stored, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from stepwell.state import ITEM_BYTES

Array = npt.NDArray[Any]

# 8-bit floats: (bits of the exponent, bits of the mantissa, bias, what the largest exponent means).
_EIGHT_BITS = {
    "float8_e4m3fn": (4, 3, 7, "nan at the end"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "nan is minus zero"),
    "float8_e5m2fnuz": (5, 2, 16, "nan is minus zero"),
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Magnitudes:
    """`count` elements have other bytes; of those, `not_finite_count` are NaN or infinite on a side; `largest` is the
    largest |a - b| of the others, None when there are none."""

    count: int
    not_finite_count: int
    largest: float | None


def magnitudes(dtype: str, first: memoryview, second: memoryview) -> Magnitudes:
    """Compare the bytes of two tensors (or the same part of each) of one dtype. Lengths are equal, whole elements."""
    item_bytes = ITEM_BYTES[dtype]
    a = np.frombuffer(first, dtype=np.uint8).reshape(-1, item_bytes)
    b = np.frombuffer(second, dtype=np.uint8).reshape(-1, item_bytes)
    differing = (a != b).any(axis=1)
    count = int(np.count_nonzero(differing))
    if not count or dtype == "bool":
        return Magnitudes(count, 0, None)
    x, y = decoded(dtype, a[differing]), decoded(dtype, b[differing])
    if x.dtype.kind in "iu":
        # The larger minus the smaller always fits into the unsigned type, whatever the signs are.
        gap = np.maximum(x, y) - np.minimum(x, y)
        return Magnitudes(count, 0, float(gap.view(f"u{gap.itemsize}").max()))
    finite = np.isfinite(x) & np.isfinite(y)
    not_finite = finite.reshape(count, -1).all(axis=1)
    with np.errstate(over="ignore"):
        gaps = np.abs(x[finite] - y[finite])
    return Magnitudes(count, count - int(np.count_nonzero(not_finite)), float(gaps.max()) if gaps.size else None)


def decoded(dtype: str, raw: Array) -> Array:
    """Elements as numbers: integers as they are, floats as float64, complex as complex128.

    Args:
        raw: uint8, (elements, bytes of one). float4_e2m1fn_x2 gives two numbers for each.
    """
    data = np.ascontiguousarray(raw).reshape(-1)
    if dtype == "bfloat16":
        widened = data.view(np.uint16).astype(np.uint32) << 16  # bfloat16 is the upper half of float32
        with np.errstate(invalid="ignore"):  # a signalling NaN is a NaN like any other here
            return widened.view(np.float32).astype(np.float64)
    if dtype in _EIGHT_BITS:
        eight_bits: Array = _eight_bit_table(dtype)[data]
        return eight_bits
    if dtype == "float8_e8m0fnu":
        return np.where(data == 255, np.nan, np.ldexp(1.0, data.astype(np.int64) - 127))
    if dtype == "float4_e2m1fn_x2":
        table = np.array([*_FLOAT4, *(-value for value in _FLOAT4)])
        return np.stack([table[data & 15], table[data >> 4]], axis=1).reshape(-1)
    if dtype == "complex32":
        halves = data.view(np.float16).astype(np.float64)
        return halves[0::2] + 1j * halves[1::2]
    numbers: Array = data.view(dtype)
    if numbers.dtype.kind == "c":
        return numbers.astype(np.complex128)
    return numbers.astype(np.float64) if numbers.dtype.kind == "f" else numbers


@lru_cache
def _eight_bit_table(dtype: str) -> Array:
    exponent_bits, mantissa_bits, bias, special = _EIGHT_BITS[dtype]
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + mantissa, exponent - bias)
    table: Array = sign * np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), normal)
    if special == "nan is minus zero":
        table[0x80] = np.nan
    elif special == "nan at the end":
        table[[0x7F, 0xFF]] = np.nan
    else:
        largest = exponent == (1 << exponent_bits) - 1
        table[largest] = np.where(mantissa[largest] == 0, sign[largest] * np.inf, np.nan)
    return table
