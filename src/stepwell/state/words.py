"""How names, tensors and types are written in messages."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .spec import array_dtype


def join(name: str, step: str) -> str:
    """The dotted name of a step below a name."""
    return f"{name}.{step}" if name else step


def noun(word: str) -> str:
    """A word with its article."""
    return f"{'an' if word[:1] in 'aeiouAEIOU' else 'a'} {word}"


def shown(name: str) -> str:
    """A dotted name in quotes; the top of the state has none."""
    return repr(name) if name else "the state"


def dtype_of(tensor: Any) -> str:
    """The dtype name of a live tensor or array, as specs have it."""
    if isinstance(tensor, np.ndarray):
        return array_dtype(tensor) or str(tensor.dtype)
    return _torch_dtype_name(tensor.dtype)


@lru_cache(maxsize=256)
def _torch_dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def tensor_text(tensor: Any) -> str:
    """Dtype and shape of a live tensor, `float32[3, 4]`."""
    return f"{dtype_of(tensor)}{list(tensor.shape)}"
