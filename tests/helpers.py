"""Small states whose every tensor holds the step number, and what tests of real agents need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    """Every tensor is filled with the step number: a mixture of steps cannot hide."""
    return {
        "model": {f"layer{i}": np.full(size, step, dtype=np.float32) for i in range(4)},
        "epoch": step,
        "history": list(range(step)),
    }


def assert_is_step(state: dict[str, Any], step: int) -> None:
    assert state["epoch"] == step
    assert state["history"] == list(range(step))
    for array in state["model"].values():
        assert (array == step).all()


def agents_of(folder: Path) -> list[psutil.Process]:
    """Agents that serve a run at or below this folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if any("stepwell.agent" in part for part in command) and any(str(folder) in part for part in command):
            found.append(process)
    return found


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll a condition; fails the test when it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still false after {seconds} s"
        time.sleep(0.01)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def pack_of(run: Path, key: str) -> Path:
    return next((run / "steps" / key).glob("*.safetensors"))


def flip_byte(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))
