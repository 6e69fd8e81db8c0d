"""No agent survives a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers import agents_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder for a run; agents that a test leaves lingering there are ended, by their process id."""
    yield tmp_path / "run"
    for process in agents_of(tmp_path):
        process.kill()
        process.wait(10)
