"""Live containers take the content of saved ones and stay the objects that others hold."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np

from ..errors import UnsupportedStateError
from .values import encode_values

_REFILLED = (dict, OrderedDict, defaultdict, Counter, list, set, bytearray, deque)


def can_refill(live: Any, saved: Any) -> bool:
    """Whether a live container or array can take the content of a saved one and be exactly it."""
    if isinstance(live, np.ndarray):
        same = type(live) is type(saved) and live.dtype == saved.dtype and live.shape == saved.shape
        return same and live.flags.writeable
    if isinstance(live, deque) and isinstance(saved, deque) and live.maxlen != saved.maxlen:
        return False
    return type(live) is type(saved) and type(live) in _REFILLED


def put_all(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Set every item. `update` is no help: that of Counter adds, and that of dict loses the order of an OrderedDict."""
    for key, item in items.items():
        target[key] = item


class Refill:
    """Gives live containers the content of saved ones, inner containers too, so that other references see it.

    Two places of the live state can hold one container where the saved ones differed: the second place then gets a
    container of its own.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, tuple[Any, Any]] = {}

    def claims(self, live: Any, saved: Any) -> bool:
        """Whether a live container is still free, or promised the very same content already."""
        _, promised = self._claimed.setdefault(id(live), (live, saved))
        if promised is saved:
            return True
        try:
            return encode_values([promised]) == encode_values([saved])
        except UnsupportedStateError:
            return False

    def fill(self, live: Any, saved: Any) -> None:
        """Give a claimed container its content."""
        if isinstance(live, np.ndarray):
            live[...] = saved
        elif isinstance(live, dict):
            items = {key: self._renewed(live.get(key), value) for key, value in saved.items()}
            live.clear()
            put_all(live, items)
            if isinstance(live, defaultdict):
                live.default_factory = saved.default_factory
        elif isinstance(live, (list, deque)):
            old = list(live)
            new = [self._renewed(old[i] if i < len(old) else None, value) for i, value in enumerate(saved)]
            live.clear()
            live.extend(new)
        elif isinstance(live, set):
            live.clear()
            live.update(saved)
        else:
            live[:] = saved

    def _renewed(self, live: Any, saved: Any) -> Any:
        if not can_refill(live, saved) or not self.claims(live, saved):
            return saved
        self.fill(live, saved)
        return live
