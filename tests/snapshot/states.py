"""A small trainer, slots without an agent, and a gate that holds copies back; for the tests of snapshots."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stepwell.snapshot.slot import Slot
from stepwell.state import Flat, flatten
from stepwell.store import layout as layouts
from stepwell.store.layout import Layout


class Trainer:
    """A model whose two weights are large enough to be lazy, and its optimizer; deterministic."""

    def __init__(self, seed: int = 0, **options: Any) -> None:
        self.random = torch.Generator().manual_seed(seed)
        torch.set_num_threads(1)  # no waiting for a busy core
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.Linear(256, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, **options)
        self.state = {"model": self.model, "optim": self.optimizer}

    def backward(self) -> None:
        self.optimizer.zero_grad()
        data = torch.randn(16, 128, generator=self.random)
        self.model(data).square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, by the names they are stored under."""
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optim.state.{name}.{key}"] = value.clone()
        return found


def stored(loaded: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What `stepwell.load` gave for the state of a `Trainer`, by name."""
    found = {f"model.{name}": value for name, value in loaded["model"].items()}
    for name, parts in loaded["optim"]["state"].items():
        found.update({f"optim.state.{name}.{key}": value for key, value in parts.items()})
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names and, bit for bit, the same tensors."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not same_bits(found[name], expected[name])]
    assert not different, different


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(t.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


@contextmanager
def slot_of(state: Any) -> Iterator[tuple[Flat, Layout, Slot]]:
    """A state's layout and a touched slot for it, as an agent would have made it."""
    flat = flatten(state)
    layout = layouts.build(flat.names, flat.specs, flat.alias_of, flat.skeleton, values_bytes_max=4096)
    fd = os.memfd_create("slot")
    os.ftruncate(fd, layout.slot_bytes(4096))
    slot = Slot(0, fd, layout.slot_bytes(4096), fresh=False)
    try:
        yield flat, layout, slot
    finally:
        slot.drop()


class Gate:
    """Stands in for `memmove`: holds every copy back until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.under_way = 0
        self._lock = threading.Lock()

    def __call__(self, destination: int, source: int, size: int) -> None:
        self.pass_through(lambda: ctypes.memmove(destination, source, size))

    def pass_through(self, work: Callable[[], object]) -> None:
        """Do the work as soon as the gate is open."""
        with self._lock:
            self.under_way += 1
        self.entered.set()
        assert self.open.wait(60), "nobody opened the gate"
        work()
        with self._lock:
            self.under_way -= 1
