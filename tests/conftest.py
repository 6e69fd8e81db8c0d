"""No agent survives a test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers import agents_of

# A shell starts what it puts into the background with SIGINT ignored; the tests send themselves Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder for a run; agents that a test leaves lingering there are ended, by their process id."""
    yield tmp_path / "run"
    for process in agents_of(tmp_path):
        process.kill()
        process.wait(10)
