"""Differences of tensors, computed without torch and compared with what torch says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stepwell.cli._numbers import decoded, magnitudes
from stepwell.state import ITEM_BYTES


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(array).tobytes())


@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16"],
)
def test_every_code_of_a_small_float_means_what_torch_says(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    size = ITEM_BYTES[dtype]
    codes = np.arange(256**size, dtype=f"u{size}").view(np.uint8)
    expected = torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(decoded(dtype, codes.reshape(-1, size)), expected)


def test_float4_gives_two_numbers_for_each_byte() -> None:
    found = decoded("float4_e2m1fn_x2", np.array([[0x7F], [0x21]], dtype=np.uint8))
    assert found.tolist() == [-6.0, 6.0, 0.5, 1.0]


def test_complex32() -> None:
    halves = np.array([1.0, -2.0, 0.5, 0.0], dtype=np.float16).view(np.uint8).reshape(-1, 4)
    assert decoded("complex32", halves).tolist() == [1 - 2j, 0.5]


@pytest.mark.parametrize(
    ("dtype", "a", "b", "largest"),
    [
        ("int8", [-128, 5], [127, 5], 255.0),
        ("uint8", [0, 5], [255, 6], 255.0),
        ("int64", [-(2**63)], [2**63 - 1], float(2**64 - 1)),
        ("uint64", [2**64 - 1], [0], float(2**64 - 1)),
        ("int16", [3, 3], [3, 1], 2.0),
        ("float64", [1e308], [-1e308], float("inf")),
        ("complex64", [3 + 4j], [0], 5.0),
    ],
)
def test_the_largest_difference(dtype: str, a: list[Any], b: list[Any], largest: float) -> None:
    found = magnitudes(dtype, raw(np.array(a, dtype=dtype)), raw(np.array(b, dtype=dtype)))
    assert found.largest == largest


def test_counts() -> None:
    a = np.array([0.0, np.nan, np.nan, 1.0, -0.0], dtype=np.float32)
    b = np.array([0.0, np.nan, 5.0, 1.5, 0.0], dtype=np.float32)
    found = magnitudes("float32", raw(a), raw(b))
    assert (found.count, found.not_finite_count, found.largest) == (3, 1, 0.5)


def test_truth_values_have_a_count_only() -> None:
    found = magnitudes("bool", raw(np.array([True, False])), raw(np.array([True, True])))
    assert (found.count, found.largest) == (1, None)


def test_equal_bytes() -> None:
    data = raw(np.arange(3.0))
    found = magnitudes("float64", data, data)
    assert (found.count, found.not_finite_count, found.largest) == (0, 0, None)


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
def test_every_dtype_that_can_be_stored_can_be_compared(dtype: str) -> None:
    size = ITEM_BYTES[dtype]
    found = magnitudes(dtype, memoryview(bytes(4 * size)), memoryview(bytes(3 * size) + b"\x01" * size))
    assert found.count == 1
