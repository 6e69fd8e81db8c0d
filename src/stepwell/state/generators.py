"""Random number generators: the global ones, and those that a user keeps in the state."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np


def kind_of(value: Any) -> str | None:
    """The name under which a generator object is stored, None for anything else."""
    kind = type(value)
    if kind is random.Random:
        return "random.Random"
    if kind is np.random.Generator:
        return "numpy.random.Generator"
    if kind is np.random.RandomState:
        return "numpy.random.RandomState"
    if "torch" in sys.modules:
        from . import torch_state

        if torch_state.is_generator(value):
            return "torch.Generator"
    return None


def state_of(generator: Any) -> dict[str, Any]:
    """The state of a generator object as plain values."""
    kind = kind_of(generator)
    if kind == "random.Random":
        return {"state": generator.getstate()}
    if kind == "numpy.random.Generator":
        return {"state": generator.bit_generator.state}
    if kind == "numpy.random.RandomState":
        return {"state": generator.get_state(legacy=False)}
    from . import torch_state

    return torch_state.generator_state(generator)


def put_back(generator: Any, state: dict[str, Any]) -> None:
    """Give a generator object the state that `state_of` returned."""
    kind = kind_of(generator)
    if kind == "random.Random":
        generator.setstate(state["state"])
    elif kind == "numpy.random.Generator":
        generator.bit_generator.state = state["state"]
    elif kind == "numpy.random.RandomState":
        generator.set_state(state["state"])
    else:
        from . import torch_state

        torch_state.set_generator_state(generator, state)


def why_not(generator: Any, state: Any) -> str | None:
    """Why a stored state does not fit a generator, or None when it does."""
    try:
        if kind_of(generator) == "torch.Generator":
            saved, live = state["device"], generator.device.type
        elif isinstance(generator, np.random.Generator):
            saved, live = state["state"]["bit_generator"], type(generator.bit_generator).__name__
        elif isinstance(generator, np.random.RandomState):
            saved, live = state["state"]["bit_generator"], generator.get_state(legacy=False)["bit_generator"]
        else:
            saved, live = len(state["state"]), len(generator.getstate())
    except (TypeError, KeyError):
        return "its stored state is none"
    return None if saved == live else f"expected the state of a {live} generator, found that of a {saved} one"


def capture_global() -> dict[str, Any]:
    """The states of the global generators of Python, numpy and torch (accelerators in use included)."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    if "torch" in sys.modules:
        from . import torch_state

        states.update(torch_state.rng_states())
    return states


def restore_global(states: dict[str, Any]) -> None:
    """Put back what `capture_global` gave; torch's only where this process uses torch."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "torch" in sys.modules and "torch" in states:
        from . import torch_state

        torch_state.set_rng_states(states)
