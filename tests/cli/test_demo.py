"""What `stepwell demo` hands on; the demo itself has tests of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command


@pytest.mark.parametrize("code", [0, 1])
def test_arguments_and_exit_code_are_handed_on(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    calls = []

    def run(folder: Path | None, **options: Any) -> int:
        calls.append((folder, options))
        return code

    monkeypatch.setattr("stepwell.demo.story.run", run)
    assert command("demo", tmp_path, "--steps", 40, "--json").code == code
    [(folder, options)] = calls
    assert folder == tmp_path
    assert options == {"json": True, "steps": 40, "save_every": 5}


def test_a_folder_that_is_not_the_demos_is_left_alone(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "thesis.tex").write_text("mine")
    outcome = command("demo", tmp_path)
    assert outcome.code == 2
    assert "not the demo's own" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
