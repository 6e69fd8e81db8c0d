"""Runs to look at, made once and copied for each test, and a way to call the command in this process."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import stepwell
from stepwell.cli import stepwell as group


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


# For commands in processes of their own: they find this very package, installed or not.
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(stepwell.__file__))}

Command = Callable[..., Outcome]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Call `stepwell` with arguments; `columns=80` sets the width of the terminal."""

    def call(*arguments: object, columns: int | None = None) -> Outcome:
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        result = CliRunner().invoke(group, [str(one) for one in arguments], prog_name="stepwell")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.stderr
        return Outcome(result.exit_code, result.stdout, result.stderr)

    return call


def make_state(step: int) -> dict[str, Any]:
    """Every tensor says which step it is from, but for one that never changes."""
    return {
        "model": {f"layers.{i}.weight": np.full((8, 32), step + i, dtype=np.float32) for i in range(3)},
        "frozen": np.arange(10, dtype=np.int64),
        "epoch": step // 100,
        "name": "gpt",
        "losses": [1 / (1 + at) for at in range(step // 100)],
    }


def _save(checkpointer: stepwell.Checkpointer, *steps: int) -> None:
    for step in steps:
        metrics = {"loss": 100 / step, "accuracy": step / 1000}
        checkpointer.save(step, make_state(step), metrics=metrics).wait()


@pytest.fixture(scope="session")
def branchy_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 100 to 500 of attempt 1; attempt 2 went back to 300 and saved 400 and 450."""
    run = tmp_path_factory.mktemp("cli") / "gpt"
    keep = stepwell.Keep(last=99)
    with stepwell.Checkpointer(run, keep=keep) as checkpointer:
        _save(checkpointer, 100, 200, 300, 400, 500)
    with stepwell.Checkpointer(run, keep=keep) as checkpointer:
        restored = checkpointer.restore(make_state(0), step=300)
        assert restored is not None
        _save(checkpointer, 400, 450)
    return run


@pytest.fixture
def branchy(branchy_original: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged at will."""
    return Path(shutil.copytree(branchy_original, tmp_path / "gpt"))


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A run that was opened and closed without a save."""
    with stepwell.Checkpointer(tmp_path / "empty"):
        pass
    return tmp_path / "empty"
