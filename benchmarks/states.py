"""The states that are saved: (a) few large tensors, (b) many small ones, (c) a model in training."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from stepwell.demo.train import build

StateDict = dict[str, Any]

_LAYER_SHAPES = [(3072, 1024), (1024, 1024), (4096, 1024), (1024, 4096), (1024,), (1024,), (4096,), (4096,)]
_LAYERS = 16
_SMALL_TENSORS = 20_000
_SMALL_ELEMENTS = 1024


class State(Protocol):
    """A state as the contestants see it."""

    @property
    def byte_count(self) -> int:
        """Bytes of all tensors."""

    def for_peers(self) -> StateDict:
        """Nested dicts of tensors, made anew for each save as a training script would."""

    def for_stepwell(self, *, lazy: bool) -> StateDict:
        """What a training script hands to `Checkpointer.save`."""

    def train_step(self) -> None:
        """One training step: forward, backward, `optimizer.step()`."""


@dataclass(frozen=True)
class TensorsSpec:
    """Shapes of a state of plain fp32 tensors, and the shared memory that holds them."""

    shapes: dict[str, tuple[int, ...]]
    path: str

    @property
    def byte_count(self) -> int:
        return 4 * sum(int(np.prod(shape)) for shape in self.shapes.values())


def large_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """384 fp32 tensors, 2.42 GB: 16 transformer layers (p) with Adam's two moments (m, v)."""
    layers = max(1, round(_LAYERS * scale))
    names = [(kind, layer, index) for layer in range(layers) for index in range(len(_LAYER_SHAPES)) for kind in "pmv"]
    return {f"{kind}.{layer}.{index}": _LAYER_SHAPES[index] for kind, layer, index in names}


def small_shapes(scale: float) -> dict[str, tuple[int, ...]]:
    """20 000 tensors of 4 KiB."""
    return {f"t.{index}": (_SMALL_ELEMENTS,) for index in range(max(1, round(_SMALL_TENSORS * scale)))}


class SharedTensors:
    """The bytes of a state of plain tensors, made once and mapped by every contestant's process.

    So a fresh process has its state at once, already in memory, and the state itself is in nobody's figures.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._fd = os.memfd_create("benchmark-state")
        self.spec = TensorsSpec(shapes, f"/proc/{os.getpid()}/fd/{self._fd}")
        os.ftruncate(self._fd, _mapped_bytes(self.spec))
        Tensors(self.spec).fill()

    def close(self) -> None:
        os.close(self._fd)


def _mapped_bytes(spec: TensorsSpec) -> int:
    # Each tensor starts at a cache line, as the allocator would have it.
    return sum(-(-4 * int(np.prod(shape)) // 64) * 64 for shape in spec.shapes.values())


class Tensors:
    """Plain tensors that nothing trains; each has its own storage."""

    def __init__(self, spec: TensorsSpec) -> None:
        fd = os.open(spec.path, os.O_RDWR)
        self._memory = mmap.mmap(fd, _mapped_bytes(spec), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        os.close(fd)
        self.byte_count = spec.byte_count
        self.tensors: dict[str, torch.Tensor] = {}
        offset = 0
        for name, shape in spec.shapes.items():
            count = int(np.prod(shape))
            flat = torch.frombuffer(self._memory, dtype=torch.float32, count=count, offset=offset)
            self.tensors[name] = flat.view(shape)
            offset += -(-4 * count // 64) * 64
        self._optimizer: torch.optim.Optimizer | None = None

    def for_peers(self) -> StateDict:
        return dict(self.tensors)

    def for_stepwell(self, *, lazy: bool) -> StateDict:
        if not lazy:
            return dict(self.tensors)
        optimizer = self._make_optimizer()
        return {"model": self._module, "optim": optimizer}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """The same tensors as parameters of a real optimizer: only those may be copied after `save` has returned."""
        if self._optimizer is None:
            self._module = torch.nn.Module()
            parameters = {}
            for name in (name for name in self.tensors if name.startswith("p.")):
                parameters[name] = torch.nn.Parameter(self.tensors[name])
                self._module.register_parameter(name.replace(".", "_"), parameters[name])
            self._optimizer = torch.optim.Adam(parameters.values())
            for name, parameter in parameters.items():
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(1.0),
                    "exp_avg": self.tensors["m" + name[1:]],
                    "exp_avg_sq": self.tensors["v" + name[1:]],
                }
            # A training loop has stepped before it saves; the first step of a process imports much of torch.
            self._optimizer.step()
        return self._optimizer

    def train_step(self) -> None:
        """Several times as long as a copy takes, as if an accelerator computed; then a step that finds no gradients."""
        time.sleep(0.01 + self.byte_count / 2e9)
        self._make_optimizer().step()

    def fill(self) -> None:
        """Write the values that `matches` expects."""
        for name, expected in self._expected():
            self.tensors[name].view(-1).copy_(expected)

    def clear(self) -> None:
        """Zero everything, so that a restore has something to do."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def matches(self) -> bool:
        """Whether every tensor holds what `fill` wrote."""
        return all(torch.equal(self.tensors[name].view(-1), expected) for name, expected in self._expected())

    def _expected(self) -> Any:
        longest = max(tensor.numel() for tensor in self.tensors.values())
        noise = torch.from_numpy(np.random.default_rng(7).random(longest + 65_536, dtype=np.float32))
        for index, (name, tensor) in enumerate(self.tensors.items()):
            start = index * 131 % 65_536
            yield name, noise[start : start + tensor.numel()]


class Training:
    """The demo's GPT, larger, with Adam: it learns while it is saved, on all cores, one step longer than a copy."""

    def __init__(self, scale: float) -> None:
        self._training = build(layers=max(1, round(8 * scale)), width=512, heads=8, context=128, batch=2)
        for _ in range(3):
            self.train_step()
        self.byte_count = sum(tensor.nbytes for tensor in flat_tensors(self.for_peers()).values())

    def for_peers(self) -> StateDict:
        return {"model": self._training.model.state_dict(), "optim": self._training.optimizer.state_dict()}

    def for_stepwell(self, *, lazy: bool) -> StateDict:
        return {"model": self._training.model, "optim": self._training.optimizer}

    def train_step(self) -> None:
        self._training.train_step()


def flat_tensors(nested: Any) -> dict[str, torch.Tensor]:
    """The tensors of nested dicts and lists under dotted names, tied ones once; other values are left out."""
    found: dict[str, torch.Tensor] = {}
    seen = set()

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor) and value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                collect(item, f"{name}.{key}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                collect(item, f"{name}.{index}")

    collect(nested, "state")
    return found
