"""Stepwell keeps the state of deep-learning training runs: a save costs milliseconds, and what is accepted is kept.

    import stepwell

    with stepwell.Checkpointer("runs/gpt", save_when=stepwell.Every(minutes=10)) as ckpt:
        restored = ckpt.restore(state)
        for step in range(restored.step + 1 if restored else 0, total):
            ...
            ckpt.save_if_due(step, state)

Importing this package imports neither torch nor numpy; each name below is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Checkpointer": "stepwell.checkpointer",
    "Save": "stepwell.checkpointer",
    "Restored": "stepwell.checkpointer",
    "load": "stepwell.restore.load",
    "steps": "stepwell.restore.load",
    "Keep": "stepwell.policies",
    "Every": "stepwell.policies",
    "Best": "stepwell.policies",
    "Overhead": "stepwell.policies",
    "LossPlateau": "stepwell.policies",
    "AnyOf": "stepwell.policies",
    "AllOf": "stepwell.policies",
    "StepwellError": "stepwell.errors",
}

if TYPE_CHECKING:
    from stepwell.checkpointer import Checkpointer, Restored, Save
    from stepwell.errors import StepwellError
    from stepwell.policies import AllOf, AnyOf, Best, Every, Keep, LossPlateau, Overhead
    from stepwell.restore.load import load, steps

__all__ = [
    "AllOf",
    "AnyOf",
    "Best",
    "Checkpointer",
    "Every",
    "Keep",
    "LossPlateau",
    "Overhead",
    "Restored",
    "Save",
    "StepwellError",
    "__version__",
    "load",
    "steps",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
